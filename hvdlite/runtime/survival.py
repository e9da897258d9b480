"""
`Survival`: lets a step of training be finished by the ranks that are left when others are lost (``--survive``).

    synchronize ── a rank is lost ── go_on ── shutdown, init ── the ranks that are left send reports ── settle
                                                            └─ somebody has all averages of the step: all have them
                                                            └─ nobody: the reducer averages the gradients again

Each optimizer's step ends with a vote, a small all-reduce behind its last bucket: a rank takes the step only once all
ranks have all averages of it. So when a rank is lost, either a rank is past the vote, and then each has the averages,
or none is, and then none has changed a parameter. The reports say which: they hold how many votes of each optimizer a
rank has passed. The average is then exactly that of the ranks that are left, and nothing is restored.

Ranks that go back to a commit instead (`hvd.elastic.run`, after a lost rank in a collective of the program's own) say
so in their reports, and all others then do so too.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..comm.group import Group
from ..environment import launcher_variable
from ..errors import CommunicationError
from ..faults import point
from ..log import log
from ..rendezvous.key_listener import KeyListener
from ..rendezvous.seat import Newcomers, Seat
from ..rendezvous.store_client import StoreClient

# How often the same ranks try the same step, before the error is raised.
_ATTEMPTS = 3


class Report(NamedTuple):
    """What a rank says of itself in a new world.

    ``is_new``: it was in no world before. ``is_in_step``: it waits for the averages of a step. ``passed``: by an
    optimizer's number, how many votes it has passed.
    """

    is_new: bool
    is_in_step: bool
    passed: dict[int, int]


class Settlement(NamedTuple):
    """What all ranks conclude from their reports.

    ``passed``: by an optimizer's number, how many votes the rank has passed that has passed most. ``must_restore``:
    some ranks wait for the averages of a step, and others have given it up. ``all_are_in_step``: all ranks wait for
    them, and none is new.
    """

    passed: dict[int, int]
    must_restore: bool
    all_are_in_step: bool = False


def settle(reports: Sequence[Report]) -> Settlement:
    """Returns what follows from the reports of all ranks; equal on all of them."""
    passed: dict[int, int] = {}
    for report in reports:
        for number, steps in report.passed.items():
            passed[number] = max(steps, passed.get(number, 0))
    ways = {report.is_in_step for report in reports if not report.is_new}
    all_are_in_step = all(report.is_in_step and not report.is_new for report in reports)
    return Settlement(passed, must_restore=len(ways) > 1, all_are_in_step=all_are_in_step)


class Note(NamedTuple):
    """What a rank says of one of its followers: how many votes it has passed by then, and the follower's own note."""

    passed: int
    note: Any


class Follower(Protocol):
    """What goes on with fewer ranks in the middle of a step, and has to agree with that of the other ranks.

    ``kind`` finds its counterparts on other ranks: of several with the same one, the newest belong together.
    """

    kind: str

    def note_vote(self, number: int) -> None:
        """Called when a step of the optimizer with this number has ended on this rank."""

    def note_of(self, number: int | None) -> Any:
        """Returns what the other ranks must know of it, as JSON; ``number`` is that of the optimizer in a step."""

    def go_on(self, notes: Sequence[Note]) -> None:
        """Goes on without ranks that were lost in a step; ``notes`` are those of the others, by their new ranks."""

    def begin_again(self, number: int | None) -> None:
        """Gives up the step: the function of `hvd.elastic.run` is called again with the state before it."""


