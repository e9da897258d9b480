"""
Tensors as flat memory, and back: their bytes, and several of them in one buffer, so that they travel as one.

    tensors ── fused (by dtype and device) ── flat_of ── one flat tensor ── own_memory ── each one's piece again
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2**21
# From here on malloc gets memory of its own from Linux for each tensor (its M_MMAP_THRESHOLD is at most this), and
# gives it back with the tensor: what is advised is this tensor's alone, and every time its pages are new.
_LEAST_HUGE_BYTES = 2**25


def _find_madvise() -> Callable[[int, int, int], int] | None:
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


_madvise = _find_madvise()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes, without a copy."""
    # Not reshape(-1), which keeps the stride of a tensor of one element, whatever that is.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pieces_of(flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of a tensor's elements (or rows), as many as each of the counts says, one after the other."""
    stops = list(accumulate(counts))
    return [flat[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def plain(tensor: Tensor) -> Tensor:
    """The tensor in contiguous memory that may be read as bytes; its own memory where that is so already."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory may be written as bytes."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that an engine has overwritten them: it refuses to go backward through what it had kept of them."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def fused(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The numbers of the tensors that travel as one: those of a dtype and a device."""
    fused: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        fused.setdefault((tensor.dtype, tensor.device), []).append(number)
    yield from fused.values()


def flat_of(tensors: Sequence[Tensor], *, may_share: bool = False) -> Tensor:
    """Tensors one after the other in memory of their own; a lone contiguous one's own memory, if that may be."""
    if may_share and len(tensors) == 1 and is_plain(tensors[0]):
        return tensors[0].view(-1)
    flat = new_flat(sum(tensor.numel() for tensor in tensors), tensors[0])
    return torch.cat([plain(tensor).view(-1) for tensor in tensors], out=flat)


def new_flat(numel: int, like: Tensor) -> Tensor:
    """Memory for so many elements, of the dtype and on the device of ``like``; what lies there is anything.

    On the CPU much of it is asked for in huge pages, where Linux gives them to those who ask: 100 MB in pages of 4 KiB
    are 25,600 page faults, which take longer than copying as much.
    """
    flat = like.new_empty(numel)
    if flat.device.type == "cpu" and flat.nbytes >= _LEAST_HUGE_BYTES and _madvise is not None:
        start = -(-flat.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        stop = (flat.data_ptr() + flat.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Where the kernel has none it says so, and the pages are small.
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)
    return flat


def own_memory(piece: Tensor, flat: Tensor) -> Tensor:
    """The piece, which does not keep the memory of its neighbours."""
    return piece if piece.numel() == flat.numel() else piece.clone()
