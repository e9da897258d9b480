"""Compares states of optimizers: dicts and sequences of tensors and values, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same(value, right[key])
    elif isinstance(left, (list, tuple)):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right
