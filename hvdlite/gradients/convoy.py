"""
The buckets that travel in one step: launched in plan order, waited for, and what their flags say done.

    full buckets ── InFlight ── ... ── the rest ── wait ── sleepers that some rank needs ── gradients of other ranks

When a bucket is full, and when a step ends, is for `reducer` to say.
"""

from __future__ import annotations

from ..channels.collective import Group
from ..channels.reduce_op import Average
from ..errors import MismatchError
from .bucket import Bucket, Slot
from .layout import Layout
from .tracks import Tracks
from .wire import InFlight, Settings, weight_of


class Convoy:
    """Empty before a step, and after `disperse`."""

    def __init__(self, layout: Layout, settings: Settings, tracks: Tracks) -> None:
        self._layout = layout
        self._settings = settings
        self._tracks = tracks
        self._launched: list[Bucket] = []
        self._in_flight: list[InFlight] = []

    def disperse(self) -> None:
        """The step is over, or is given up."""
        self._launched.clear()
        self._in_flight.clear()

    @property
    def active(self) -> int:
        """How many ranks took part in what has come back, not counting those that sat out."""
        return int(self._launched[0].presence.tolist()[0])

    def launch_full_buckets(self, group: Group) -> None:
        """Launch what is full, as far as everything before it in the plan is."""
        # In plan order, not as buckets fill: ranks may fill them in different orders, and collectives
        # pair up by the order of their launch alone.
        for bucket in self._layout.awake()[len(self._launched) :]:
            if not bucket.full:
                break
            self._launch(bucket, group)

    def _launch(self, bucket: Bucket, group: Group) -> None:
        track = self._tracks.of(len(self._launched), bucket)
        self._launched.append(bucket)
        self._in_flight.append(InFlight(bucket, group, self._settings, track))
        # Those that are done give their wires back, so that memory holds few of them at a time.
        while self._in_flight[0].is_completed() and len(self._in_flight) > 1:
            self._in_flight.pop(0).finish()

    def launch_rest_and_wait(self, group: Group) -> None:
        """Launch all that has not been, full or not; return when everything has come back."""
        for bucket in self._layout.awake()[len(self._launched) :]:
            self._launch(bucket, group)
        self._finish_all()
        # A call to wake travels in a bucket that has just come back, so all ranks hear it at the same time.
        carriers = [bucket for bucket in self._launched if any(sleeper.asleep for sleeper in bucket.sleepers)]
        for carrier in carriers:
            for sleeper, needed in zip(carrier.sleepers, carrier.read_wake(), strict=True):
                if needed and sleeper.asleep:
                    sleeper.asleep = False
                    self._launch(sleeper, group)
        self._finish_all()
        for bucket in self._launched:
            bucket.release()

    def _finish_all(self) -> None:
        for in_flight in self._in_flight:
            in_flight.finish()
        self._in_flight.clear()

    def give_back(self, group: Group) -> None:
        """Set the gradients that this rank does not have but others do, and learn which are sparse."""
        for bucket in list(self._launched):
            if bucket.locally_complete:
                continue
            newly_sparse = [slot for slot, used, sparse in bucket.read_flags() if self._settle(slot, used, sparse)]
            if newly_sparse:
                self._layout.move_out(bucket, newly_sparse)
        before, after = self._settings.scales(group.size)
        if self._layout.sparse and self._settings.op is Average:
            after *= weight_of(self._launched[0].presence, group.size)
        for home in self._layout.sparse:
            home.reduce(group, before, after)

    def _settle(self, slot: Slot, used: bool, sparse: bool) -> bool:
        """Leave in one gradient what the flags of all ranks say; whether it is to be gathered instead."""
        if self._settings.sparse_as_dense:
            if sparse and slot.view is not None:
                slot.param.grad = slot.view.to_sparse(1)
            elif used and not slot.arrived:
                slot.param.grad = slot.view
            return False
        if used and sparse:
            raise MismatchError(
                f"parameter {slot.name!r} has a sparse gradient on some ranks and a dense one on others: build "
                "the same model on every rank, or wrap the optimizer with sparse_as_dense=True"
            )
        if used and not slot.arrived:
            slot.param.grad = slot.view
        return sparse
