"""
The reducers of each group (one for each DistributedOptimizer), under numbers that are equal on all its ranks.

    enter (all ranks, in one order) ── number ── pin: those that live here are kept, until unpin

`join` has ranks sit out steps for them. Which of them live on all ranks is a matter of agreement, and not of when the
garbage collector has come to one of them here: nothing is done here at its call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from weakref import ref

from ..comm.group import Group


class SitsOut(Protocol):
    """A reducer as `join` drives it: takes part in other ranks' steps without gradients of its own."""

    def sit_out(self, average_of_active: bool) -> bool: ...

    def spoil(self, why: str) -> None:
        """Something is under way on the channel that will not come to its end: no step may be taken any more."""
        ...

    def pin(self) -> bool:
        """Keep the channel to the other ranks until `unpin`, closed or not; False if it is given back already."""
        ...

    def unpin(self) -> None:
        """Undo one `pin`."""
        ...


class ReducerRegistry:
    """Holds its members by weak references alone, but for those that are pinned."""

    def __init__(self) -> None:
        # By the group's label.
        self._groups: dict[str, _Members] = {}
        self._adding = threading.Lock()
        # Backward passes (autograd's numbers) whose gradients some optimizer has stepped with: what a GAN's generator
        # step leaves behind in the discriminator is recognised by it. A few suffice: gradients do not stay pending for
        # long.
        self.stepped_backwards: deque[int] = deque(maxlen=64)

    def enter(self, group: Group, member: SitsOut) -> None:
        """Give a member its number. On every rank of the group, in the same order, before its engine is opened.

        Before: a rank that is through with opening, and joins, must find the member on all others.
        """
        self._members_of(group).enter(member)

    def pin(self, group: Group) -> dict[int, SitsOut]:
        """Keep those of the group that live and have not been closed; by number."""
        return self._members_of(group).pin()

    def only_one_thread(self, group: Group, what: str) -> AbstractContextManager[None]:
        """For making a reducer, and whatever else has an engine of its own, where the order of calls pairs them up.

        A RuntimeError for a thread that comes while another one of this rank is inside for the same group.
        """
        return self._members_of(group).opening.only(what)

    def forget(self, group: Group) -> None:
        """The group is closed: nobody enters any more."""
        with self._adding:
            self._groups.pop(group.label, None)

    def _members_of(self, group: Group) -> _Members:
        with self._adding:
            return self._groups.setdefault(group.label, _Members(group.size))


class _Members:
    """The reducers of one group."""

    def __init__(self, size: int) -> None:
        self.opening = OneThread(size)
        self._entering = threading.Lock()
        self._entered = 0
        # Made anew for each change: `pin` is called by another thread, at any time.
        self._known: tuple[tuple[int, ref[SitsOut]], ...] = ()

    def enter(self, member: SitsOut) -> None:
        with self._entering:
            self._entered += 1
            kept = [(number, known) for number, known in self._known if known() is not None]
            self._known = (*kept, (self._entered, ref(member)))

    def pin(self) -> dict[int, SitsOut]:
        pinned = {}
        for number, known in self._known:
            member = known()
            if member is not None and member.pin():
                pinned[number] = member
        return pinned


def unpin(pinned: Mapping[int, SitsOut]) -> None:
    """Let go of what `ReducerRegistry.pin` has returned."""
    for member in pinned.values():
        member.unpin()


class OneThread:
    """Lets one thread at a time in, where what the ranks do pairs up by its order alone."""

    def __init__(self, size: int) -> None:
        """``size`` is how many ranks there are; where it is one, all threads may come."""
        self._applies = size > 1
        self._lock = threading.RLock()
        self._inside = ""

    @contextmanager
    def only(self, what: str) -> Iterator[None]:
        """A RuntimeError for a thread that comes while another one is inside; the same one may come again."""
        if not self._applies:
            yield
            return
        own = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what}: called by thread {own!r} while thread {self._inside!r} is in such a call. Which calls of all "
                "ranks belong together is known by their order alone: let one thread call them, one after the other"
            )
        try:
            self._inside = own
            yield
        finally:
            self._lock.release()
