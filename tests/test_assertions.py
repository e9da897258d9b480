"""No assertion has an effect, so that programs run the same under ``python -O``, which leaves them out."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import hvdlite_launcher
import pytest

import hvdlite

# Functions and methods that change nothing, whatever they are called on here.
PURE = {"isinstance", "len", "sum", "data_ptr", "is_contiguous", "numel"}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [path for each in (hvdlite, hvdlite_launcher) for path in sorted(Path(each.__file__).parent.rglob("*.py"))]
    return [(str(path), ast.parse(path.read_text())) for path in paths]


def with_effects(condition: ast.expr, acting: set[str]) -> list[str]:
    """Returns what may have an effect in a condition; ``acting`` are names of properties whose bodies call something.

    Everything but names, attributes, constants, operators, subscripts, and calls of what is `PURE`.
    """
    found, methods = [], {id(node.func) for node in ast.walk(condition) if isinstance(node, ast.Call)}
    for node in ast.walk(condition):
        if isinstance(node, ast.Call):
            is_fine = getattr(node.func, "attr", getattr(node.func, "id", "")) in PURE
        elif isinstance(node, ast.Attribute):
            is_fine = node.attr not in acting or id(node) in methods
        else:
            is_fine = not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.comprehension)
        if not is_fine:
            found.append("a comprehension" if isinstance(node, ast.comprehension) else ast.unparse(node))
    return found


def acting_properties(trees: list[ast.Module]) -> set[str]:
    """Returns the names of properties that do more than to return what is there."""
    acting = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and any("property" in ast.dump(each) for each in node.decorator_list):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            has_calls = any(isinstance(each, ast.Call) for statement in body for each in ast.walk(statement))
            is_plain = len(body) == 1 and isinstance(body[0], ast.Return) and not has_calls
            if not is_plain:
                acting.add(node.name)
    return acting


def test_no_assertion_has_an_effect():
    acting = acting_properties([tree for _, tree in modules()])
    assert "param_groups" in acting or "local_rank" in acting, "there are such properties"
    wrong, seen = [], 0
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                seen += 1
                wrong += [f"{path}:{node.lineno}: {each}" for each in with_effects(node.test, acting)]
    assert not wrong, "call it before, and assert its result:\n" + "\n".join(wrong)
    assert seen > 50


@pytest.mark.parametrize(
    "condition", ["self._view_of(state) is not None", "(x := f) is None", "[each for each in all_of_them]", "a.drawn"]
)
def test_the_rule_finds_effects(condition):
    assert with_effects(ast.parse(condition, mode="eval").body, {"drawn"})


def test_nothing_depends_on_docstrings_or_on_whether_there_are_assertions():
    for path, tree in modules():
        for node in ast.walk(tree):
            name = getattr(node, "attr", getattr(node, "id", None))
            assert name not in ("__doc__", "__debug__", "getdoc", "cleandoc"), f"{path}:{node.lineno}"
