"""
The built-in exchanges whose wires are summed.

    AllReduce            casts a bucket if there is a cast compression, sums it over all ranks, and divides it
    ReduceToParts        does the same with this rank's part of it alone, where ranks share the optimizer's work
    CompressedAllReduce  compresses gradients by a user's own compression, sums the wires over all ranks, divides them
    AdasumExchange           combines by Adasum what each rank's own optimizer step has changed (arXiv 2006.02924)
    SingleRank           does nothing, for a single rank

`exchange_state` makes one for an optimizer; `in_flight` and `adasum_step` call it for each bucket. Sparse gradients
use none of these: see `sparse_gather`. `host_sums` has the exchange for formats that cannot be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, ExchangeWork, FinishedExchange, Gradients, Links
from ..buckets.flags import ParticipantCount, presence_of
from ..buckets.plan import BucketPlan
from ..buckets.settings import Scaling, Settings
from ..comm.flat_bytes import as_real
from ..comm.group import Group
from ..comm.reduce_op import Adasum
from ..comm.work import Work
from ..compression.casts import CastCompression
from ..compression.custom import CustomCompression, Packed
from ..ops.base import raise_together
from ..ops.packing import PackedTensors, put_back
from ..ops.reduction import Reduction, Underway, real_numel

# Device types on which a bucket is scaled and cast in one pass. On a CPU two passes are faster: PyTorch's one-pass
# operation makes a copy.
SCALES_ON_THE_WAY = frozenset({"cuda"})


class _OverAllRanks(Exchange):
    """An exchange that needs no groups within hosts and across them."""

    def open_links(self, group: Group) -> Links:
        """Opens nothing."""
        return Links(group)


class SingleRank(Exchange):
    """The exchange of a single rank: leaves gradients where autograd has put them, without buckets and copies."""

    aligned = True

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Launches nothing, and leaves the gradients as they are."""
        return FinishedExchange(gradients)


class AllReduce(_OverAllRanks):
    """Averages or sums a bucket by one all-reduce, cast to 16 bits where the settings say so."""

    word = "all-reduce"
    aligned = True
    carries_counts = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wires = _Wires()
        # By dtype and number of ranks, since many buckets share one.
        self._scalings: dict[tuple[torch.dtype, int], Scaling] = {}

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """Returns the factor of gradients before they are summed, as in `Settings.scaling`."""
        return self._settings.scaling(dtype, size).before

    def scales(self, plan: BucketPlan) -> bool:
        """Whether `begin` casts this bucket, on a device where scaling in the same pass costs nothing."""
        return plan.device.type in SCALES_ON_THE_WAY and self._cast_of(plan) is not None

    def _cast_of(self, plan: BucketPlan) -> CastCompression | None:
        """Returns the cast of this bucket, or None if it is sent in its own dtype."""
        cast = self._settings.compression
        return cast if isinstance(cast, CastCompression) and cast.casts(plan.dtype.to_real()) else None

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Casts the bucket with its counts into a wire, or uses its own memory, and launches the all-reduce."""
        wire, cast_wire = as_real(gradients.with_counts if self.carries_counts else gradients.flat), None
        cast = self._cast_of(gradients.plan)
        if cast is not None:
            source = wire
            wire, memory = self._wires.take(links.all, source.numel(), cast.dtype, source.device)
            cast_wire = cast, wire, memory
            # Only the gradients are scaled, not the counts behind them.
            cast.convert(source, gradients.scale, as_real(gradients.flat).numel(), wire)
        if gradients.launching is not None:
            gradients.launching()
        work = self._sum(wire, gradients, links)
        scaling = self._scaling_of(gradients.plan.dtype, links.all.size)
        return _Summed(gradients, work, wire, cast_wire, scaling, self._wires, self._part_of(gradients, links))

    def _sum(self, wire: Tensor, gradients: Gradients, links: Links) -> Work:
        """Launches the collective that sums the wires of all ranks."""
        return links.all.all_reduce(wire, f"the {self.word} of the {gradients.what}")

    def _part_of(self, gradients: Gradients, links: Links) -> slice:
        """Returns the real numbers of the bucket that are summed on this rank."""
        return slice(0, as_real(gradients.flat).numel())

    def _scaling_of(self, dtype: torch.dtype, size: int) -> Scaling:
        scaling = self._scalings.get((dtype, size))
        if scaling is None:
            scaling = self._scalings[dtype, size] = self._settings.scaling(dtype, size)
        return scaling


class _Summed(ExchangeWork):
    """A bucket in the all-reduce of `AllReduce`."""

    def __init__(
        self,
        gradients: Gradients,
        work: Work,
        wire: Tensor,
        cast_wire: _CastWire | None,
        scaling: Scaling,
        wires: _Wires,
        part: slice,
    ) -> None:
        super().__init__(gradients, (work,), wire=wire, takes_memory=cast_wire is not None)
        self._cast_wire = cast_wire
        self._scaling = scaling
        self._wires = wires
        self._part = part
        # The counts that were sent behind the gradients, in real numbers.
        self._counts_behind = wire.numel() - as_real(gradients.flat).numel()

    def finish(self, count: ParticipantCount) -> None:
        """Casts the sum back into the bucket, and divides it where the result is an average."""
        part, scaling = self._part, self._scaling
        total = as_real(self.gradients.flat)[part]
        if self._cast_wire is not None:
            cast, wire, memory = self._cast_wire
            factor = 1.0
            if scaling.over is not None:
                # Scale in the cast as if all ranks took part. `Scaling.finish` corrects this if some did not.
                size = self.gradients.ranks
                factor, scaling = scaling.over / size, replace(scaling, over=float(size))
            end = part.stop + self._counts_behind
            out = as_real(self.gradients.with_counts)[part.start : end]
            cast.convert(wire[part.start : end], factor, total.numel(), out)
            self._wires.give_back(memory)
        scaling.finish(total, count)


class ReduceToParts(AllReduce):
    """Averages or sums this rank's part of a bucket (`BucketPlan.bounds`), and the counts beside it."""

    word = "reduce-scatter"
    carries_counts = False
    in_parts = True

    def _sum(self, wire: Tensor, gradients: Gradients, links: Links) -> Work:
        part = self._part_of(gradients, links)
        counts = [stop - start for start, stop in pairwise(_real_bounds(gradients.plan))]
        # In place: no other rank reads this rank's part of its wire. In `data` it is no change that the user has made.
        return links.all.reduce_scatter(wire.data[part], wire, counts, f"the {self.word} of the {gradients.what}")

    def _part_of(self, gradients: Gradients, links: Links) -> slice:
        bounds, rank = _real_bounds(gradients.plan), links.all.rank
        return slice(bounds[rank], bounds[rank + 1])


