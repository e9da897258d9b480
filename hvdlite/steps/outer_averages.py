"""
Averages outer gradients over hosts, in stages for a `StageRunner`: in floats, encoded by a codec, or the largest alone.

    Summed   float ── cast ── all-reduce ── float
    Encoded  2 hosts: encode ── all-gather ── decode and add
             more:    encode ── all-to-all ── decode and add ── encode ── all-gather ── decode
    Largest  largest values and their places ── all-gather ── add

`outer_steps` has one of these for each bucket of parameters. With a codec it owns the residuals of the bucket. All
ranks get equal bits: products and sums are separate operations, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..buckets.outer import OuterForm
from ..comm.group import Group
from ..comm.work import Work
from ..compression.casts import CastCompression, NoCompression
from ..compression.codecs import Codec, wire_bytes
from ..compression.top_k import TopK
from ..exchanges.between_hosts import split
from ..exchanges.residuals import replace_if_finite

Segment = tuple[int, Tensor]
"""A part of a flat tensor: where it begins, and its values."""

# The kinds of residuals: of this rank's values, and of its part of the sum between three hosts or more.
OWN, _SUMS = "own", "sums"


class OuterAverage(Protocol):
    """Averages flat tensors over the ranks of ``across``, always of the same size. All take equally many stages."""

    def stages(self, values: Tensor, across: Sequence[Group], what: str) -> Iterator[Work]:
        """Launches the collectives of each stage and yields its work; at the end ``values`` are the averages.

        ``across`` has a group of the same ranks for each stage.
        """
        ...

    @property
    def keeps_residuals(self) -> bool:
        """Whether there are residuals once something was sent, on every rank."""
        ...

    def state_dict(self) -> dict[str, Segment]:
        """Returns the residuals, not copied, as segments of the values. Empty if there are none."""
        ...

    def load_state_dict(self, state: Mapping[str, Segment]) -> None:
        """Loads what `state_dict` returned. Missing residuals are zeros."""
        ...


class Summed:
    """Averages by an all-reduce, in 16 bits if there is a cast."""

    def __init__(self, compression: NoCompression | CastCompression) -> None:
        self._compression = compression

    def stages(self, values: Tensor, across: Sequence[Group], what: str) -> Iterator[Work]:
        group = across[0]
        dtype = self._compression.wire_dtype(values.dtype)
        if dtype == values.dtype:
            yield group.all_reduce(values, what)
            values.div_(group.size)
            return
        # Divided before the cast, so that the sum does not overflow.
        wire = values.div_(group.size).to(dtype)
        yield group.all_reduce(wire, what)
        values.copy_(wire)

    @property
    def keeps_residuals(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Segment]:
        return {}

    def load_state_dict(self, state: Mapping[str, Segment]) -> None:
        return


class Encoded:
    """Averages in the format of a codec, and adds what its rounding has taken to the next values."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals: dict[str, Segment] = {}

    def stages(self, values: Tensor, across: Sequence[Group], what: str) -> Iterator[Work]:
        codec, first = self._codec, across[0]
        if first.size == 2:
            wire = self._encode(OWN, values, 0, [0, values.numel()])
            wires, work = first.begin_all_gather(wire, what, [wire.numel()] * 2)
            yield work
            codec.add_decoded(wires, values)
            values.div_(2)
            return
        bounds = split(values.numel(), first.size, codec.block)
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        wire = self._encode(OWN, values, 0, bounds)
        own = sizes[first.rank]
        wires, work = first.begin_all_to_all(wire, sizes, [own] * first.size, what)
        yield work
        begin, end = bounds[first.rank], bounds[first.rank + 1]
        total = values.new_empty(end - begin)
        codec.add_decoded(wires, total)
        wire = self._encode(_SUMS, total, begin, [0, len(total)])
        wires, work = across[1].begin_all_gather(wire, what, sizes)
        yield work
        for (begin, end), each in zip(pairwise(bounds), wires, strict=True):
            codec.add_decoded([each], values[begin:end])
        values.div_(first.size)

    def _encode(self, kind: str, values: Tensor, start: int, bounds: Sequence[int]) -> Tensor:
        """Returns the wire of ``values``, with the parts between ``bounds`` one after the other."""
        sizes = [wire_bytes(self._codec, stop - begin) for begin, stop in pairwise(bounds)]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        residual = self._residual(kind, values, start)
        at = 0
        for (begin, stop), size in zip(pairwise(bounds), sizes, strict=True):
            kept = None if residual is None else residual[begin:stop]
            self._codec.encode_all(values[begin:stop], wire[at : at + size], kept)
            at += size
        return wire

    def _residual(self, kind: str, values: Tensor, start: int) -> Tensor | None:
        if not self._codec.error_feedback:
            return None
        known = self._residuals.get(kind)
        if known is None:
            known = self._residuals[kind] = start, torch.zeros_like(values)
        return known[1]

    @property
    def keeps_residuals(self) -> bool:
        return self._codec.error_feedback

    def state_dict(self) -> dict[str, Segment]:
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, Segment]) -> None:
        self._residuals = dict(state)


class Largest:
    """Averages the largest values of each rank, and adds what is left of the others to its next values."""

    def __init__(self, form: TopK) -> None:
        self._form = form
        self._residual: Segment | None = None

    def stages(self, values: Tensor, across: Sequence[Group], what: str) -> Iterator[Work]:
        form, group = self._form, across[0]
        if self._residual is None:
            self._residual = 0, torch.zeros_like(values)
        _, residual = self._residual
        wanted = form.added(values, residual)
        wire, places, sent = form.encode(wanted)
        wires, work = group.begin_all_gather(wire, what, [wire.numel()] * group.size)
        if sent is not None:
            wanted[places] -= sent.to(wanted.dtype)
        yield work
        values.zero_()
        for each in wires:
            form.add_decoded(each, values)
        # Only now: what is not finite on one rank reaches all of them, and leaves no trace in what any of them keeps.
        replace_if_finite(residual, wanted, values)
        values.div_(group.size)

    @property
    def keeps_residuals(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Segment]:
        return {} if self._residual is None else {OWN: self._residual}

    def load_state_dict(self, state: Mapping[str, Segment]) -> None:
        self._residual = state.get(OWN)


def outer_average(form: OuterForm) -> OuterAverage:
    """Returns what averages one bucket's outer gradients in this format."""
    if isinstance(form, TopK):
        return Largest(form)
    return Encoded(form) if isinstance(form, Codec) else Summed(form)
