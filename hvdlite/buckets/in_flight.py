"""
Launches a step's buckets in plan order, and waits for their results.

    BucketQueue: launch_full (in backward) ── finish_all (in step) ── buckets with their results
    InFlight:    bucket.seal ── exchange.begin (and the counts, unless it carries them) ── wait ── ExchangeWork.finish

`reducer` calls `BucketQueue`, which creates an `InFlight` for each bucket that it launches. On a GPU collectives run on
the engine's stream, and waiting for one blocks the program's stream, not the program. Packing and unpacking run on the
program's stream: they take as long as a copy, and on another stream would compete with backward for memory bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.flat_bytes import as_real
from ..comm.work import Work
from .bucket import Bucket
from .exchange import Exchange, Gradients, Links
from .flags import ParticipantCount, presence_of
from .further_rounds import FurtherRounds
from .parameter_check import ParameterCheck
from .plan import BucketPlan
from .step_trace import BucketTrace, StepTrace, captures

# The maximum number of wires in separate memory at a time: one is sent while the next is packed.
_WIRES = 2


class _Counting(NamedTuple):
    """The counts of a bucket as whole numbers, and the all-reduce that sums them beside it."""

    plan: BucketPlan
    counts: Tensor
    work: Work

    def participants(self, size: int) -> ParticipantCount:
        """Waits for the sums, and returns how many of ``size`` ranks take part. Any thread may call it."""
        self.work.wait()
        # Of complex numbers, the real parts.
        tail = self.counts[::2] if self.plan.dtype.is_complex else self.counts
        return ParticipantCount(presence_of(self.plan, tail), size)


class InFlight:
    """A bucket whose collectives are running. It holds references to all memory that engines read and write."""

    def __init__(
        self, bucket: Bucket, exchange: Exchange, links: Links, trace: BucketTrace | None = None, *, name: str
    ) -> None:
        """Seals the bucket and launches its collectives.

        ``name`` is the bucket's name in errors and stall messages. ``trace`` is its row of the timeline, if one is
        recorded.
        """
        self.bucket = bucket
        self._size = links.all.size
        self._trace = trace
        plan = bucket.plan
        self._is_on_cpu = plan.device.type == "cpu"
        memory, scale = bucket.seal(leave_scale=exchange.scales(plan))
        what = f"{plan.describe()} ({name})"
        self._counting: _Counting | None = None
        if not exchange.carries_counts:
            counts = as_real(memory.tail).to(torch.int32)
            self._counting = _Counting(plan, counts, links.all.all_reduce(counts, f"the counts of the {what}"))
        gradients = Gradients(
            plan,
            memory.gradients,
            bucket.views,
            what=what,
            takes_part=bucket.presence.takes_part,
            with_counts=memory.flat,
            scale=scale,
            launching=None if trace is None else trace.launching,
            ranks=self._size,
            counting=None if self._counting is None else partial(self._counting.participants, self._size),
        )
        try:
            self._begun = exchange.begin(gradients, links)
        except BaseException:
            # A collective may have been launched before the error, and may still write to the buffer.
            bucket.abandon()
            raise
        # The exchange may have written to the gradients.
        bucket.guard()
        # Whether it holds one of the `_WIRES` until `finish`. Not on a GPU: there the program runs ahead of the device,
        # and if it waited for a free wire, it would launch nothing during backward.
        self.holds_wire = self._is_on_cpu and self._begun.takes_memory
        if trace is not None and self._begun.works and self._begun.wire is not None:
            # Works end in order, so the last one stands for all.
            trace.launched(self._begun.works[-1], self._begun.wire)

    @property
    def failure(self) -> Exception | None:
        """The error of `ExchangeWork.finish` on this rank, for `raise_together`. Set after `finish`."""
        return self._begun.failure

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        # While a CUDA graph captures, collectives do not run yet, and must not be queried.
        return (
            (self._is_on_cpu or not captures(self.bucket.plan.device))
            and (self._counting is None or self._counting.work.is_completed())
            and self._begun.is_completed()
        )

    def finish(self, count: ParticipantCount | None = None) -> ParticipantCount:
        """Blocks until the collectives end, and writes the result into the bucket, of which gradients are views.

        Returns the count of participants of this step: ``count`` if another bucket has it already, else this bucket's.
        """
        bucket = self.bucket
        if self._trace is None:
            self._wait()
        else:
            with self._trace.waiting():
                self._wait()
        bucket.require_untouched()
        if self._counting is not None:
            as_real(bucket.memory.tail).copy_(self._counting.counts)
        # This only refers to the counts: with `carries_counts` they are in the bucket after `ExchangeWork.finish`.
        count_of_step = bucket.count(self._size) if count is None else count
        self._begun.finish(count_of_step)
        bucket.guard()
        if count is None:
            count_of_step.keep()
        return count_of_step

    def _wait(self) -> None:
        if self._counting is not None:
            self._counting.work.wait()
        self._begun.wait()


class BucketQueue:
    """Launches the buckets of a step in plan order, waits for them in that order, and sends late gradients.

    It does not launch buckets in the order in which they fill. Ranks may fill them in different orders, and collectives
    pair up only by the order of their launch.
    """

    def __init__(self, exchange: Exchange, trace: StepTrace, check: ParameterCheck, size: int) -> None:
        """``check`` is sent after the buckets in steps where it is due. ``size`` is the number of ranks."""
        self._exchange = exchange
        self._trace = trace
        self._check = check
        self._size = size
        # In this step: the buckets that are not launched yet.
        self._waiting: deque[Bucket] = deque()
        # The last of the buckets' first rounds, and whether it waits for the end of backward; see `begin`.
        self._last: Bucket | None = None
        self._holds_last = False
        # Those that are launched once more for late gradients.
        self._further = FurtherRounds(())
        # Those that are, in order.
        self._launched: list[Bucket] = []
        # The launched ones that are not finished, at the end of `_launched`.
        self._in_flight: deque[InFlight] = deque()
        # The number of unfinished ones that hold a wire.
        self._wires = 0
        # How many ranks took part in the step, once the first bucket is finished.
        self.count: ParticipantCount | None = None
        # The first `InFlight.failure` on this rank.
        self.failure: Exception | None = None
        # Whether some ranks drop the averages of the step and others do not, once the last bucket is finished.
        self.is_dropped_by_some = False

    def begin(self, buckets: Sequence[Bucket], *, holds_last: bool = False) -> None:
        """Starts a step with these buckets, given in plan order. Sleeping ones are not sent.

        ``holds_last``: the last one is not sent before `finish_all`, so that it can say that the averages are dropped.
        """
        self._further = FurtherRounds(buckets)
        self._waiting.extend([bucket for bucket in buckets if not bucket.asleep])
        self._last, self._holds_last = self._waiting[-1] if self._waiting else None, holds_last

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Sends these buckets too in the current step, behind the others."""
        for bucket in buckets:
            bucket.expect()
        self._waiting.extend(buckets)
        if buckets:
            self._last = buckets[-1]

    def end(self) -> None:
        """Ends the step. Collectives that still run are not waited for, and keep their buckets' memory."""
        for in_flight in self._in_flight:
            in_flight.bucket.abandon()
        self._waiting.clear()
        self._last = None
        self._launched.clear()
        self._in_flight.clear()
        self._wires = 0
        self.count = self.failure = None
        self.is_dropped_by_some = False

    def not_sent(self) -> list[Bucket]:
        """Returns the step's buckets that are not launched yet, in plan order. Any thread may call it."""
        return list(self._waiting)

    def launch_full(self, links: Links) -> None:
        """Launches full buckets in plan order, up to the first that is not full. Waits for no other rank."""
        if not self._exchange.during_backward:
            return
        # Finished buckets give their wires back.
        while self._in_flight and self._in_flight[0].is_completed():
            self._finish_first()
        while self._waiting and self._waiting[0].can_leave and self._wires < _WIRES:
            if self._holds_last and self._waiting[0] is self._last:
                return
            self._launch(self._waiting.popleft(), links)

    def finish_all(self, links: Links) -> Iterator[Bucket]:
        """Launches all remaining buckets, full or not, and yields each bucket when its result is in it.

        From then on the user may change its gradients. Raises GradientError if the user has changed one earlier. Then
        it does the same with buckets for late gradients, which it adds to the others. A comparison of parameters, if
        one is due, is sent after the buckets. Raises MismatchError at the end if the parameters differ.
        """
        waiting, launched = self._waiting, self._launched
        first = launched[0] if launched else waiting[0] if waiting else None
        if first is not None:
            self._check.begin(takes_part=first.presence.takes_part)
        checked = back = 0
        has_sent = False
        while waiting or back < len(launched) or self._further.are_due:
            if not waiting and back == len(launched):
                # On all ranks, since all know the same of what can be late.
                waiting.extend(self._further.begin())
                continue
            while waiting and self._wires < _WIRES:
                self._launch(waiting.popleft(), links)
            if not waiting and not has_sent:
                # On every rank at the same point: after the buckets that were awake at the start.
                has_sent = True
                self._further.send(links.all, self._trace.optimizer)
                self._check.send(links.all)
            for bucket in launched[checked:]:
                bucket.require_same()
            checked = len(launched)
            if back + len(self._in_flight) == len(launched):
                self._finish_first()
            bucket = launched[back]
            back += 1
            bucket.unguard()
            if bucket is self._last:
                self.is_dropped_by_some = self._reads_drops(bucket) and bucket.is_dropped_by_some()
            yield bucket
            if bucket.home is not bucket:
                self._further.end(bucket)
        self._check.finish(links.all)

    def _reads_drops(self, bucket: Bucket) -> bool:
        # On a GPU reading waits for the device: only where there is another optimizer, whose gradients may be surplus.
        device = bucket.plan.device
        return device.type == "cpu" or (self._holds_last and not captures(device))

    def _launch(self, bucket: Bucket, links: Links) -> None:
        number = len(self._launched)
        trace, name = self._trace.trace_of(number, bucket), self._trace.name_of(number)
        self._launched.append(bucket)
        in_flight = InFlight(bucket, self._exchange, links, trace, name=name)
        self._in_flight.append(in_flight)
        self._wires += in_flight.holds_wire

    def _finish_first(self) -> None:
        # Remove it only after `finish`: an exception may interrupt the wait.
        first = self._in_flight[0]
        self.count = first.finish(self.count)
        self._in_flight.popleft()
        self._wires -= first.holds_wire
        if self.failure is None:
            self.failure = first.failure
