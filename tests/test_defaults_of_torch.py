"""The library's own tensors depend on neither `torch.set_default_device` nor `torch.set_default_dtype`."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_call import run_all
from torch.utils._device import _device_constructors
from worlds import PLAIN, run_worlds

import hvdlite

# The program's numbers, whose dtype is what is looked at.
EXCEPTIONS = {("ops/rows.py", "torch.tensor(splits, device='cpu')")}


def test_every_tensor_that_the_library_makes_names_its_device_and_dtype():
    makers = {function.__name__ for function in _device_constructors()}
    root = Path(hvdlite.__file__).parent
    without, seen = [], 0
    for path in sorted(root.rglob("*.py")):
        module = str(path.relative_to(root))
        if module.startswith("bench/"):
            continue  # programs of their own
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not makers & {alias.name for alias in node.names}, f"{module}: write torch.{node.names[0].name}"
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {f"torch.{name}" for name in makers}:
                continue
            seen += 1
            given = {keyword.arg for keyword in node.keywords}
            if not {"device", "dtype"} <= given and (module, ast.unparse(node)) not in EXCEPTIONS:
                without.append(f"hvdlite/{module}:{node.lineno}: {ast.unparse(node)}")
    assert not without, "name device= and dtype= in\n" + "\n".join(without)
    assert seen > 50


@pytest.mark.parametrize(("engine", "check"), [("gloo", True), ("shared memory", False)])
def test_everything_works_with_the_meta_device_as_default(engine, check, tmp_path):
    def rank(own: int) -> None:
        with torch.device("meta"):
            run_all(tmp_path)

    # Without the check collectives run in the thread that has the default.
    run_worlds(2, rank, replace(PLAIN, check=check), engine=engine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_everything_works_with_another_default_dtype(dtype, tmp_path):
    torch.set_default_dtype(dtype)
    try:
        run_worlds(2, lambda own: run_all(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
