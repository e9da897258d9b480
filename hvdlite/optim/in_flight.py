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
from .step_trace import NO_TRACE, BucketTrace, captures


class InFlight:
    """A bucket under way, and all that must outlive it: engines read and write that memory meanwhile."""

    def __init__(
        self, bucket: Bucket, exchange: Exchange, links: Links, track: BucketTrace = NO_TRACE, *, name: str = "a bucket"
    ) -> None:
        """Begin; ``name`` is the bucket's, by which errors and stalls tell it from others."""
        self.bucket = bucket
        self._exchange = exchange
        self._size = links.all.size
        self._track = track
        plan = bucket.plan
        buffer, scale = bucket.seal(leave_scale=exchange.scales(plan))
        self._gradients = Gradients(
            plan,
            buffer[: plan.grad_numel],
            bucket.views,
            what=f"{plan.describe()} ({name})",
            takes_part=bucket.takes_part,
            with_counts=buffer,
            scale=scale,
            launching=track.launching,
        )
        self._counting: tuple[Tensor, Work] | None = None
        if not exchange.carries_counts:
            counts = bucket.tail.to(torch.int32)
            self._counting = counts, links.all.all_reduce(counts, f"the counts of the {self._gradients.what}")
        try:
            self._begun = exchange.begin(self._gradients, links)
        except BaseException:
            # Something may have been launched before.
            bucket.abandon()
            raise
        # The exchange may have used the gradients' own memory.
        bucket.hold()
        if self._begun.works and self._begun.wire is not None:
            # They end in order.
            track.launched(self._begun.works[-1], self._begun.wire)

    @property
    def failure(self) -> Exception | None:
        """After `finish`: what has gone wrong on this rank, which the others are to be told of."""
        return self._begun.failure

    @property
    def holds_wire(self) -> bool:
        """Whether it takes memory beside the bucket's, of a kind that is scarce until `finish`.

        On a GPU the program runs ahead of what it launches: were it to wait there for a wire, nothing would travel
        during backward.
        """
        return self._begun.takes_memory and self.bucket.plan.device.type == "cpu"

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        # What a CUDA graph captures does not happen yet, and cannot be asked.
        return (
            not captures(self.bucket.plan.device)
            and (self._counting is None or self._counting[1].is_completed())
            and self._begun.is_completed()
        )

    def finish(self) -> None:
        """Block until done; leave the result in the bucket, and so in every gradient that is a view of it."""
        bucket = self.bucket
        with self._track.waiting():
            if self._counting is not None:
                self._counting[1].wait()
            self._begun.wait()
        bucket.accept()
        if self._counting is not None:
            bucket.tail.copy_(self._counting[0])
        self._exchange.finish(self._gradients, self._begun, bucket.count(self._size))
        bucket.hold()
