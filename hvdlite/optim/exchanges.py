"""
The built-in exchanges, and the choice of one for an optimizer.

    AllReduce            a bucket is cast where a compression says so, summed over all ranks, and divided
    CompressedAllReduce  a compression of the user's own makes wires of its gradients, which are summed and divided
    StepAdasum           what each rank's own step has changed is combined (arXiv 2006.02924)
    SingleRank           there is nobody to exchange anything with

Sparse gradients go another way, beside any of these: see `sparse_gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.reduce_op import Adasum
from ..compression.casts import CastCompression
from ..compression.custom import CustomCompression, Packed
from ..ops.failures import raise_together
from ..ops.packing import PackedTensors, put_back
from ..ops.reduction import Reduction, Underway
from .exchange import Exchange, ExchangeWork, Gradients, Links
from .flags import ParticipantCount, presence_of
from .plan import BucketPlan
from .settings import Scaling, Settings

# Where a bucket is scaled and cast in one pass. On a CPU that is slower than in two: PyTorch makes a copy for it.
SCALES_ON_THE_WAY = frozenset({"cuda"})


def exchange_of(settings: Settings, size: int) -> Exchange:
    """The exchange of an optimizer over so many ranks."""
    if settings.exchange is not None:
        exchange = settings.exchange()
        if not isinstance(exchange, Exchange):
            raise TypeError(f"exchange={settings.exchange!r} made {exchange!r}, which is not an hvd.Exchange")
        return exchange
    if settings.op is Adasum:
        return StepAdasum(settings)
    if settings.packs:
        return CompressedAllReduce(settings)
    if settings.leaves_gradients(size):
        return SingleRank()
    return AllReduce(settings)


class SingleRank(Exchange):
    """Leaves gradients where autograd has put them: a rank alone takes no bucket's memory and copies nothing."""

    by_host = False
    aligned = True

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Launch nothing."""
        return ExchangeWork()

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Change nothing."""


