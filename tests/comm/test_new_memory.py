"""`new_memory` and `result_memory`: huge pages, and memory of freed results that is used again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdlite.comm import flat_bytes
from hvdlite.comm.flat_bytes import new_memory, result_memory

LARGE = 2**23 + 5  # elements of 4 bytes: 32 MiB and a little


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    flat_bytes._kept.clear()
    yield
    flat_bytes._kept.clear()


def large(numel: int = LARGE) -> Tensor:
    return result_memory(torch.Size([numel]), torch.empty(0))


def has_huge_pages(tensor: Tensor) -> bool:
    """Whether Linux was asked for huge pages where the tensor's middle is."""
    middle, is_here = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor is in no mapping")


def test_much_new_memory_is_asked_for_in_huge_pages_and_little_is_not() -> None:
    assert has_huge_pages(large())
    assert has_huge_pages(new_memory(LARGE, torch.empty(0)))
    assert not has_huge_pages(new_memory(2**20, torch.empty(0)))


def test_only_memory_of_results_is_kept_since_threads_of_engines_may_drop_other_tensors() -> None:
    new_memory(LARGE, torch.empty(0)).fill_(1)
    assert not flat_bytes._kept
    large().fill_(1)
    assert flat_bytes._kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_large_tensor_is_as_any_other_but_cannot_be_resized(dtype: torch.dtype) -> None:
    shape = torch.Size([2, 2**25 // dtype.itemsize + 3])
    tensor = result_memory(shape, torch.empty(0, dtype=dtype))
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == shape.numel() * dtype.itemsize
    tensor.fill_(1).requires_grad_(dtype.is_floating_point)
    assert tensor.count_nonzero() == shape.numel()
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.untyped_storage().resize_(0)


def test_the_next_tensor_of_a_size_gets_the_memory_of_a_freed_one() -> None:
    tensor = large()
    address = tensor.data_ptr()
    del tensor
    tensor = large()
    assert tensor.data_ptr() == address
    assert large().data_ptr() != address
    del tensor
    assert large(LARGE + 2**20).data_ptr() != address, "it has another size"


def gradient_function(tensor: Tensor) -> Tensor:
    return (tensor * torch.ones((), requires_grad=True)).sum()


@pytest.mark.parametrize("hold", [lambda tensor: tensor[5:6], Tensor.numpy, Tensor.untyped_storage, gradient_function])
def test_memory_that_anything_still_refers_to_is_not_used_again(hold: Callable[[Tensor], object]) -> None:
    tensor = large().fill_(3)
    address = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    assert large().data_ptr() != address
    flat_bytes._kept.clear()
    del held
    assert large().data_ptr() == address


def test_at_most_one_tensors_memory_is_kept_and_none_of_a_very_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [large(), large()]
    tensors.clear()
    assert len(flat_bytes._kept) == 1
    flat_bytes._kept.clear()
    monkeypatch.setattr(flat_bytes, "_MOST_KEPT_BYTES", 2**25)
    large()
    assert not flat_bytes._kept


def test_what_is_kept_is_linuxs_to_take() -> None:
    large().fill_(1)
    (kept,) = flat_bytes._kept
    smaps = Path("/proc/self/smaps").read_text()
    free_kb = sum(int(kb) for kb in re.findall(r"LazyFree: +(\d+) kB", smaps))
    assert free_kb * 1024 > len(kept) / 2


def test_too_much_is_pytorchs_error() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        large(2**46)