def _real_bounds(plan: BucketPlan) -> list[int]:
    return [bound * (2 if plan.dtype.is_complex else 1) for bound in plan.bounds]


class CompressedAllReduce(_OverAllRanks):
    """Compresses a bucket's gradients by a user's own compression, and averages or sums the wires.

    `begin` waits until the compression has worked on all ranks, so that an error on one is an error on all. So buckets
    are not sent during backward, when another rank may be waiting in a different collective.
    """

    word = "all-reduce"
    during_backward = False
    carries_counts = True
    tells_failures = True

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.compression, CustomCompression), "others need no packing"
        self._compression = settings.compression
        self._reduction = settings.of_wires()

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Compresses, waits until all ranks have, and launches the all-reduces of the wires."""
        what = f"the {self.word} of the {gradients.what}"
        tensors, words = [as_real(gradients.flat)], [f"the {gradients.plan.describe()}"]
        if self._compression.takes_each:
            tensors, words = list(gradients.pieces), [f"the gradient of {name!r}" for name in gradients.names]
        pack = PackedTensors(self._compression, tensors, words, self._reduction.check_wire)
        if not gradients.takes_part:
            pack.clear()
        tail = as_real(gradients.counts)
        counts = [int(count) for count in tail.tolist()]
        sums = raise_together(links.all, pack.failure, what, layout=pack.layout, counts=counts)
        tail.copy_(torch.tensor(sums, dtype=torch.int64, device="cpu"))
        divisor = int(ParticipantCount(presence_of(gradients.plan, gradients.counts), links.all.size))
        flats = list(pack.flats())
        underway = [self._reduction.begin(links.all, flat, counts, divisor, what) for flat, counts, _ in flats]
        works = [each.work for each in underway if each.work is not None]
        own = gradients.flat.untyped_storage().data_ptr()
        elsewhere = any(flat.untyped_storage().data_ptr() != own for flat, _, _ in flats)
        wire = flats[-1][0] if works else None
        return _Packed(gradients, works, wire, pack, list(zip(underway, flats, strict=True)), takes_memory=elsewhere)


class _Packed(ExchangeWork):
    """A bucket in the all-reduces of `CompressedAllReduce`."""

    def __init__(
        self,
        gradients: Gradients,
        works: Sequence[Work],
        wire: Tensor | None,
        pack: PackedTensors,
        sums: Sequence[tuple[Underway, tuple[Tensor, list[int], list[Packed]]]],
        *,
        takes_memory: bool,
    ) -> None:
        """``sums`` are the reductions of the flat wires in ``pack``, each with its wire."""
        super().__init__(gradients, works, wire=wire, takes_memory=takes_memory)
        self._pack = pack
        self._sums = sums

    def finish(self, count: ParticipantCount) -> None:
        """Decompresses the averages into the bucket."""
        for underway, (flat, counts, packed) in self._sums:
            underway.finish()
            put_back(flat, counts, packed)
        if self.gradients.takes_part:
            self._pack.unpack()
            self.failure = self._pack.failure
        # Frees the wires, also where a failure refers to them.
        self._sums, self.works, self.wire = (), (), None
        self._pack.packed.clear()


class AdasumExchange(_OverAllRanks):
    """Combines what the ranks' optimizer steps have changed by Adasum, with a dot product for each parameter."""

    word = "Adasum"
    after_step = True
    aligned = True
    during_backward = False

    def __init__(self, settings: Settings) -> None:
        self._compression = settings.compression

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Combines the deltas, and waits for the result."""
        what = f"the {self.word} of the {gradients.what}"
        counts = [piece.spec.numel for piece in gradients.plan.slices]
        if isinstance(self._compression, CustomCompression):
            tensors = list(gradients.pieces) if self._compression.takes_each else [as_real(gradients.flat)]
            _combine_packed(links.all, self._compression, tensors, counts, what)
        else:
            Reduction(Adasum, compression=self._compression).all_reduce(links.all, gradients.flat, counts, 1, what)
        return FinishedExchange(gradients)


def _combine_packed(
    group: Group, compression: CustomCompression, tensors: Sequence[Tensor], counts: Sequence[int], what: str
) -> None:
    """Replaces deltas, in place, by their Adasum over all ranks, compressed by a user's own compression."""
    reduction = Reduction(Adasum)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        is_inexact = wire.is_floating_point() or wire.is_complex()
        if is_inexact:
            reduction.check_dtype(wire, of)
        if not is_inexact or real_numel(wire) != real_numel(tensor):
            raise ValueError(
                f"op=hvd.Adasum: {of}: {compression!r} makes {wire.numel()} numbers of {wire.dtype} out of "
                f"{tensor.numel()} of {tensor.dtype}: use a compression that keeps the number of elements and floats"
            )

    pack = PackedTensors(compression, tensors, [what] * len(tensors), check)
    raise_together(group, pack.failure, what, layout=pack.layout)
    for flat, own_counts, packed in pack.flats():
        of_params = own_counts if len(tensors) > 1 else [count * flat.numel() // sum(counts) for count in counts]
        reduction.all_reduce(group, flat, of_params, 1, what)
        put_back(flat, own_counts, packed)
    pack.unpack()
    raise_together(group, pack.failure, f"the end of {what}")


# The cast of a bucket, its wire, and the memory under that if `_Wires` is to reuse it.
_CastWire: TypeAlias = tuple[CastCompression, Tensor, Tensor | None]


class _Wires:
    """A pool of memory for wires on a CPU, in the engine's own memory where it has some. Buckets reuse it in turn."""

    def __init__(self) -> None:
        # Memory that no wire uses now.
        self._free: list[Tensor] = []

    def take(self, group: Group, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Returns a flat, uninitialized tensor to send between a group's ranks, and the memory to give back."""
        if device.type != "cpu":
            # PyTorch's allocator pools such memory itself, and knows which stream still reads it.
            return torch.empty(numel, dtype=dtype, device=device), None
        nbytes = numel * dtype.itemsize
        memory = next((each for each in self._free if each.numel() >= nbytes), None)
        # If no free memory is large enough, drop all of it: memory for the largest bucket serves the others too.
        self._free = [] if memory is None else [each for each in self._free if each is not memory]
        if memory is None:
            memory = group.zeros(nbytes, torch.uint8, device)
        return memory[:nbytes].view(dtype), memory

    def give_back(self, memory: Tensor | None) -> None:
        """Returns a wire's memory to the pool, after the collective has ended and the wire was read."""
        if memory is not None:
            self._free.append(memory)