class Survival:
    """This process's part in it, over all its worlds. The main thread's, as `init` and `step` are."""

    def __init__(
        self,
        enter_again: Callable[[], None],
        revoke: Callable[[str], None],
        has_sets: Callable[[], bool] = lambda: False,
    ) -> None:
        """``enter_again`` leaves the world and enters the next; ``revoke`` ends all waits of the current one.

        ``has_sets`` returns whether the current world has process sets, which need all of --min-np.
        """
        self._enter_again = enter_again
        self._revoke = revoke
        self._has_sets = has_sets
        self._needs_min_np = False
        self._passed: dict[int, int] = {}
        self._is_in_step = False
        self._settlement = Settlement({}, must_restore=False)
        self._newcomers = 0
        self._size = 0
        self._attempts = 0
        self._listener: KeyListener | None = None
        self._on_change: Callable[[int], None] | None = None
        self._has_warned = False
        self._followers: list[weakref.ref[Follower]] = []
        # The optimizer in whose step this rank is, and what each rank says of its followers.
        self._number: int | None = None
        self._notes: list[list[Any]] = []
        self._is_going_on = False

    @property
    def newcomers(self) -> Newcomers:
        """Whether the next world may have ranks that were in none before."""
        if not self._is_in_step:
            return Newcomers.WELCOME
        if self._on_change is None:
            return Newcomers.NEVER
        return Newcomers.IF_NEEDED if self._needs_min_np else Newcomers.AFTERWARDS

    # -- a world's begin and end

    def begin(self, group: Group, seat: Seat) -> None:
        """Exchanges reports in a new world. Every rank must call it, and waits for all."""
        self._listener = KeyListener(
            StoreClient.from_url(launcher_variable("STORE", os.environ)), f"{seat.prefix}/end", _ignore, self._revoke
        )
        if self._is_in_step:
            point("report")
        own = [self._size == 0, self._is_in_step, list(self._passed.items())]
        if self._is_in_step and (followers := self._living()):
            notes = {name: follower.note_of(self._number) for name, follower in followers.items()}
            own.append([sum(self._passed.values()), notes])
        reports = group.all_gather_json(own, "the reports of all ranks in hvd.init()")
        self._settlement = settle([Report(is_new, in_step, dict(passed)) for is_new, in_step, passed, *_ in reports])
        self._notes = [notes for _, _, _, *notes in reports]
        if self._is_in_step:
            point("settled")
        self._newcomers, self._size = seat.newcomers, seat.size
        if not self._is_in_step:
            self._passed = dict(self._settlement.passed)

    def end(self) -> None:
        """Ends what listens for the end of a world, before this rank leaves it."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    # -- a step

    def note_passed(self, number: int) -> None:
        """Notes that all ranks have all averages of a step of the optimizer with this number."""
        self._passed[number] = self._passed.get(number, 0) + 1
        self._attempts = 0
        for follower in self._living().values():
            follower.note_vote(number)

    def follow(self, follower: Follower) -> None:
        """Tells this object of each step, and of the ranks that are lost within one, as long as it lives."""
        self._followers = [each for each in self._followers if each() is not None]
        self._followers.append(weakref.ref(follower))

    @property
    def is_going_on(self) -> bool:
        """Whether the functions run that adapt to the ranks that are left, in the middle of a step."""
        return self._is_going_on

    def _living(self) -> dict[str, Follower]:
        """The followers, by names that are equal on all ranks."""
        named: dict[str, Follower] = {}
        # From the newest on: older ones may wait on some ranks for the garbage collection.
        for follower in (each() for each in reversed(self._followers)):
            if follower is not None:
                count = sum(name.startswith(f"{follower.kind}#") for name in named)
                named[f"{follower.kind}#{count}"] = follower
        return named

    def _tell_followers(self) -> None:
        gives_up = self._on_change is not None and self._newcomers > 0
        notes, self._notes = self._notes, []
        for name, follower in self._living().items():
            if gives_up:
                follower.begin_again(self._number)
            elif all(told and name in told[0][1] for told in notes):
                follower.go_on([Note(passed, of_rank[name]) for ((passed, of_rank),) in notes])

    def go_on(self, error: CommunicationError, number: int | None) -> bool:
        """Enters the world of the ranks that are left, in a step of the optimizer with this number.

        Returns whether this rank has all averages of the step; otherwise all ranks compute them again. Raises ``error``
        if the same ranks have failed several times, and a CommunicationError if others go back to a commit.
        """
        before, size = 0 if number is None else self._passed.get(number, 0), self._size
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            raise error
        log.warning("survive: a rank was lost within a step, and the others go on: %s", error)
        self._is_in_step, self._number = True, number
        self._needs_min_np = self._has_sets()
        try:
            point("leave")
            self._enter_again()
        finally:
            self._is_in_step = False
        if self._size != size:
            self._attempts = 1
        if self._settlement.must_restore:
            raise CommunicationError(
                f"a rank was lost, and others go back to their last commit instead of this step ({error})"
            ) from error
        self._tell_followers()
        if self._on_change is not None:
            self._is_going_on = True
            try:
                self._on_change(self._newcomers)
            finally:
                self._is_going_on = False
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "survive: now there %s. The program is in no function of hvd.elastic.run: what it has made for %d "
                "ranks stays as it is, such as its sampler and its learning rate",
                "is 1 rank" if self._size == 1 else f"are {self._size} ranks",
                size,
            )
        return number is not None and self._settlement.passed.get(number, 0) > before

    @contextlib.contextmanager
    def calling(self, on_change: Callable[[int], None]) -> Iterator[None]:
        """A context in which ``on_change`` is called in each new world, within the step that goes on there.

        It gets the number of ranks that were in no world before.
        """
        earlier, self._on_change = self._on_change, on_change
        try:
            yield
        finally:
            self._on_change = earlier

    @property
    def all_are_in_step(self) -> bool:
        """Whether all ranks of this world came to it from the same step, and none was in no world before."""
        return self._settlement.all_are_in_step

    @property
    def must_restore(self) -> bool:
        """Whether ranks of this world had a step to finish, and others none: all go back to their last commit."""
        return self._settlement.must_restore


def _ignore(_: Any) -> None:
    pass
