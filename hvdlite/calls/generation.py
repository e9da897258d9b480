"""
`Generation`: a rank's watch, recorder and registry of reducers from one `init` to its `shutdown`.

    take_number ── open_all (when one is first needed) ── enter ── pin: those alive on this rank are kept

The registry numbers each group's reducers (one for each DistributedOptimizer) alike on all ranks of the group. `optim`
registers them. `control.joins` pins them, since `join` has ranks sit out steps of the optimizers that are alive on all
ranks. The ranks agree on which these are: it must not depend on when each rank's garbage collector runs, so nothing
here happens when the collector finalizes a reducer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import ref

from hvdlite_wire.worker_status import StepStatus
from torch import Tensor

from ..comm.group import Group
from ..comm.recorder import Recorder
from ..comm.work import CollectiveWatch
from ..errors import GradientError


class SitsOut(Protocol):
    """A reducer as `join` uses it: it takes part in other ranks' steps without gradients of its own."""

    def progress(self) -> StepStatus: ...
    def why_no_join(self) -> str:
        """Says why this rank must not join, as the message of a GradientError; empty if it may."""

    def sit_out(self, average_of_active: bool) -> bool: ...
    def spoil(self, why: str) -> None:
        """Forbids all further steps, because a collective on the communicator will never end."""

    def pin(self) -> bool:
        """Keeps the communicator open until `unpin`, also after a close; returns False if it is already released."""

    def unpin(self) -> None: ...


class Opens(Protocol):
    """The engine of an optimizer, which all its ranks must still open together."""

    @property
    def ranks(self) -> Group: ...
    def begin(self) -> None:
        """Requests the opening from the other ranks; returns at once where operations are negotiated."""

    def is_settled(self) -> bool:
        """Whether it is open, or `wait` has raised why it is not."""

    def wait(self) -> object:
        """Blocks until the engine is open; raises an error that all ranks get if that fails."""


class ReducerRegistry:
    """Numbers the reducers of each group, and refers to them weakly except while they are pinned.

    Engines that are not open yet are kept even if their optimizer is garbage: all ranks that made one open it.
    """

    def __init__(self) -> None:
        # Not begun yet, in the order of the claims.
        self._unopened: list[Opens] = []
        # Begun, and not settled when last checked.
        self._on_the_way: list[Opens] = []
        self._opening = threading.RLock()
        # The reducers of each group, by the group's label.
        self._groups: dict[str, Reducers] = {}
        self._adding = threading.Lock()
        self.steps: dict[str, int] = {}
        """How many steps each optimizer has taken, by its name; also of those that are garbage by now."""
        # Backward passes (autograd's numbers) whose gradients some optimizer has stepped with: by these the gradients
        # are known that a GAN's generator step leaves in the discriminator. Gradients do not stay pending for long.
        self.stepped_backwards: deque[int] = deque(maxlen=64)
        # By the `id` of a parameter that has left its optimizer's groups: its average, and that tensor's `_version`.
        self._averaged: dict[int, tuple[ref[Tensor], int]] = {}

    def note_averaged(self, params: Iterable[Tensor]) -> None:
        kept = {own: averaged for own, averaged in self._averaged.items() if averaged[0]() is not None}
        grads = {id(param): param.grad for param in params}
        self._averaged = kept | {own: (ref(grad), grad._version) for own, grad in grads.items() if grad is not None}

    def has_averaged(self, param: Tensor) -> bool:
        """Whether the parameter's gradient is an average of an optimizer whose groups the parameter has left."""
        averaged, grad = self._averaged.get(id(param)), param.grad
        return grad is not None and averaged is not None and averaged[0]() is grad and averaged[1] == grad._version

    def of(self, group: Group) -> Reducers:
        with self._adding:
            return self._groups.setdefault(group.label, Reducers(group.size))

    def open_later(self, opening: Opens) -> None:
        """Has the engine opened when that of any optimizer is first needed; never blocks."""
        with self._opening:
            self._unopened.append(opening)

    def open_all(self) -> list[Opens]:
        """Begins to open all claimed engines, in the order of the claims; returns those that are not settled yet.

        Returns at once where operations are negotiated. All are begun together because ranks may first use them in
        different orders, and a rank that joins may not have used them at all.
        """
        if not (self._unopened or self._on_the_way):
            return []
        with self._opening:
            while self._unopened:
                # It stays in the list if this raises, as for two threads with HVDLITE_CHECK=0, and can be retried.
                self._unopened[0].begin()
                self._on_the_way.append(self._unopened.pop(0))
            self._on_the_way = [opening for opening in self._on_the_way if not opening.is_settled()]
            return list(self._on_the_way)

    def progress(self) -> list[StepStatus]:
        return [member.progress() for member in self._living()]

    @property
    def has_several(self) -> bool:
        """Whether more than one optimizer has been made in this process."""
        return sum(group.made for group in list(self._groups.values())) > 1

    def check_join(self) -> None:
        """Raises a GradientError if this rank has an optimizer with which `join` does not work."""
        for member in self._living():
            if why := member.why_no_join():
                raise GradientError(why)

    def _living(self) -> Iterator[SitsOut]:
        with self._adding:
            groups = list(self._groups.values())
        return (member for group in groups for member in group.living())

    def forget(self, group: Group) -> None:
        """Removes a group that has been closed."""
        with self._adding:
            self._groups.pop(group.label, None)
        with self._opening:
            self._unopened = [each for each in self._unopened if each.ranks is not group]


