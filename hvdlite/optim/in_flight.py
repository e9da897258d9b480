"""
Launches a step's buckets in plan order, and waits for their results.

    BucketQueue: launch_full (in backward) ── finish_all (in step) ── buckets that have come back
    InFlight:    bucket.seal ── exchange.begin (and the counts, unless it carries them) ── wait ── exchange.finish

On a GPU what travels is in the engine's own stream, and waiting holds up the program's stream and not the program. All
else is in the program's: it takes as long as a copy, and would compete with backward for the same memory elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..comm.work import Work
from .bucket import Bucket
from .exchange import Exchange, Gradients, Links
from .exchanges import as_real
from .flags import ParticipantCount
from .parameter_check import ParameterCheck
from .step_trace import BucketTrace, StepTrace, captures

# Wires beside a bucket's own memory that are under way together, at most: one travels while the next is made.
_WIRES = 2


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


class BucketQueue:
    """Launches the buckets of a step in plan order, waits for them in that order, and wakes those that sleep.

    In plan order, not as buckets fill: ranks may fill them in different orders, and collectives pair up by the order of
    their launch alone.
    """

    def __init__(self, exchange: Exchange, trace: StepTrace, check: ParameterCheck, size: int) -> None:
        """``check`` travels behind the buckets, where it is due; ``size`` is the number of ranks."""
        self._exchange = exchange
        self._trace = trace
        self._check = check
        self._size = size
        # Those that are to be launched; those that were; of these the last, which have not been finished; and how many
        # wires these take.
        self._waiting: deque[Bucket] = deque()
        self._launched: list[Bucket] = []
        self._in_flight: deque[InFlight] = deque()
        self._wires = 0
        # How many ranks took part in the step, once the first bucket has come back.
        self.count: ParticipantCount | None = None
        # What an exchange that tells the others of it has failed with on this rank.
        self.failure: Exception | None = None

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Begin a step of these buckets, in plan order; those that sleep may be called later."""
        self._waiting.extend([bucket for bucket in buckets if not bucket.asleep])

    def end(self) -> None:
        """End the step; what is still under way goes on in the memory where it lies, and nobody waits for it."""
        for in_flight in self._in_flight:
            in_flight.bucket.abandon()
        self._waiting.clear()
        self._launched.clear()
        self._in_flight.clear()
        self._wires = 0
        self.count = self.failure = None

    def launch_full(self, links: Links) -> None:
        """Launch what is full, as far as everything before it in the plan is; nothing that waits for the others."""
        if not self._exchange.during_backward:
            return
        # Those that are done give their wires back, so that memory holds few of them at a time.
        while self._in_flight and self._in_flight[0].is_completed():
            self._finish_first()
        while self._waiting and self._waiting[0].is_full and self._wires < _WIRES:
            self._launch(self._waiting.popleft(), links)

    def finish_all(self, links: Links) -> Iterator[Bucket]:
        """Launch all that has not been, full or not; each bucket when it has come back.

        From then on its gradients are the user's to change. A GradientError before anything is, where that has been
        done too early. Behind the buckets travels the comparison of parameters, where one is due; a MismatchError when
        all have come back.
        """
        waiting, launched = self._waiting, self._launched
        first = launched[0] if launched else waiting[0] if waiting else None
        if first is not None:
            self._check.begin(takes_part=first.takes_part)
        called: list[Bucket] = []
        checked = back = 0
        has_sent = False
        while waiting or called or back < len(launched):
            if not waiting and back == len(launched):
                # A call to wake travels in a bucket that has come back, so all ranks hear it at the same time.
                for sleeper in called:
                    sleeper.asleep = False
                waiting.extend(called)
                called.clear()
            while waiting and self._wires < _WIRES:
                self._launch(waiting.popleft(), links)
            if not waiting and not has_sent:
                # After those that are awake, on every rank.
                has_sent = True
                self._check.send(links.all)
            for bucket in launched[checked:]:
                bucket.require_same()
            checked = len(launched)
            if back + len(self._in_flight) == len(launched):
                self._finish_first()
            bucket = launched[back]
            back += 1
            if bucket.sleepers:
                called += self._calls_of(bucket)
            bucket.release()
            yield bucket
        self._check.finish(links.all)

    def _launch(self, bucket: Bucket, links: Links) -> None:
        number = len(self._launched)
        trace, name = self._trace.of(number, bucket), self._trace.name_of(number)
        self._launched.append(bucket)
        in_flight = InFlight(bucket, self._exchange, links, trace, name=name)
        self._in_flight.append(in_flight)
        self._wires += in_flight.holds_wire

    def _finish_first(self) -> None:
        # It is under way until it is finished: a wait may be interrupted.
        first = self._in_flight[0]
        self.count = first.finish(self.count)
        self._in_flight.popleft()
        self._wires -= first.holds_wire
        if self.failure is None:
            self.failure = first.failure

    def _calls_of(self, carrier: Bucket) -> list[Bucket]:
        """The sleeping buckets that some rank needs, by the flags of this one."""
        if not any(sleeper.asleep for sleeper in carrier.sleepers):
            return []
        calls = zip(carrier.sleepers, carrier.read_wake(alone=self._size == 1), strict=True)
        return [sleeper for sleeper, needed in calls if needed and sleeper.asleep]
