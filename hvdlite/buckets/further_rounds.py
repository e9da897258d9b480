"""
`FurtherRounds`: sends gradients that came after their bucket was sent, of parameters that were unfrozen within a step.

    backward ── full buckets are sent, without what is frozen on all ranks ── unfrozen: late gradients in param.grad
    step     ── the other buckets ── send: for which buckets any rank is late ── begin: these once more ── end: added

A parameter that no rank trained in the last step is not waited for in backward, and a bucket of such parameters alone
is not sent. So only their gradients can be late, which is known to all ranks: only then do these ask each other, by
one small all-reduce in the step. One of them may be late alone. `in_flight.BucketQueue` calls this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.work import Work
from .bucket import Bucket
from .gradient_state import GradientState


class FurtherRounds:
    """The further rounds of one step."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets`` are all of the optimizer's, in plan order."""
        # Those whose gradients can be late: the same on all ranks.
        self._buckets = [bucket for bucket in buckets if bucket.frozen]
        self._late: list[dict[str, Tensor]] = []
        self._counts = torch.empty(0, dtype=torch.int32, device="cpu")
        self._work: Work | None = None
        self._is_begun = not self._buckets

    @property
    def are_due(self) -> bool:
        """Whether `begin` is still to be called in this step."""
        return not self._is_begun

    def send(self, group: Group, optimizer: str) -> None:
        """Takes late gradients off their parameters, and launches the all-reduce that tells of them.

        Every rank must call it after it has sent the first rounds, or nothing could be late on one that has not.
        """
        if self._buckets and self._work is None:
            self._late = [bucket.late_gradients() for bucket in self._buckets]
            self._counts = torch.tensor([len(late) for late in self._late], dtype=torch.int32, device="cpu")
            self._work = group.all_reduce(self._counts, f"the counts of late gradients ({optimizer})")

    def begin(self) -> list[Bucket]:
        """Waits for all ranks, and returns the buckets of the further rounds. The first rounds must have ended."""
        self._is_begun = True
        if self._work is None:
            return []
        self._work.wait()
        counts = self._counts.tolist()
        return [
            bucket.further(late)
            for bucket, late, count in zip(self._buckets, self._late, counts, strict=True)
            if count > 0
        ]

    @staticmethod
    def end(bucket: Bucket) -> None:
        """Adds the averages of a further round to those of the first, in ``param.grad``."""
        arrived: list[GradientState] = []
        for own, state in zip(bucket.states, bucket.home.states, strict=True):
            grad = own.param.grad
            if grad is not None:
                state.param.grad = grad if state.param.grad is None else state.param.grad.add_(grad)
            if grad is not None or own.sparse:
                arrived.append(state)
        bucket.home.thaw(arrived)
