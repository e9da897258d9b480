"""
One bucket on its way: sealed, handed to the exchange, its counts beside it, waited for, and the result left in it.

    bucket.seal ── exchange.begin (and the counts, unless it carries them) ── wait ── exchange.finish ── bucket

On a GPU what travels is in the engine's own stream, and waiting holds up the program's stream and not the program. All
else is in the program's: it takes as long as a copy, and would compete with backward for the same memory elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.work import Work
from .bucket import Bucket
from .exchange import Exchange, Gradients, Links
from .flags import ParticipantCount
from .step_trace import BucketTrace, captures
from .strategies import as_real


class InFlight:
    """A bucket under way, and all that must outlive it: engines read and write that memory meanwhile."""

    def __init__(
        self, bucket: Bucket, exchange: Exchange, links: Links, trace: BucketTrace | None = None, *, name: str
    ) -> None:
        """Begin; ``name`` is the bucket's, by which errors and stalls tell it from others.

        ``trace`` is the bucket's row in a timeline, where one is recorded.
        """
        self.bucket = bucket
        self._exchange = exchange
        self._size = links.all.size
        self._trace = trace
        plan = bucket.plan
        self._is_on_cpu = plan.device.type == "cpu"
        memory, scale = bucket.seal(leave_scale=exchange.scales(plan))
        self._gradients = Gradients(
            plan,
            memory.gradients,
            bucket.views,
            what=f"{bucket.description} ({name})",
            takes_part=bucket.takes_part,
            with_counts=memory.flat,
            scale=scale,
            launching=None if trace is None else trace.launching,
        )
        self._counting: tuple[Tensor, Work] | None = None
        if not exchange.carries_counts:
            counts = as_real(memory.tail).to(torch.int32)
            self._counting = counts, links.all.all_reduce(counts, f"the counts of the {self._gradients.what}")
        try:
            self._begun = exchange.begin(self._gradients, links)
        except BaseException:
            # Something may have been launched before.
            bucket.abandon()
            raise
        # The exchange may have used the gradients' own memory.
        bucket.hold()
        # Whether it takes memory beside the bucket's, of a kind that is scarce until `finish`. On a GPU the program is
        # ahead of what it launches: were it to wait there for a wire, nothing would travel during backward.
        self.holds_wire = self._is_on_cpu and self._begun.takes_memory
        if trace is not None and self._begun.works and self._begun.wire is not None:
            # They end in order.
            trace.launched(self._begun.works[-1], self._begun.wire)

    @property
    def failure(self) -> Exception | None:
        """After `finish`: what has gone wrong on this rank, which the others are to be told of."""
        return self._begun.failure

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        # What a CUDA graph captures does not happen yet, and cannot be asked.
        return (
            (self._is_on_cpu or not captures(self.bucket.plan.device))
            and (self._counting is None or self._counting[1].is_completed())
            and self._begun.is_completed()
        )

    def finish(self, count: ParticipantCount | None = None) -> ParticipantCount:
        """Block until done; leave the result in the bucket, and so in every gradient that is a view of it.

        ``count`` is that of another bucket of the same step; returned, and without it read from this one.
        """
        bucket = self.bucket
        if self._trace is None:
            self._wait()
        else:
            with self._trace.waiting():
                self._wait()
        bucket.accept()
        if self._counting is not None:
            as_real(bucket.memory.tail).copy_(self._counting[0])
        # The counts may travel in the exchange's wire, and are in the bucket when it has finished.
        count_of_step = bucket.count(self._size) if count is None else count
        self._exchange.finish(self._gradients, self._begun, count_of_step)
        bucket.hold()
        if count is None:
            count_of_step.keep()
        return count_of_step

    def _wait(self) -> None:
        if self._counting is not None:
            self._counting[1].wait()
        self._begun.wait()
