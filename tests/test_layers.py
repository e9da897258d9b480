"""Modules import only what stands before them, and the two packages share no code."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import hvdlite_launcher
import pytest

import hvdlite

LIBRARY = [
    "errors", "environment", "log", "launch", "client", "call", "store", "topology", "address", "nodelist",
    "neighbours", "pmi", "pmix", "rendezvous", "plan", "bucket", "codec", "compression", "engine", "gpuwatch",
    "recorder", "collective", "handle", "request", "conductor", "in_order", "mailbox", "mismatch", "pending",
    "stall", "callers", "negotiation", "coordinator", "negotiator", "connect", "clocks", "parts", "timeline",
    "process_set", "registry", "farewell", "world", "process_sets", "built", "fusion", "adasum", "reduction",
    "submission", "combining", "join", "moving", "asynchronous", "gradients", "tracing", "operations", "replicate",
    "sparse", "layout", "tracks", "wire", "params", "reducer", "deltas", "arguments", "proxy", "optimizer",
    "moments", "batch_norm", "links", "communicator", "__init__", "torch",
]  # fmt: skip
LAUNCHER_ORDER = ["hosts", "plan", "remote", "agent", "output", "supervise", "cli"]


@functools.cache
def sources(package: object) -> dict[str, ast.Module]:
    directory = Path(package.__file__).parent
    return {path.stem: ast.parse(path.read_text()) for path in directory.glob("*.py")}


def own_imports(tree: ast.Module) -> set[str]:
    return {
        node.module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }


def foreign_imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_module_of_the_library_has_its_place_in_the_order():
    assert sorted(sources(hvdlite)) == sorted(LIBRARY)


@pytest.mark.parametrize("module", LIBRARY)
def test_a_module_of_the_library_imports_only_what_stands_before_it(module):
    before = set(LIBRARY[: LIBRARY.index(module)])
    assert own_imports(sources(hvdlite)[module]) <= before


def test_the_order_that_the_library_states_is_the_tested_one():
    stated = hvdlite.__doc__.split("stand before them:" if "stand before them:" in hvdlite.__doc__ else "before them:")
    assert stated[1].partition("\n\nNone")[0].replace("<", " ").split() == LIBRARY[: LIBRARY.index("__init__")]


def test_the_shim_imports_what_hvdlite_has_and_torch():
    for path in Path(hvdlite.__file__).with_name("horovod").rglob("*.py"):
        foreign = foreign_imports(ast.parse(path.read_text()))
        assert foreign <= {"torch", "hvdlite"} | sys.stdlib_module_names, path


def test_the_library_imports_torch_and_the_standard_library_alone():
    # The one crossing to the launcher, and what brings a caller's own classes to a worker; both when they are used.
    exceptions = {"launch": {"hvdlite_launcher"}, "call": {"cloudpickle"}}
    for module, tree in sources(hvdlite).items():
        allowed = {"torch", *exceptions.get(module, ())}
        assert foreign_imports(tree) <= allowed | sys.stdlib_module_names, module


@pytest.mark.parametrize("module", LAUNCHER_ORDER)
def test_the_launcher_keeps_its_one_direction(module):
    after = set(LAUNCHER_ORDER[LAUNCHER_ORDER.index(module) + 1 :])
    assert not own_imports(sources(hvdlite_launcher)[module]) & after


def test_the_launcher_imports_neither_torch_nor_hvdlite():
    for module, tree in sources(hvdlite_launcher).items():
        assert not foreign_imports(tree) & {"torch", "hvdlite"}, module


def test_importing_hvdlite_sets_up_nothing():
    program = (
        "import logging, sys, torch.distributed as dist; before = sys.excepthook; import hvdlite; "
        "assert sys.excepthook is before and not dist.is_initialized() and not logging.root.handlers; "
        "assert not {'hvdlite_launcher', 'cloudpickle'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
