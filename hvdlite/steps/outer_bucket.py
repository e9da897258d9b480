"""
`OuterBucket`: parameters that take outer steps together, with this rank's shard of the anchor, velocity and residuals.

    outer_gradient: anchor - parameters ── average: over hosts ── step: anchor ── merged ── write: parameters

`outer_step` has some of these, and decides when each has its turn. Outer gradients are averaged in floats, or by one
of the `HostSum` of exchanges, in stages for a `StageRunner`. All ranks get equal bits: products and sums are separate
operations, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..buckets.flags import RankAndSize
from ..buckets.settings import OuterRule
from ..comm.flat_bytes import as_real, flat_of, pieces_of
from ..comm.group import Group
from ..comm.work import Work
from ..compression.approximations import TopK
from ..compression.casts import CastCompression, NoCompression
from ..compression.codecs import Codec, working_dtype
from ..exchanges.between_hosts import split
from ..exchanges.host_sums import host_sum

Segment = tuple[int, Tensor]
"""A part of a flat tensor: where it begins, and its values."""

# The keys of a bucket's state; those of residuals go on with the kind of a residual.
_ANCHOR, _VELOCITY, RESIDUAL = "anchor", "velocity", "residual of "


class OuterBucket:
    """Parameters of one dtype on one device that are averaged together, and this rank's shard of their anchor."""

    def __init__(self, params: Mapping[str, Tensor], inner: RankAndSize, rule: OuterRule) -> None:
        self.params = params
        form = rule.compression
        # None: outer gradients are averaged in floats.
        self._sum = host_sum(form, reuses_wires=False) if isinstance(form, Codec | TopK) else None
        self._kept: dict[str, Segment] = {}
        self.anchor: Tensor | None = None
        self._velocity: Tensor | None = None
        self._rule = rule
        first = next(iter(params.values()))
        self._is_complex = first.is_complex()
        self.dtype = first.dtype.to_real()
        self._device = first.device
        self._counts = [param.numel() * (2 if self._is_complex else 1) for param in params.values()]
        bounds = split(sum(self._counts), inner.size, 1)
        self.spans = list(pairwise(bounds))
        """For each rank of the host: the first and last elements of its shard."""
        self.start, self._stop = self.spans[inner.rank]

    def begin(self) -> None:
        """Sets the anchor to the parameters, if there is none."""
        if self.anchor is None:
            self.anchor = self._own()

    def reset(self) -> None:
        self.anchor = self._velocity = None
        self._kept = {}

    @property
    def known_anchor(self) -> Tensor:
        """The anchor of this rank's shard, of shape ``(stop - start,)``, in the working dtype."""
        assert self.anchor is not None, "it has begun"
        return self.anchor

    def empty(self) -> Tensor:
        return torch.empty(self._stop - self.start, dtype=working_dtype(self.dtype), device=self._device)

    def _own(self) -> Tensor:
        """Returns a copy of this rank's shard of the parameters, in the working dtype."""
        flat = as_real(flat_of(list(self.params.values())))
        return self.empty().copy_(flat[self.start : self._stop])

    def outer_gradient(self) -> Tensor:
        return torch.sub(self.known_anchor, self._own())

    def average(self, values: Tensor, across: Sequence[Group], what: str) -> Iterator[Work]:
        """Averages ``values``, outer gradients of this shard, over the hosts, in stages. Yields the work of each."""
        group, form = across[0], self._rule.compression
        dtype = form.wire_dtype(values.dtype) if isinstance(form, NoCompression | CastCompression) else values.dtype
        if dtype != values.dtype:
            # Divided before the cast, so that the sum does not overflow.
            wire = values.div_(group.size).to(dtype)
            yield group.all_reduce(wire, what)
            values.copy_(wire)
            return
        if self._sum is None:
            yield group.all_reduce(values, what)
        else:
            yield from self._sum.stages(_OuterShard(values, self._kept), across, what)
        values.div_(group.size)

    def step(self, average: Tensor) -> None:
        """Takes the outer step of the anchor; it may overwrite ``average``."""
        rule = self._rule
        update = average
        # Products and sums are separate operations, so that all processors get the same bits.
        if rule.momentum:
            velocity = self._known_velocity()
            velocity.mul_(rule.momentum).add_(average)
            update = velocity.mul(rule.momentum).add_(average)
        self.known_anchor.sub_(update.mul_(rule.lr))

    def _known_velocity(self) -> Tensor:
        """Returns the velocity of this rank's shard; zeros before the first outer step."""
        if self._velocity is None:
            self._velocity = torch.zeros_like(self.known_anchor)
        return self._velocity

    def merged(self) -> Tensor:
        """Returns this rank's shard of the parameters after the outer step, in their own dtype."""
        mix = self._rule.mix
        if mix == 0.0:
            return self.known_anchor.to(self.dtype)
        return self._own().mul_(mix).add_(self.known_anchor.mul(1.0 - mix)).to(self.dtype)

    def write(self, flat: Tensor) -> None:
        """Copies real numbers, flat and in the parameters' order, into the parameters."""
        for param, piece in zip(self.params.values(), pieces_of(flat, self._counts), strict=True):
            param.copy_(
                torch.view_as_complex(piece.view(-1, 2)).view(param.shape)
                if self._is_complex
                else piece.view(param.shape)
            )

    # -- state by the names of parameters

    def by_name(self, start: int, values: Tensor) -> Iterator[tuple[str, Segment]]:
        """Yields each parameter's part of a flat tensor, which begins at ``start`` of the bucket."""
        first = 0
        for name, count in zip(self.params, self._counts, strict=True):
            begin, end = max(first, start), min(first + count, start + len(values))
            if begin < end:
                yield name, (begin - first, values[begin - start : end - start])
            first += count

    def own_part(self, parts: Mapping[str, Segment]) -> Segment:
        """Returns the part of this rank's shard that is in ``parts``, which `by_name` has yielded, as a segment."""
        found: list[Segment] = []
        first = 0
        for name, count in zip(self.params, self._counts, strict=True):
            if name in parts:
                offset, values = parts[name]
                begin, end = max(first + offset, self.start), min(first + offset + len(values), self._stop)
                if begin < end:
                    found.append((begin, values[begin - first - offset : end - first - offset].to(self._device)))
            first += count
        # A copy, also of a single one.
        return (found[0][0], torch.cat([values for _, values in found])) if found else (self.start, self.empty())

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the anchor and the velocity of this rank's shard. All ranks yield as many, also of an empty shard."""
        yield _ANCHOR, self.known_anchor
        if self._rule.momentum:
            yield _VELOCITY, self._known_velocity()

    def sum_of_residuals(self) -> Tensor | None:
        """Returns what this rank's wires could not hold, as a tensor of the whole bucket. None if no rank keeps any."""
        if self._sum is None or not self._sum.keeps_residuals:
            return None
        whole = torch.zeros(sum(self._counts), dtype=working_dtype(self.dtype), device=self._device)
        for start, values in self._kept.values():
            whole[self.start + start : self.start + start + len(values)].add_(values)
        return whole

    def state_dict(self) -> dict[str, Segment]:
        """Returns the anchor, the velocity and residuals as segments of the bucket, not copied."""
        found = {kind: (self.start, values) for kind, values in self.shared()}
        for kind, (start, values) in self._kept.items():
            found[f"{RESIDUAL}{kind}"] = self.start + start, values
        return found

    def load_state_dict(self, parameters: Mapping[str, Mapping[str, Segment]]) -> None:
        """Loads copies of what `state_dict` returned, as `by_name` has split it."""
        kinds = sorted({kind for name in self.params for kind in parameters.get(name, {})})
        found = {
            kind: self.own_part(
                {name: parameters[name][kind] for name in self.params if kind in parameters.get(name, {})}
            )
            for kind in kinds
        }
        self.anchor = found[_ANCHOR][1] if kinds else self.empty()
        self._velocity = found[_VELOCITY][1] if _VELOCITY in found else None
        self._kept = {}
        for kind, (start, values) in found.items():
            if kind.startswith(RESIDUAL):
                self._kept[kind.removeprefix(RESIDUAL)] = start - self.start, values


