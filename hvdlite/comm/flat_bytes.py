"""
Converts tensors to flat memory and back: a tensor's bytes, and several tensors in one buffer.

To send several tensors in one collective, `fused` groups them by dtype and device, `flat_of` copies a group into one
flat tensor, and `pieces_of` and `own_memory` take the results apart. `group`, the engines and `ops` call these.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2**21
# For a tensor of at least this size malloc gets separate memory from Linux (M_MMAP_THRESHOLD is at most this) and
# returns it with the tensor. So the advice applies to this tensor alone, and its pages are always new.
_LEAST_HUGE_BYTES = 2**25


def _find_madvise() -> Callable[[int, int, int], int] | None:
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


_madvise = _find_madvise()


def give_back_free_memory() -> None:
    """Has the C library return what the program has freed to the system; it takes some ms for 100 MB.

    Malloc keeps tensors of up to 32 MiB for later ones. Does nothing with a C library other than glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as a flat tensor of bytes, without a copy."""
    # Not reshape(-1), which keeps the stride of a one-element tensor, whatever that is.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pieces_of(flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Returns consecutive views of ``flat``, of ``counts`` elements (or rows) each."""
    stops = list(accumulate(counts))
    return [flat[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor in contiguous memory that may be read as bytes, without a copy where it is so already."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory may be written as bytes."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Mark tensors as overwritten, so that autograd refuses a backward pass that has saved them."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def fused(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yields, for each dtype and device, the indices of the tensors to send in one collective."""
    fused: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        fused.setdefault((tensor.dtype, tensor.device), []).append(number)
    yield from fused.values()


def flat_of(tensors: Sequence[Tensor], *, may_share: bool = False) -> Tensor:
    """Returns the tensors' elements as one flat tensor: a copy, or with ``may_share`` a lone tensor's own memory."""
    if may_share and len(tensors) == 1 and is_plain(tensors[0]):
        return tensors[0].view(-1)
    flat = new_memory(sum(tensor.numel() for tensor in tensors), tensors[0])
    return torch.cat([plain(tensor).view(-1) for tensor in tensors], out=flat)


def new_memory(shape: int | torch.Size, like: Tensor) -> Tensor:
    """Returns an uninitialized contiguous tensor, of the dtype and on the device of ``like``.

    A large CPU tensor asks Linux for huge pages: with pages of 4 KiB, 100 MB take 25,600 page faults, which last longer
    than copying the same amount.
    """
    memory = like.new_empty(shape)
    if memory.nbytes >= _LEAST_HUGE_BYTES and memory.is_cpu and _madvise is not None:
        start = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        stop = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # A kernel without huge pages returns an error, and the pages stay small.
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)
    return memory


def own_memory(piece: Tensor, flat: Tensor) -> Tensor:
    """Returns the piece, copied unless it is all of ``flat``, so that it does not keep its neighbours' memory alive."""
    return piece if piece.numel() == flat.numel() else piece.clone()


def as_real(flat: Tensor) -> Tensor:
    """Returns a flat tensor as real numbers, in the same memory: complex numbers become pairs."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
