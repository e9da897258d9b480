"""Modules import only modules that stand before them, and the two packages share no code but `hvdlite_wire`."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import hvdlite_launcher

import hvdlite


@functools.cache
def sources(package: object) -> dict[str, ast.Module]:
    directory = Path(package.__file__).parent
    return {str(path.relative_to(directory)): ast.parse(path.read_text()) for path in directory.rglob("*.py")}


def stated_order(docstring: str | None) -> list[str]:
    """Returns the names of ``a < b < c`` in a docstring."""
    blocks = [block for block in (docstring or "").split("\n\n") if " < " in block]
    return " ".join(blocks).replace("<", " ").split()


@functools.cache
def library() -> dict[str, ast.Module]:
    """Returns every module of the library but the shim, by its dotted name, in the order that the docstrings state."""
    directory = Path(hvdlite.__file__).parent
    ordered = {}
    for name in [*stated_order(hvdlite.__doc__), "__init__", "torch", "bench"]:
        if (directory / name).is_dir():
            package = ast.parse((directory / name / "__init__.py").read_text())
            names = [f"{name}.{module}" for module in stated_order(ast.get_docstring(package))]
        else:
            names = [name]
        ordered |= {each: ast.parse((directory / f"{each.replace('.', '/')}.py").read_text()) for each in names}
    return ordered


def own_imports(name: str, tree: ast.Module) -> set[str]:
    """Returns the modules of the library that a module imports, by their dotted names."""
    package = name.split(".")[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            if Path(hvdlite.__file__).parent.joinpath(*base).with_suffix(".pyi").exists():
                continue  # a list of names for type checkers
            names = [".".join(base)] if ".".join(base) in library() else [".".join([*base, a.name]) for a in node.names]
            found |= set(names)
    return found


def foreign_imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_module_of_the_library_has_its_place_in_the_order():
    directory = Path(hvdlite.__file__).parent
    there = {path.relative_to(directory).with_suffix("") for path in directory.rglob("*.py")}
    modules = {".".join(path.parts) for path in there if path.parts[0] != "horovod"}
    packages = {f"{package}.__init__" for package in [*stated_order(hvdlite.__doc__), "bench"]}
    assert modules - packages == set(library())


def test_modules_of_the_library_import_only_what_stands_before_them():
    order = list(library())
    for place, (name, tree) in enumerate(library().items()):
        assert own_imports(name, tree) <= {*order[:place], *hvdlite.__all__}, name


def test_the_shim_imports_what_hvdlite_has_and_torch():
    for path in Path(hvdlite.__file__).with_name("horovod").rglob("*.py"):
        foreign = foreign_imports(ast.parse(path.read_text()))
        assert foreign <= {"torch", "hvdlite"} | sys.stdlib_module_names, path


def test_the_library_imports_torch_hvdlite_wire_and_the_standard_library_alone():
    # The only import of the launcher, and cloudpickle for a caller's own functions; both are imported only on use.
    # The benchmark imports what it draws and compares with only on use.
    exceptions = {
        "worker.functions": {"hvdlite_launcher", "cloudpickle"},
        "ops.broadcast": {"cloudpickle"},
        "compression.kernels": {"cupy"},
        "bench.ranks": {"psutil"},
        "debugger": {"debugpy"},
        "job_log": {"psutil"},
        "spark": {"cloudpickle"},
    }
    for module, tree in library().items():
        allowed = {"torch", "hvdlite_wire", *exceptions.get(module, ())}
        assert foreign_imports(tree) <= allowed | sys.stdlib_module_names, module


def test_the_launcher_imports_neither_torch_nor_hvdlite():
    for module, tree in sources(hvdlite_launcher).items():
        assert not foreign_imports(tree) & {"torch", "hvdlite"}, module


def test_importing_hvdlite_sets_up_nothing():
    program = (
        "import logging, sys, torch.distributed as dist; by_torch = set(sys.modules); "
        "before = sys.excepthook; import hvdlite, hvdlite.torch; "
        "assert sys.excepthook is before and not dist.is_initialized() and not logging.root.handlers; "
        "launchers = lambda names: {name for name in names if name.startswith('hvdlite_launcher')}; "
        # Torch imports nothing of hvdlite's where no hvdlite-run has started the process.
        "assert not launchers(by_torch) and not launchers(sys.modules) and 'cloudpickle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_every_package_is_in_the_wheel():
    root = Path(__file__).parents[1]
    listed = set(re.findall(r'^    "(hvdlite(?:\.[\w.]+)?)",$', (root / "pyproject.toml").read_text(), re.MULTILINE))
    folders = {path.parent.relative_to(root) for path in (root / "hvdlite").rglob("*.py")}
    assert listed == {".".join(folder.parts) for folder in folders}
