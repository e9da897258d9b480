"""
The buckets that travel in one step: launched in plan order, waited for, and what their flags say done.

    full buckets ── InFlight ── ... ── the rest ── wait ── gradients of other ranks ── sleepers that some rank needs

`reducer` decides when a bucket is full, and when a step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from ..comm.group import Group
from ..errors import MismatchError
from ..ops.failures import raise_together
from .bucket import Bucket
from .flags import active_of, count_of
from .layout import Layout
from .parameter_check import ParameterCheck
from .parcel import Parcel, send
from .slot import Slot
from .step_trace import StepTrace
from .wire import InFlight, Settings
from .wire_memory import Wires

# Wires of a bucket's own memory that are under way together, at most: one travels while the next is made.
_WIRES = 2


class BucketsInFlight:
    """Empty before a step, and after `reset`."""

    def __init__(
        self, layout: Layout, settings: Settings, tracks: StepTrace, check: ParameterCheck, *, alone: bool
    ) -> None:
        """``alone`` is whether there are no other ranks."""
        self._alone = alone
        self._check = check
        self._layout = layout
        self._settings = settings
        self._tracks = tracks
        self._wires = Wires()
        self._launched: list[Bucket] = []
        # The last of those launched, which have not been finished.
        self._in_flight: deque[InFlight | Parcel] = deque()
        # What a compression of the user's own has raised on this rank at the end of a bucket's way.
        self._failure: Exception | None = None
        # How many ranks took part, once the first bucket has come back.
        self._presence: Tensor | None = None
        # Gradients that from the next step on are gathered, with the bucket that they leave.
        self._leaving: list[tuple[Bucket, list[Slot]]] = []
        # Gradients that are sparse on some ranks and dense on others, by name.
        self._mixed: list[str] = []

    def reset(self) -> None:
        """The step is over, or is given up: nobody waits for what is still under way, and it writes where it lies."""
        for in_flight in self._in_flight:
            in_flight.bucket.abandon()
        self._launched.clear()
        self._in_flight.clear()
        self._failure = None
        self._presence = None
        self._leaving.clear()
        self._mixed.clear()

    @property
    def active(self) -> int:
        """How many ranks took part in what has come back, not counting those that sat out."""
        assert self._presence is not None, "something has come back"
        return active_of(self._presence)

    @property
    def has_failed(self) -> bool:
        """Whether what has come back is no average; `gather` will raise it on all ranks."""
        return self._failure is not None

    # -- there

    def launch_full_buckets(self, group: Group) -> None:
        """Launch what is full, as far as everything before it in the plan is; nothing that waits for the others."""
        if self._settings.packs:
            return
        # Those that are done give their wires back, so that memory holds few of them at a time.
        while self._in_flight and self._in_flight[0].is_completed():
            self._finish_first()
        # In plan order, not as buckets fill: ranks may fill them in different orders, and collectives
        # pair up by the order of their launch alone.
        for bucket in self._layout.awake()[len(self._launched) :]:
            if not (bucket.full and self._has_room):
                break
            self._launch(bucket, group)

    def _finish_first(self) -> None:
        # It is under way until it is finished: a wait may be interrupted.
        self._in_flight[0].finish()
        self._failure = self._failure or self._in_flight.popleft().failure

    @property
    def _has_room(self) -> bool:
        """Whether one more wire may be made; if not, it is when one of those under way is finished."""
        return sum([in_flight.holds_wire for in_flight in self._in_flight]) < _WIRES

    def _launch(self, bucket: Bucket, group: Group) -> None:
        place = len(self._launched)
        track, name = self._tracks.of(place, bucket), self._tracks.name_of(place)
        self._launched.append(bucket)
        self._in_flight.append(send(bucket, group, self._settings, self._wires, track, name=name))

    # -- and back

    def arriving(self, group: Group) -> Iterator[Bucket]:
        """Launch all that has not been, full or not; each bucket when it has come back, in plan order.

        From then on its gradients are the user's to change. A GradientError before anything is, where that has been
        done too early. Behind the buckets travels the comparison of parameters, where one is due; a MismatchError when
        all have come back.
        """
        if self._layout.buckets:
            self._check.begin(takes_part=self._layout.buckets[0].takes_part)
        waiting = deque(self._layout.awake()[len(self._launched) :])
        called: list[Bucket] = []
        checked = back = 0
        while waiting or called or back < len(self._launched):
            if not waiting and back == len(self._launched):
                # A call to wake travels in a bucket that has come back, so all ranks hear it at the same time.
                for sleeper in called:
                    sleeper.asleep = False
                waiting.extend(called)
                called.clear()
            while waiting and self._has_room:
                self._launch(waiting.popleft(), group)
            if not waiting:
                # After those that are awake, on every rank.
                self._check.send(group)
            for bucket in self._launched[checked:]:
                bucket.require_same()
            checked = len(self._launched)
            if back + len(self._in_flight) == len(self._launched):
                self._finish_first()
            bucket = self._launched[back]
            back += 1
            called += self._calls_of(bucket)
            if self._presence is None:
                self._presence = bucket.presence.clone()
            bucket.release()
            yield bucket
        self._check.finish(group)

    def _calls_of(self, carrier: Bucket) -> list[Bucket]:
        """The sleeping buckets that some rank needs, by the flags of this one."""
        if not any(sleeper.asleep for sleeper in carrier.sleepers):
            return []
        calls = zip(carrier.sleepers, carrier.read_wake(alone=self._alone), strict=True)
        return [sleeper for sleeper, needed in calls if needed and sleeper.asleep]

    def settle(self, bucket: Bucket) -> list[Slot]:
        """Set the gradients that this rank does not have but others do; return those that are to be gathered."""
        if bucket.is_complete:
            return []
        flags = bucket.read_flags(alone=self._alone)
        leaving = [slot for slot, used, sparse in flags if self._settle(slot, used, sparse)]
        if leaving:
            self._leaving.append((bucket, leaving))
        return leaving

    def _settle(self, slot: Slot, used: bool, sparse: bool) -> bool:
        """Leave in one gradient what the flags of all ranks say; whether it is to be gathered instead."""
        if self._settings.sparse_as_dense:
            if sparse and slot.view is not None:
                slot.param.grad = slot.view.to_sparse(1)
            elif used and not slot.arrived:
                slot.param.grad = slot.view
            return False
        if used and sparse:
            # Said when all buckets have come back, so that no rank still waits for one.
            self._mixed.append(slot.name)
        elif used and not slot.arrived:
            slot.param.grad = slot.view
        return sparse

    def gather(self, group: Group) -> None:
        """When all have come back: join the sparse gradients of all ranks, also those that are new."""
        if self._settings.packs:
            raise_together(group, self._failure, f"the averaging of gradients ({self._tracks.optimizer})")
        if self._mixed:
            raise MismatchError(
                f"parameter {self._mixed[0]!r} has a sparse gradient on some ranks and a dense one on others: build "
                "the same model on every rank, or wrap the optimizer with sparse_as_dense=True"
            )
        for bucket, leaving in self._leaving:
            self._layout.move_out(bucket, leaving)
        if not self._layout.sparse:
            return
        count = group.size if self._presence is None else count_of(self._presence, group.size)
        for home in self._layout.sparse:
            # Their values travel as they are, and only their own rank's are added up as they are gathered.
            scaling = self._settings.scaling_of_wire(home.dtype, group.size)
            home.reduce(group, scaling, count, self._tracks.optimizer)