class Reducers:
    """The reducers of one group."""

    def __init__(self, size: int) -> None:
        # Guards the making of a reducer: its number follows from the order of these calls alone.
        self.making = OneThread(size)
        self._entering = threading.Lock()
        self._claimed: set[int] = set()
        # Replaced as a whole at each change: `pin` reads it on another thread without the lock.
        self._known: tuple[tuple[int, ref[SitsOut]], ...] = ()

    def take_number(self, earlier: int | None = None) -> int:
        """Returns the next number, or that of an ``earlier`` world if it is free here. Never blocks.

        It is the same on all ranks if they make their optimizers in the same order.
        """
        with self._entering:
            number = earlier
            if number is None or number in self._claimed:
                number = max(self._claimed, default=0) + 1
            self._claimed.add(number)
            return number

    def enter(self, number: int, member: SitsOut) -> None:
        """Allows the reducer to be pinned. Every rank of the group must call it before the engine is opened.

        A rank that has opened it and joins must find the reducer on all other ranks.
        """
        with self._entering:
            kept = [(number, known) for number, known in self._known if known() is not None]
            self._known = (*kept, (number, ref(member)))

    @property
    def made(self) -> int:
        """How many optimizers have been made, also such as are garbage by now."""
        return len(self._claimed)

    def living(self) -> Iterator[SitsOut]:
        for _, known in self._known:
            if (member := known()) is not None:
                yield member

    def pin(self) -> dict[int, SitsOut]:
        """Pins those that are alive and not closed; returns them by number."""
        pinned = {}
        for number, known in self._known:
            member = known()
            if member is not None and member.pin():
                pinned[number] = member
        return pinned


class OneThread:
    """Admits one thread at a time, for calls that pair up between ranks by their order alone."""

    def __init__(self, size: int) -> None:
        self._applies = size > 1  # with one rank, all threads are admitted
        self._lock = threading.RLock()
        self._inside = ""

    @contextmanager
    def only(self, what: str) -> Iterator[None]:
        """Raises a RuntimeError about ``what`` if another thread is inside; the same thread may enter again."""
        if not self._applies:
            yield
            return
        own = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what}: called by thread {own!r} while thread {self._inside!r} is in such a call. Ranks pair up "
                "these calls by their order alone: make them in one thread, or one after the other"
            )
        try:
            self._inside = own
            yield
        finally:
            self._lock.release()


@dataclass(frozen=True, slots=True)
class Generation:
    """State that all groups of one world share on this rank; ``watch`` also records the ends of other ranks."""

    watch: CollectiveWatch = field(default_factory=CollectiveWatch)
    recorder: Recorder = field(default_factory=Recorder)
    reducers: ReducerRegistry = field(default_factory=ReducerRegistry)
