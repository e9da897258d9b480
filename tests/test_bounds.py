"""Classes, folders and names stay small enough to hold in the head: counted in the syntax tree of both packages.

What is beyond a bound today is named with its figure, which may only fall.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "hvdlite", ROOT / "launcher")

METHODS = 35
ATTRIBUTES = 20
ARGUMENTS = 8
MODULES = 18
# Of both packages together; the lines may only fall.
ALL_MODULES = 290
ALL_LINES = 59_500

# Over a class's whole ancestry of ours. Those of the wrapped optimizer mirror torch's.
MANY_METHODS = {
    "AveragingOptimizer": 37,
    "DistributedOptimizer": 40,
}
MANY_ATTRIBUTES: dict[str, int] = {}
# Public signatures, whose arguments Horovod's users know, and others.
MANY_ARGUMENTS = {
    "DistributedOptimizer": 18,
    "Group": 9,
    "RayExecutor": 14,
    "SyncBatchNorm": 9,
}
MANY_MODULES = {}
# `hvd.Compression` and `horovod.torch.Compression`.
TWICE = {"Compression": 2}


class Definition(NamedTuple):
    file: str
    tree: ast.ClassDef


@cache
def classes() -> dict[str, list[Definition]]:
    """Returns all classes of both packages by name. Protocols may have the name of what they describe."""
    found: dict[str, list[Definition]] = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
                found[node.name].append(Definition(str(path.relative_to(ROOT)), node))
    return dict(found)


def each_class() -> Iterator[tuple[str, list[ast.ClassDef]]]:
    """Yields the name of each class, and its definition with those of its ancestors that are ours."""
    for name, definitions in classes().items():
        for each in definitions:
            yield name, list(ancestry(each.tree))


def ancestry(tree: ast.ClassDef) -> Iterator[ast.ClassDef]:
    yield tree
    for base in tree.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name != tree.name and len(classes().get(name, ())) == 1:
            yield from ancestry(classes()[name][0].tree)


def beyond(counts: Iterator[tuple[str, int]], bound: int) -> dict[str, int]:
    """Returns those above the bound; of equal names the largest."""
    largest: dict[str, int] = defaultdict(int)
    for name, count in counts:
        largest[name] = max(largest[name], count)
    return {name: count for name, count in largest.items() if count > bound}


def methods_of(trees: list[ast.ClassDef]) -> int:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return len({node.name for tree in trees for node in tree.body if isinstance(node, functions)})


def attributes_of(trees: list[ast.ClassDef]) -> int:
    """Counts what is assigned to ``self``."""
    return len(
        {
            node.attr
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    )


def arguments_of(tree: ast.ClassDef) -> int:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
    return 0


def modules_by_folder() -> Iterator[tuple[str, int]]:
    for package in PACKAGES:
        for folder in {path.parent for path in package.rglob("*.py")}:
            yield str(folder.relative_to(ROOT)), len([path for path in folder.glob("*.py") if path.stem != "__init__"])


@pytest.mark.parametrize(
    ("counts", "bound", "known"),
    [
        (lambda: ((name, methods_of(trees)) for name, trees in each_class()), METHODS, MANY_METHODS),
        (lambda: ((name, attributes_of(trees)) for name, trees in each_class()), ATTRIBUTES, MANY_ATTRIBUTES),
        (lambda: ((name, arguments_of(trees[0])) for name, trees in each_class()), ARGUMENTS, MANY_ARGUMENTS),
        (modules_by_folder, MODULES, MANY_MODULES),
        (lambda: ((name, len(each)) for name, each in classes().items()), 1, TWICE),
    ],
    ids=["methods", "attributes", "arguments of constructors", "modules in a folder", "classes of one name"],
)
def test_nothing_grows_beyond_what_one_can_hold_in_the_head(counts, bound, known):
    found = beyond(counts(), bound)
    assert found == known, "what has become smaller is noted here; what has grown is cut"


def test_both_packages_together_stay_light():
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert len(files) <= ALL_MODULES
    assert sum(len(path.read_text().splitlines()) for path in files) <= ALL_LINES
