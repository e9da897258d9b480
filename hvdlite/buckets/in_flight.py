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
from ..comm.group import Group
from ..comm.work import Work
from .bucket import Bucket
from .exchange import Exchange, Gradients, Links
from .flags import ParticipantCount, is_dropped_by_some, presence_of
from .gradient_state import GradientState
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
        """Seals the bucket and launches its collectives. ``name`` is the bucket's in messages."""
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
            flat_with_counts=memory.flat,
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
        # While a CUDA graph captures, collectives do not run yet, and must not be queried.
        return (
            (self._is_on_cpu or not captures(self.bucket.plan.device))
            and (self._counting is None or self._counting.work.is_completed())
            and self._begun.is_completed()
        )

    def finish(self, count: ParticipantCount | None = None) -> ParticipantCount:
        """Waits, and writes the result into the bucket. Returns the count of participants, ``count`` if known."""
        bucket = self.bucket
        if self._trace is None:
            self._wait()
        else:
            with self._trace.waiting():
                self._wait()
        bucket.require_untouched()
        if self._counting is not None:
            as_real(bucket.memory.tail).copy_(self._counting.counts)
        is_first, memory = count is None, bucket.memory
        if count is None:
            # This only refers to the counts: with `carries_counts` they are in the bucket after `ExchangeWork.finish`.
            count = ParticipantCount(presence_of(bucket.plan, memory.flags), self._size)
        self._begun.finish(count)
        bucket.guard()
        if is_first:
            count.keep()
        return count

    def _wait(self) -> None:
        if self._counting is not None:
            self._counting.work.wait()
        self._begun.wait()


class LateGradients:
    """Sends gradients of one step that came after their bucket was sent, of parameters that were unfrozen within it.

    A parameter that no rank trained in the last step is not waited for in backward, and a bucket of such parameters
    alone is not sent. So only their gradients can be late, which is known to all ranks: only then do these ask each
    other, by one small all-reduce in the step. One of them may be late alone.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        # Those whose gradients can be late: the same on all ranks.
        self._buckets = [bucket for bucket in buckets if bucket.frozen]
        self._late: list[dict[str, Tensor]] = []
        self._counts = torch.empty(0, dtype=torch.int32, device="cpu")
        self._work: Work | None = None
        self.are_due = bool(self._buckets)
        """Whether `begin` is still to be called in this step."""

    def send(self, group: Group, optimizer: str) -> None:
        """Takes late gradients off their parameters, and tells all ranks of them, after the first rounds."""
        if self._buckets and self._work is None:
            self._late = [bucket.late_gradients() for bucket in self._buckets]
            self._counts = torch.tensor([len(late) for late in self._late], dtype=torch.int32, device="cpu")
            self._work = group.all_reduce(self._counts, f"the counts of late gradients ({optimizer})")

    def begin(self) -> list[Bucket]:
        """Waits for all ranks, and returns the buckets of the further rounds. The first rounds must have ended."""
        self.are_due = False
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


class BucketQueue:
    """Launches the buckets of a step in plan order, waits for them in that order, and sends late gradients.

    Ranks may fill buckets in different orders, and collectives pair up only by the order of their launch.
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
        self._further = LateGradients(())
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
        """Starts a step with these buckets, in plan order. ``holds_last``: the last is not sent in backward."""
        self._further = LateGradients(buckets)
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
        """Launches all remaining buckets, full or not, and those of late gradients. Yields each once its result is in
        it.

        From then on the user may change its gradients: raises GradientError if that was done earlier, and MismatchError
        at the end if a comparison of parameters was due, and they differ.
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
            if bucket is self._last and self._reads_drops(bucket):
                self.is_dropped_by_some = is_dropped_by_some(bucket.plan, bucket.memory.flags)
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
