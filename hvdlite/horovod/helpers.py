"""The helpers of `horovod.common.util` that programs import, and the exception that hvdlite has no use for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

from hvdlite import torch as names

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework: only PyTorch."""
    return ext_base_name in ("torch", "pytorch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite supports this framework, and PyTorch finds a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def _built(answer: Callable[[], object]) -> Callable[..., bool]:
    """Returns a function that takes Horovod's ``verbose``, and says what a function of `hvdlite.torch` says."""

    def built(verbose: bool = False) -> bool:
        return bool(answer())

    return built


mpi_built = _built(names.mpi_built)
gloo_built = _built(names.gloo_built)
nccl_built = _built(names.nccl_built)
ddl_built = _built(names.ddl_built)
ccl_built = _built(names.ccl_built)
cuda_built = _built(names.cuda_built)
rocm_built = _built(names.rocm_built)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """A context with these environment variables; those that are None are not set in it."""
    earlier = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(earlier)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or later; what follows three numbers with dots does not count."""
    found, wanted = (re.match(r"(\d+)\.(\d+)\.(\d+)", each) for each in (ver, target))
    if found is None or wanted is None:
        raise ValueError(f"version {ver!r} or {target!r} does not begin with three numbers, as 1.2.3 does")
    return [int(each) for each in found.groups()] >= [int(each) for each in wanted.groups()]


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


class HorovodVersionMismatchError(ImportError):
    """Never raised: Horovod raises it where its compiled extension is of another framework's version."""