class AllReduce(Exchange):
    """Sums a bucket, cast to fewer bits where the settings say so, and divides it, in one pass over the ranks."""

    word = "all-reduce"
    by_host = False
    aligned = True
    carries_counts = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wires = _Wires()
        # By dtype and the number of ranks: the same for many buckets.
        self._scalings: dict[tuple[torch.dtype, int], Scaling] = {}

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """The factor of gradients before they are summed, as in `Settings.scaling`; by 16 bits it prevents overflow."""
        return self._settings.scaling(dtype, size).before

    def scales(self, plan: BucketPlan) -> bool:
        """Whether the scaling is part of a cast, on a device where that takes no longer than the cast alone."""
        return plan.device.type in SCALES_ON_THE_WAY and self._cast_of(plan) is not None

    def _cast_of(self, plan: BucketPlan) -> CastCompression | None:
        """How the bucket is cast, if it is."""
        cast = self._settings.compression
        return cast if isinstance(cast, CastCompression) and cast.casts(plan.dtype.to_real()) else None

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Cast, and launch the all-reduce, of the counts too; in the bucket's own memory where nothing is cast."""
        wire, memory = as_real(gradients.with_counts), None
        cast = self._cast_of(gradients.plan)
        if cast is not None:
            source = wire
            memory = self._wires.take(links.all, source.numel(), cast.dtype, source.device)
            wire = memory.tensor
            # The counts are not scaled.
            cast.convert(source, gradients.scale, as_real(gradients.flat).numel(), wire)
        if gradients.launching is not None:
            gradients.launching()
        work = links.all.all_reduce(wire, f"the {self.word} of the {gradients.what}")
        return ExchangeWork([work], (links.all.size, cast, memory), wire, takes_memory=memory is not None)

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Cast back, and make of the sum the average."""
        size, cast, memory = begun.kept
        dtype = gradients.plan.dtype
        scaling = self._scalings.get((dtype, size))
        if scaling is None:
            scaling = self._scalings[dtype, size] = self._settings.scaling(dtype, size)
        total = as_real(gradients.flat)
        if cast is not None:
            factor = 1.0
            if scaling.over is not None:
                # On the way back, as if all ranks took part.
                factor, scaling = scaling.over / size, replace(scaling, over=float(size))
            cast.convert(memory.tensor, factor, total.numel(), as_real(gradients.with_counts))
            self._wires.give_back(memory)
        scaling.finish(total, count)


class CompressedAllReduce(Exchange):
    """Lets a compression of the user's own pack a bucket's gradients into wires, and averages those.

    Ranks tell each other first that it worked on all of them, with equal sizes, and their counts: so a compression that
    fails on one rank is an error on all, at the same place. It is waited for, and hence nothing happens during
    backward, when another rank may be waiting for something else.
    """

    word = "all-reduce"
    by_host = False
    during_backward = False
    carries_counts = True
    tells_failures = True

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.compression, CustomCompression), "others need no packing"
        self._compression = settings.compression
        self._reduction = settings.of_wires()

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Pack, wait for all ranks to have packed, and launch the wires."""
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
        tail.copy_(torch.tensor(sums))
        divisor = int(ParticipantCount(presence_of(gradients.plan, gradients.counts), links.all.size))
        flats = list(pack.flats())
        underway = [self._reduction.begin(links.all, flat, counts, divisor, what) for flat, counts, _ in flats]
        works = [each.work for each in underway if each.work is not None]
        elsewhere = any(_is_elsewhere(flat, gradients.flat) for flat, _, _ in flats)
        return ExchangeWork(
            works, _Packed(pack, flats, underway), flats[-1][0] if works else None, takes_memory=elsewhere
        )

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Unpack the averages."""
        pack, flats, underway = begun.kept
        for each, (flat, counts, packed) in zip(underway, flats, strict=True):
            each.finish()
            put_back(flat, counts, packed)
        if gradients.takes_part:
            pack.unpack()
            begun.failure = pack.failure
        # No wire is needed any more.
        begun.kept, begun.wire, begun.works = None, None, ()
        pack.packed.clear()


class _Packed(NamedTuple):
    pack: PackedTensors
    flats: list[tuple[Tensor, list[int], list[Packed]]]
    underway: list[Underway]


class StepAdasum(Exchange):
    """Combines what the ranks' steps have changed; each parameter has a dot product of its own.

    It waits for the other ranks, one bucket after the other: no bucket is there before the step.
    """

    word = "Adasum"
    by_host = False
    after_step = True
    aligned = True
    during_backward = False

    def __init__(self, settings: Settings) -> None:
        self._compression = settings.compression

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Combine them."""
        what = f"the {self.word} of the {gradients.what}"
        counts = [piece.spec.numel for piece in gradients.plan.slices]
        if isinstance(self._compression, CustomCompression):
            tensors = list(gradients.pieces) if self._compression.takes_each else [as_real(gradients.flat)]
            _combine_packed(links.all, self._compression, tensors, counts, what)
        else:
            Reduction(Adasum, compression=self._compression).all_reduce(links.all, gradients.flat, counts, 1, what)
        return ExchangeWork()

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Nothing is left to be done."""


def _combine_packed(
    group: Group, compression: CustomCompression, tensors: Sequence[Tensor], counts: Sequence[int], what: str
) -> None:
    """Replace deltas by the Adasum of all ranks', packed by a compression of the user's own.

    ``tensors`` are either those of each parameter or a flat one of all; ``counts`` are the parameters' elements.
    """
    reduction = Reduction(Adasum)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        is_inexact = wire.is_floating_point() or wire.is_complex()
        if is_inexact:
            reduction.check_dtype(wire, of)
        if not is_inexact or _reals(wire) != _reals(tensor):
            raise ValueError(
                f"op=hvd.Adasum: {of}: {compression!r} makes {wire.numel()} numbers of {wire.dtype} out of "
                f"{tensor.numel()} of {tensor.dtype}: use one that keeps each number a floating-point number of its own"
            )

    pack = PackedTensors(compression, tensors, [what] * len(tensors), check)
    raise_together(group, pack.failure, what, layout=pack.layout)
    for flat, own_counts, packed in pack.flats():
        of_params = own_counts if len(tensors) > 1 else [count * flat.numel() // sum(counts) for count in counts]
        reduction.all_reduce(group, flat, of_params, 1, what)
        put_back(flat, own_counts, packed)
    pack.unpack()
    raise_together(group, pack.failure, f"the end of {what}")


class _Wire(NamedTuple):
    """What travels, and the memory that it lies in, if that is to be used again."""

    tensor: Tensor
    memory: Tensor | None


class _Wires:
    """Memory for wires, used again by one bucket after the other: the engine's own, where it has some."""

    def __init__(self) -> None:
        # What no wire uses at present.
        self._free: list[Tensor] = []

    def take(self, group: Group, numel: int, dtype: torch.dtype, device: torch.device) -> _Wire:
        """A flat tensor of any contents, to travel among a group's ranks."""
        if device.type != "cpu":
            # PyTorch keeps such memory itself, and knows which stream still reads it.
            return _Wire(torch.empty(numel, dtype=dtype, device=device), None)
        nbytes = numel * dtype.itemsize
        memory = next((each for each in self._free if each.numel() >= nbytes), None)
        # What is too small for this bucket would lie there for nothing: some bucket is always the largest.
        self._free = [] if memory is None else [each for each in self._free if each is not memory]
        if memory is None:
            memory = group.zeros(nbytes, torch.uint8, device)
        return _Wire(memory[:nbytes].view(dtype), memory)

    def give_back(self, wire: _Wire) -> None:
        """It has travelled, and been read."""
        if wire.memory is not None:
            self._free.append(wire.memory)


def as_real(flat: Tensor) -> Tensor:
    """A tensor's numbers, with complex ones as pairs of real ones, flat, in the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _reals(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _is_elsewhere(flat: Tensor, buffer: Tensor) -> bool:
    return flat.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
