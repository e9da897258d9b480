"""
`BalancedBatchSampler`: gives each rank the part of every batch that suits its speed, on machines that differ.

    an epoch begins ── rank 0: shares by `stragglers` ── all ranks: their part of each batch of the epoch

The batch of all ranks together stays as it is, so that training is that of one process on it, by `weighted`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence, Sized
from itertools import accumulate
from time import monotonic

from torch.utils.data import Sampler

from .ops.broadcast import broadcast_object
from .outside_graphs import keep_outside_graphs
from .runtime.functions import stragglers
from .runtime.world import rank, size
from .values import shown, whole_number

# `stragglers` is about the last minute: after a change, all of that has to be of the new shares.
_MEASURED_S = 60.0
# The part of a step that a change must save.
_LEAST_GAIN = 0.02


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of each batch of ``batch_size`` samples, which all ranks share by their speed.

    Pass it to a ``DataLoader`` as ``batch_sampler``, and the loss through ``optimizer.weighted(loss, len(batch))``,
    since parts differ. All ranks begin with equal parts. When an epoch begins, which all ranks must do together, rank 0
    looks how long each rank takes for its samples (`stragglers`), and all take the parts with which they would take
    equally long, at most once a minute. In an elastic job, parts are equal again after the ranks have changed.

    Raises ValueError, also when an epoch begins, if a batch has fewer samples than there are ranks.
    """

    def __init__(self, dataset: Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        """``batch_size``: of all ranks together. ``shuffle`` draws another order in each epoch, from ``seed``."""
        self._dataset = dataset
        self._batch_size = _checked(batch_size)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._shares = shares_of(self._batch_size, [1.0] * size())
        self._changed_s = monotonic()

    @property
    def shares(self) -> list[int]:
        """How many samples of each batch each rank has in this epoch."""
        return list(self._shares)

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration draw the order of this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        """How many batches an epoch has, the same on all ranks; the last may have fewer samples."""
        return math.ceil(len(self._dataset) / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Begins an epoch. Every rank must call it, and waits for rank 0."""
        _checked(self._batch_size)
        measured = self._measured() if rank() == 0 else None
        shares: list[int] = broadcast_object(measured, root_rank=0, name="BalancedBatchSampler")
        if shares != self._shares:
            self._shares, self._changed_s = shares, monotonic()
        return self._parts(rank(), size())

    def _measured(self) -> list[int]:
        if len(self._shares) != size():
            return shares_of(self._batch_size, [1.0] * size())
        seconds = {pace.rank: sum(pace.seconds.values()) - pace.seconds.get("optimizer", 0.0) for pace in stragglers()}
        if monotonic() < self._changed_s + _MEASURED_S or len(seconds) != size() or min(seconds.values()) <= 0:
            return self._shares
        speeds = [share / seconds[number] for number, share in enumerate(self._shares)]
        shares = shares_of(self._batch_size, speeds)
        longest = max(seconds.values())
        gain = 1 - max(share / speed for share, speed in zip(shares, speeds, strict=True)) / longest
        return shares if gain >= _LEAST_GAIN else self._shares

    def _parts(self, own: int, ranks: int) -> Iterator[list[int]]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(self._seed + self._epoch).shuffle(order)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            shares = self._shares
            if len(batch) < self._batch_size:
                # The last one: each rank has a sample, if need be one of the epoch's first.
                batch += (order * ranks)[: max(0, ranks - len(batch))]
                shares = shares_of(len(batch), self._shares)
            bounds = [0, *accumulate(shares)]
            yield batch[bounds[own] : bounds[own + 1]]


def _checked(batch_size: object) -> int:
    number = whole_number(batch_size)
    if number is None or number < size():
        raise ValueError(
            f"BalancedBatchSampler: batch_size={shown(batch_size)} is no whole number of at least {size()}, a "
            "sample for each rank: it is the batch of all ranks together"
        )
    return number


def shares_of(count: int, weights: Sequence[float]) -> list[int]:
    """Divides ``count`` in the ratio of the weights, as nearly as whole numbers can, but each gets at least 1."""
    rest = count - len(weights)
    exact = [weight / sum(weights) * count - 1 for weight in weights]
    # Who deserves less than 1 has it already, and the others share what is left.
    positive = [max(0.0, each) for each in exact]
    scale = rest / sum(positive) if sum(positive) else 0.0
    shares = [1 + int(each * scale) for each in positive]
    by_rest = sorted(range(len(weights)), key=lambda place: positive[place] * scale % 1, reverse=True)
    for place in by_rest[: count - sum(shares)]:
        shares[place] += 1
    return shares


keep_outside_graphs(globals())
