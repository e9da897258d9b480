"""The launcher's modules import in one direction only, have distinct names, and need few packages."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hvdlite_launcher

ROOT = Path(hvdlite_launcher.__file__).parent


def stated_order(docstring):
    """Returns the names of ``a < b < c`` in a docstring."""
    (block,) = [block for block in docstring.split("\n\n") if " < " in block]
    return block.replace("<", " ").split()


def ordered_modules():
    """Returns every module by its dotted name, in the order that the docstrings state."""
    for name in stated_order(hvdlite_launcher.__doc__):
        package = ROOT / name / "__init__.py"
        if package.exists():
            docstring = ast.get_docstring(ast.parse(package.read_text()))
            yield from (f"{name}.{module}" for module in stated_order(docstring))
        else:
            yield name


ORDER = list(ordered_modules())
TREES = {name: ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text()) for name in ORDER}
PACKAGES = {name.partition(".")[0] for name in ORDER if "." in name}


def own_imports(name):
    package = name.split(".")[:-1]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            dotted = ".".join(part for part in base if part)
            yield from [dotted] if dotted in TREES else [f"{dotted}.{alias.name}".lstrip(".") for alias in node.names]


def foreign_imports(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_every_module_has_its_place():
    there = {path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py")}
    # A worker's interpreter imports host/path/sitecustomize, and no module does.
    others = ("__init__", "__main__", "sitecustomize")
    modules = {".".join(path.parts) for path in there if path.name not in others and path.parts[0] != "hvdlite_wire"}
    assert modules == set(ORDER)
    assert len(ORDER) == len(TREES)


def test_modules_import_only_what_stands_before_them():
    wrong = [
        f"{name} imports {module}"
        for place, name in enumerate(ORDER)
        for module in own_imports(name)
        if module not in ORDER[:place]
    ]
    assert wrong == []


def test_no_file_name_occurs_twice():
    names = Counter([name.rpartition(".")[2] for name in ORDER] + sorted(PACKAGES))
    assert [name for name, count in names.items() if count > 1] == []


def test_packages_import_nothing_when_they_are_imported():
    for package in PACKAGES:
        (docstring,) = ast.parse((ROOT / package / "__init__.py").read_text()).body
        assert isinstance(docstring, ast.Expr), package


def test_every_package_is_in_the_wheel():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r'^    "hvdlite_launcher\.(\w+)",$', pyproject, re.MULTILINE)) == PACKAGES


def test_tests_lie_in_the_folder_of_what_they_test():
    here = Path(__file__).parent
    folders = {path.parent.relative_to(here).parts for path in here.rglob("test_*.py") if path != Path(__file__)}
    assert folders <= {(package,) for package in PACKAGES}


def test_the_launcher_needs_the_standard_library_hvdlite_wire_and_psutil_alone():
    # The standard library has no YAML, cannot pickle functions of a notebook, and draws no tables; these packages are
    # imported only on use.
    exceptions = {"cli.config_file": {"yaml"}, "cli.caller": {"cloudpickle"}, "status.live_view": {"rich"}}
    for name in ORDER:
        needed = set(foreign_imports(name))
        assert needed - sys.stdlib_module_names <= {"psutil", "hvdlite_wire"} | exceptions.get(name, set()), name


def test_a_plain_job_pays_for_neither_yaml_nor_pickling():
    program = (
        "import sys, hvdlite_launcher.cli.hvdlite_run; "
        "assert not {'yaml', 'cloudpickle', 'pickle', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_an_agent_pays_for_nothing_that_only_the_launcher_needs():
    program = (
        "import sys, hvdlite_launcher.host.remote_parent; "
        "needless = {'psutil', *(f'hvdlite_launcher.plan.{name}' for name in ('hosts', 'ssh'))}; "
        "assert not needless & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
