"""
Adasum: gradients added where they are orthogonal, averaged where they point the same way (arXiv 2006.02924).

    slices of all ranks' tensors, each rank gets its own ── dot products of all pairs ── summed over the slices
    ── weights of the ranks, through the tree ── own slice of the result ── gathered

Two gradients a and b become ``(1 - a.b / 2|a|²) a + (1 - a.b / 2|b|²) b``. More are combined in pairs along a binary
tree: 0 with 1 and 2 with 3, then the pairs, and so on; one without a neighbour moves up unchanged. The result is a
weighted sum of the ranks' gradients, and the weights follow from the dot products alone, which are in float64: ranks
exchange nothing else besides one reduce-scatter and one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.flat_bytes import as_bytes, pieces_of, spread
from ..comm.group import Group

# Most elements of a slice that are held in float64 at a time.
_CHUNK_NUMEL = 2**20

# A vector whose square is this small relative to its terms' is a zero with rounding errors.
_ZERO = 1e-14


def adasum_all_reduce(group: Group, flat: Tensor, segments: Sequence[int], what: str) -> None:
    """Replaces a flat contiguous tensor of floats, in place, by the Adasum of all ranks' tensors: the same bits on all.

    ``segments`` are the lengths of consecutive parts with separate dot products, such as the layers.
    """
    assert sum(segments) == flat.numel(), "segments cover the tensor"
    if group.size == 1 or flat.numel() == 0:
        return
    counts = spread(flat.numel(), group.size)
    item_bytes = flat.element_size()
    mine = counts[group.rank]
    parts, work = group.begin_all_to_all(
        as_bytes(flat), [count * item_bytes for count in counts], [mine * item_bytes] * group.size, what
    )
    work.wait()
    rows = torch.stack([part.view(flat.dtype) for part in parts])
    overlaps = _overlaps(segments, sum(counts[: group.rank]), mine)
    gram = torch.zeros(len(segments), group.size, group.size, dtype=torch.float64, device=flat.device)
    for segment, start, stop in overlaps:
        gram[segment] = _dot_products(rows[:, start:stop])
    group.all_reduce(gram, what).wait()
    weights = _weights(gram.cpu()).to(flat.device)
    own = torch.empty_like(rows[0])
    for segment, start, stop in overlaps:
        _add_up(rows[:, start:stop], weights[segment], own[start:stop])
    gathered = group.all_gather(own, what, [count * item_bytes for count in counts])
    for place, part in zip(pieces_of(flat, counts), gathered, strict=True):
        place.copy_(part.view(flat.dtype))


def _overlaps(segments: Sequence[int], first: int, count: int) -> list[tuple[int, int, int]]:
    """The segments that overlap the ``count`` elements from ``first``: number, start and end among these elements."""
    found = []
    start = -first
    for number, length in enumerate(segments):
        low, high = max(start, 0), min(start + length, count)
        if low < high:
            found.append((number, low, high))
        start += length
    return found


def _dot_products(rows: Tensor) -> Tensor:
    """The dot products of all pairs of rows."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for low in range(0, rows.shape[1], _CHUNK_NUMEL):
        wide = rows[:, low : low + _CHUNK_NUMEL].double()
        total += wide @ wide.t()
    return total


def _add_up(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    for low in range(0, rows.shape[1], _CHUNK_NUMEL):
        out[low : low + _CHUNK_NUMEL] = weights @ rows[:, low : low + _CHUNK_NUMEL].double()


def _weights(gram: Tensor) -> Tensor:
    """The weight of each rank's vector in the result, by segment and rank, from the dot products of all pairs."""
    segment_count, size, _ = gram.shape
    level = [gram.new_zeros(segment_count, size) for _ in range(size)]
    for rank, weights in enumerate(level):
        weights[:, rank] = 1.0
    while len(level) > 1:
        pairs = [_combine(gram, a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def _combine(gram: Tensor, a: Tensor, b: Tensor) -> Tensor:
    dot = _dot(gram, a, b)
    return _share(gram, a, dot) * a + _share(gram, b, dot) * b


def _dot(gram: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("si,sij,sj->s", a, gram, b).unsqueeze(1)


def _share(gram: Tensor, own: Tensor, dot: Tensor) -> Tensor:
    """``1 - dot / 2|own|²``; 1 for a vector of zeros, whose dot products are all zero."""
    square = _dot(gram, own, own)
    terms = torch.einsum("si,sii->s", own * own, gram).unsqueeze(1)
    is_zero = square <= _ZERO * terms
    return torch.where(is_zero, 1.0, 1.0 - dot / torch.where(is_zero, 1.0, 2.0 * square))