class _OuterShard(NamedTuple):
    """Outer gradients as a `host_sums.Shard`: all parameters change in an interval, and averages are divided later."""

    values: Tensor
    # What this rank's wires could not hold, by the kinds of residuals.
    kept: dict[str, Segment]
    name: str = "outer gradients"

    def residual(self, kind: str, values: Tensor, at: int = 0, sums: tuple[int, int] = (0, 0)) -> Tensor:
        known = self.kept.get(kind)
        if known is None:
            known = self.kept[kind] = at, torch.zeros_like(values)
        return known[1]

    def missing(self, values: Tensor, at: int = 0) -> list[slice]:
        return []

    def factor(self) -> float:
        return 1.0


@dataclass
class Launch:
    """The averages of one fragment's outer gradients, on their way."""

    fragment: int
    due: int
    """The count of steps after which the outer step is taken."""
    averages: list[tuple[OuterBucket, Tensor]] = field(default_factory=list)
    works: list[Work | StreamWork] = field(default_factory=list)
    """What the averages are waited for by; of those that were loaded there is none."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def give_up(self) -> None:
        """Lets the memory of the averages be used for something else."""
        for work in self.works:
            if isinstance(work, StreamWork):
                # A stream that goes on would write into memory that this one has been given again.
                work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class StreamWork:
    """Stages on a GPU, on a stream of their own, beside the steps that are taken meanwhile."""

    def __init__(self, stages: Iterator[Work], device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work in stages:
                work.wait()
            self._end = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def is_completed(self) -> bool:
        return bool(self._end.query())
