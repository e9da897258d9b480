"""
Converts tensors to flat memory and back: a tensor's bytes, and several tensors in one buffer.

To send several tensors in one collective, `fused` groups them by dtype and device, `flat_of` copies a group into one
flat tensor, and `pieces_of` and `own_memory` take the results apart. `new_memory` and `result_memory` allocate large
tensors so that their pages cost little.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2**21
# Malloc returns the memory of tensors of this size to Linux (M_MMAP_THRESHOLD is at most this), so it is always new.
_LEAST_HUGE_BYTES = 2**25
_MOST_KEPT_BYTES = 2**27
# The memory of the last large tensor that was freed, at most one.
_kept: list[mmap.mmap] = []


_madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def give_back_free_memory() -> None:
    """Has glibc return what the program has freed to the system; it takes some ms for 100 MB.

    Malloc keeps tensors of up to 32 MiB for later ones.
    """
    _kept.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as a flat tensor of bytes, without a copy."""
    # Not reshape(-1), which keeps the stride of a one-element tensor, whatever that is.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def spread(count: int, size: int) -> list[int]:
    """The number of rows, or elements, of each rank: if they do not divide evenly, the first ranks get one more."""
    return [count // size + (rank < count % size) for rank in range(size)]


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


def fused(tensors: Sequence[Tensor], least_alone_bytes: int | None = None) -> Iterator[list[int]]:
    """Yields, for each dtype and device, the indices of the tensors to send in one collective.

    Tensors of ``least_alone_bytes`` or more are sent alone.
    """
    fused: dict[tuple[torch.dtype, torch.device, int | None], list[int]] = {}
    for number, tensor in enumerate(tensors):
        is_alone = least_alone_bytes is not None and tensor.nbytes >= least_alone_bytes
        fused.setdefault((tensor.dtype, tensor.device, number if is_alone else None), []).append(number)
    yield from fused.values()


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Returns the indices of tensors that share memory with another; of those with gaps, all of it counts."""
    spans = []
    for number, tensor in enumerate(tensors):
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        if not is_plain(tensor):
            start, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if nbytes:
            spans.append((start, start + nbytes, number))
    spans.sort()
    found, end, last = set(), 0, -1
    for start, stop, number in spans:
        if start < end:
            found |= {number, last}
        if stop > end:
            end, last = stop, number
    return found


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


def result_memory(shape: torch.Size, like: Tensor) -> Tensor:
    """Returns an uninitialized contiguous tensor for the result of a collective, which Python's threads alone hold.

    When a large one is freed, the next of its size gets its memory: to touch pages for the first time takes longer than
    to copy into them. Its storage cannot be resized. Its last reference must not be dropped by a thread of C++, as
    gloo's, since that would run Python code, and abort the process if the interpreter has ended.
    """
    nbytes = shape.numel() * like.element_size()
    if nbytes < _LEAST_HUGE_BYTES or not like.is_cpu or not hasattr(mmap, "MADV_FREE"):
        return new_memory(shape, like)
    pages = _large_memory(-(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
    if pages is None:
        return like.new_empty(shape)  # PyTorch's words of too little memory
    memory = (ctypes.c_ubyte * nbytes).from_buffer(pages)
    # When the last tensor over this memory is gone.
    weakref.finalize(memory, _keep, pages).atexit = False
    return as_base(torch.frombuffer(memory, dtype=like.dtype).view(shape))


def _large_memory(nbytes: int) -> mmap.mmap | None:
    """Returns memory of a freed result, or new memory; None if there is too little."""
    with contextlib.suppress(IndexError):
        kept = _kept.pop()
        if len(kept) == nbytes:
            return kept
        del kept  # before more is asked for
    with contextlib.suppress(OSError):
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages
    return None


def _keep(pages: mmap.mmap) -> None:
    """Finalizer of a large tensor's memory, which any thread may call at any point."""
    if len(pages) <= _MOST_KEPT_BYTES:
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_FREE)
            _kept[:] = [pages]


def as_base(tensor: Tensor) -> Tensor:
    """Makes a view a base over the same memory: views that an autograd function returns cannot be changed in place."""
    if not tensor._is_view():
        return tensor
    base = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return base.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def own_memory(piece: Tensor, flat: Tensor) -> Tensor:
    """Returns the piece, copied unless it is all of ``flat``, so that it does not keep its neighbours' memory alive."""
    return piece if piece.numel() == flat.numel() else piece.clone()


def as_real(flat: Tensor) -> Tensor:
    """Returns a flat tensor as real numbers, in the same memory: complex numbers become pairs."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
