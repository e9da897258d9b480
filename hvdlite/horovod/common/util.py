"""`horovod.common.util`: the helpers of that module that programs import."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from hvdlite.torch import check_extension

__all__ = [
    "check_extension",
    "extension_available",
    "gpu_available",
    "is_iterable",
    "num_rank_is_power_2",
    "split_list",
]

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework: only PyTorch."""
    return ext_base_name in ("torch", "pytorch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework, and PyTorch finds a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether this number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Splits a list into ``parts`` parts; the first ones have one item more where the lengths differ.

    Empty parts are left out.
    """
    count, longer = divmod(len(items), parts)
    bounds = [number * count + min(number, longer) for number in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if start < stop]


def is_iterable(value: object) -> bool:
    """Whether `iter` accepts the value."""
    try:
        iter(value)  # type: ignore[call-overload]  # any value, to find out
    except TypeError:
        return False
    return True
