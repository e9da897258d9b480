"""
`Survival`: lets a step of training be finished by the ranks that are left when others are lost (``--survive``).

    synchronize ── a rank is lost ── go_on ── shutdown, init ── the ranks that are left send reports ── settle
                                                            └─ somebody has all averages of the step: all have them
                                                            └─ nobody: the reducer averages the gradients again
                                                            └─ nobody, and some rank cannot: all discard the step

Each optimizer's step ends with a vote, a small all-reduce behind its last bucket: a rank takes the step only once all
ranks have all averages of it. So when a rank is lost, either a rank is past the vote, and then each has the averages,
or none is, and then none has changed a parameter. The reports say which: they hold how many votes of each optimizer a
rank has passed. The average is then exactly that of the ranks that are left, and nothing is restored.

Where the engine of some rank cannot average gradients again (NCCL), all ranks discard the step instead: no optimizer
uses it. A rank may be a step behind when that is decided, so all remember which steps are discarded until all have come
to them. A discarded step counts as one whose vote a rank has passed.

A rank whose program has ended sends no report. It has left its last votes in hvdlite-run's store, where those find them
that are still in their last step, and pass them on in their reports.

Ranks that go back to a commit instead (`hvd.elastic.run`, after a lost rank in a collective of the program's own) say
so in their reports, and all others then do so too.
"""

from __future__ import annotations

import contextlib
import enum
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from hvdlite_wire.codec import decode, encode
from hvdlite_wire.job_contract import STORE
from hvdlite_wire.store_requests import NewWorkerPolicy, RankAssignment

from ..comm.group import MAX_JSON_BYTES, Group
from ..errors import CommunicationError, PeerLostError
from ..faults import point
from ..log import log
from ..rendezvous.elastic_store import KeyListener, LastVotes, Step
from ..rendezvous.store_client import StoreClient


class Retry:
    """The tries that the same ranks have left, at a step, a world or a commit."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._failures = 0
        self._size = 0

    def failed(self, size: int, newcomers: int) -> bool:
        """Counts a failure of ``size`` ranks, ``newcomers`` of them in their first world. Returns if they may go on."""
        if newcomers or size != self._size:
            self._failures = 0
        self._size = size
        self._failures += 1
        return self._failures < self._tries

    def begin_anew(self) -> None:
        """Gives the ranks all tries again, since they have made progress."""
        self._failures = 0


# How often the same ranks try the same step: three times after it has failed once.
_TRIES = 4


class SelfReport(NamedTuple):
    """What a rank says of itself in a new world.

    ``is_new``: it was in no world before. ``is_in_step``: it waits for the averages of a step, of the optimizer with
    this ``number``, which it could average again if it ``can_repeat``. ``passed`` counts its votes of each optimizer.
    ``discarded``: steps that are to be discarded, as far as it knows.
    """

    is_new: bool
    is_in_step: bool
    passed: dict[int, int]
    number: int | None = None
    can_repeat: bool = True
    discarded: frozenset[Step] = frozenset()


class RankReport(NamedTuple):
    """What a rank, or its process's ``identity``, sends to all others in a new world.

    ``left`` is what ended programs have left. ``notes`` are its followers', by their names.
    """

    report: SelfReport
    left: tuple[LastVotes, ...]
    identity: str
    votes: int = 0
    notes: dict[str, Any] = {}  # noqa: RUF012  # never changed


class Settlement(NamedTuple):
    """What all ranks conclude from their reports.

    ``passed`` counts the votes of each optimizer on the rank with most. ``must_restore``: some ranks wait for averages,
    and others have given the step up. ``all_are_in_step``: all wait, and none is new. ``discarded``: steps that each
    rank discards when it comes to them. ``is_last``: one that has ended is past the step in which others wait.
    """

    passed: dict[int, int]
    must_restore: bool
    all_are_in_step: bool = False
    discarded: frozenset[Step] = frozenset()
    is_last: bool = False


class Outcome(enum.Enum):
    """What becomes of a step in which a rank is lost."""

    HAS_AVERAGES = "all ranks have all averages"
    REPEAT = "the ranks that are left average their gradients again"
    DISCARD = "no rank uses the step"


def settle(reports: Sequence[SelfReport], left: Sequence[LastVotes] = ()) -> Settlement:
    """Returns what follows from the reports of all ranks, and from what others have left; equal on all of them."""
    passed: dict[int, int] = {}
    known: list[SelfReport | LastVotes] = [*reports, *left]
    for each in known:
        for number, steps in each.passed.items():
            passed[number] = max(steps, passed.get(number, 0))
    waiting = [report for report in reports if report.is_in_step]
    # Those of which some rank may not know yet.
    discarded = {
        (number, step)
        for told in known
        for number, step in told.discarded
        if any(each.passed.get(number, 0) <= step for each in waiting)
    }
    if not all(report.can_repeat for report in waiting):
        steps_waited_for = {
            (each.number, each.passed.get(each.number, 0)) for each in waiting if each.number is not None
        }
        discarded |= {(number, step) for number, step in steps_waited_for if passed.get(number, 0) == step}
    ways = {report.is_in_step for report in reports if not report.is_new}
    all_are_in_step = all(report.is_in_step and not report.is_new for report in reports)
    is_last = any(
        steps > each.passed.get(number, 0)
        for ended in left
        for number, steps in ended.passed.items()
        for each in waiting
    )
    return Settlement(passed, len(ways) > 1, all_are_in_step, frozenset(discarded), is_last)


class Note(NamedTuple):
    """What a rank says of one of its followers: how many votes it has passed by then, and the follower's own note."""

    passed: int
    note: Any


class Follower(Protocol):
    """What goes on with fewer ranks in the middle of a step, and has to agree with that of the other ranks.

    ``kind`` finds its counterparts on other ranks: of several with the same one, the newest belong together.
    """

    kind: str

    # When a step of the optimizer with this number has ended on this rank, or is discarded: then what it has trained on
    # counts as not trained.
    def note_vote(self, number: int) -> None: ...
    def note_discarded(self, number: int) -> None: ...

    # What the other ranks must know of it, as JSON; ``number`` is that of the optimizer in a step.
    def note_of(self, number: int | None) -> Any: ...

    # Goes on without ranks that were lost in a step; ``notes`` are those of the others, by their new ranks.
    def go_on(self, notes: Sequence[Note]) -> None: ...

    # Gives up the step: the function of `hvd.elastic.run` is called again with the state before it.
    def begin_again(self, number: int | None) -> None: ...


class _StepToFinish(NamedTuple):
    """The step in which this rank has lost others; ``needs_min_np``: the world had process sets."""

    number: int | None
    can_repeat: bool
    needs_min_np: bool


class _Beginning(NamedTuple):
    """What was exchanged at the begin of a world; ``newcomers`` of its ranks were in none before."""

    settlement: Settlement = Settlement({}, must_restore=False)
    told: Sequence[RankReport] = ()
    newcomers: int = 0


class Survival:
    """This process's part in it, over all its worlds. The main thread's, as `init` and `step` are."""

    optimizers_share: bool | None = None
    """Whether the program's optimizers have ``shard=``, so that no step goes on. None before the first."""

    def __init__(
        self,
        enter_again: Callable[[], None],
        revoke: Callable[[int, str], None],
        has_sets: Callable[[], bool] = lambda: False,
        read_last_votes: Callable[[], list[LastVotes]] = list,
    ) -> None:
        """``enter_again`` leaves the world and enters the next; ``revoke`` ends all waits of a generation's.

        ``read_last_votes`` returns what `last_votes` was on ranks whose programs have ended.
        """
        self._enter_again = enter_again
        self._revoke = revoke
        self._has_sets = has_sets
        self._read_last_votes = read_last_votes
        self._passed: dict[int, int] = {}
        # While this rank enters another world in the middle of a step.
        self._step: _StepToFinish | None = None
        self._beginning = _Beginning()  # of this world
        self._lost = ""  # the last loss, in words
        # What stands for this process in reports, and by the same the ranks of the last world in which all had one.
        self._identity = ""
        self._ranks: dict[str, str] = {}
        self.lost_ranks: list[str] = []
        """The ranks that were lost so far, named as they were in the world before, such as ``rank 3 (node2)``."""
        self.beginnings = 0
        """How many worlds so far had ranks that did not come from the same step of the one before."""
        self._size = 0
        self._retry = Retry(_TRIES)
        self._listener: KeyListener | None = None
        self._on_change: Callable[[int], None] | None = None
        self._has_warned = False
        self._followers: list[weakref.ref[Follower]] = []
        self.is_going_on = False
        """Whether the functions run that adapt to the ranks that are left, in the middle of a step."""
        # Whether other ranks already wait in the step that comes next on this one.
        self._others_are_ahead = False

    @property
    def newcomers(self) -> NewWorkerPolicy:
        """Whether the next world may have ranks that were in none before."""
        if self._step is None:
            return NewWorkerPolicy.WELCOME
        if self._on_change is None:
            return NewWorkerPolicy.NEVER
        return NewWorkerPolicy.IF_NEEDED if self._step.needs_min_np else NewWorkerPolicy.AFTERWARDS

    # -- a world's begin and end

    def begin(self, group: Group, assignment: RankAssignment) -> None:
        """Exchanges reports in a new world. Every rank must call it, and waits for all."""
        self._listener = KeyListener(
            StoreClient.from_url(os.environ.get(STORE, "")),
            f"{assignment.prefix}/end",
            lambda _: None,
            partial(self._revoke, assignment.generation),
        )
        if self._step is not None:
            point("report")
        self._identity = self._identity or f"{assignment.generation}.{assignment.rank}"
        told = _exchange(group, self._own_report())
        reports = [each.report for each in told]
        # A rank may also be new by its report alone: if it got its rank in a generation that never began.
        newcomers = max(assignment.newcomers, sum(report.is_new for report in reports))
        settlement = settle(reports, [votes for each in told for votes in each.left])
        self._beginning = _Beginning(settlement, told, newcomers)
        self._others_are_ahead = self._step is not None and any(
            report.is_in_step and any(steps > self._passed.get(at, 0) for at, steps in report.passed.items())
            for report in reports
        )
        self.beginnings += not settlement.all_are_in_step
        ranks = {each.identity: group.describe_rank(rank) for rank, each in enumerate(told)}
        self.lost_ranks += [name for identity, name in self._ranks.items() if identity not in ranks]
        self._ranks = ranks
        self._size = assignment.size
        if self._step is not None:
            point("settled")
        else:
            self._passed = dict(settlement.passed)

    def _own_report(self) -> RankReport:
        is_new, passed = self._size == 0, dict(self._passed)
        if self._step is None:
            return RankReport(SelfReport(is_new, False, passed), (), self._identity)
        number = self._step.number
        report = SelfReport(is_new, True, passed, number, self._step.can_repeat, self._beginning.settlement.discarded)
        left = tuple(self._read_last_votes())
        notes = {name: follower.note_of(number) for name, follower in self._living().items()}
        return RankReport(report, left, self._identity, sum(passed.values()), notes)

    def end(self) -> None:
        """Ends what listens for the end of a world, before this rank leaves it."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def last_votes(self) -> LastVotes | None:
        """Returns what other ranks must know of this one at the end of its program; None if there are none."""
        if self._size <= 1 or not self._passed:
            return None
        return LastVotes(dict(self._passed), self._beginning.settlement.discarded)

    def note_removed(self) -> None:
        """Notes that this rank is removed from the job: it ends before the last step of the others."""
        self._size = 0

    # -- a step

    def come_to_end_of_step(self) -> None:
        """Notes that this rank comes to the end of a step, where it meets all others."""
        self._others_are_ahead = False

    def error_of_call(self, what: str) -> PeerLostError | None:
        """Returns the error of a collective that the program calls now; None if the other ranks will call it, too.

        After a loss others may already wait in the step that comes next here. The loss has failed the call on them.
        """
        if not self._others_are_ahead or self.is_going_on:
            return None
        return PeerLostError(
            f"{what} failed because a rank was lost, and other ranks wait in their next step already: take that step, "
            f"and collectives after it work again ({self._lost})"
        )

    def note_passed(self, number: int) -> None:
        """Notes that all ranks have all averages of a step of the optimizer with this number."""
        self._passed[number] = self._passed.get(number, 0) + 1
        self._retry.begin_anew()
        for follower in self._living().values():
            follower.note_vote(number)

    def discards(self, number: int) -> bool:
        """Whether all ranks discard the next step of the optimizer with this number. Any thread may call it."""
        return (number, self._passed.get(number, 0)) in self._beginning.settlement.discarded

    def note_discarded(self, number: int, what: str, why: str) -> None:
        """Notes that this rank has discarded a step, ``what``; ``why`` says what cannot average its gradients again."""
        self._passed[number] = self._passed.get(number, 0) + 1
        self._retry.begin_anew()
        followers = self._living().values()
        for follower in followers:
            follower.note_discarded(number)
        then = "Its samples are drawn again."
        if not followers:
            batches = "The batch of 1 rank is" if self._size == 1 else f"The batches of {self._size} ranks are"
            then = f"{batches} lost, since the program has no hvd.elastic.ElasticSampler that draws them again."
        log.warning(
            "survive: %s is discarded on all ranks, and changes no parameter: %s. %s (%s)", what, why, then, self._lost
        )

    def follow(self, follower: Follower) -> None:
        """Tells this object of each step, and of the ranks that are lost within one, as long as it lives."""
        self._followers = [each for each in self._followers if each() is not None]
        self._followers.append(weakref.ref(follower))

    def _living(self) -> dict[str, Follower]:
        """Returns the followers (`follow`) that the garbage collector has left, by names equal on all ranks."""
        named: dict[str, Follower] = {}
        # From the newest on: older ones may wait on some ranks for the garbage collection.
        for follower in (each() for each in reversed(self._followers)):
            if follower is not None:
                count = sum(name.startswith(f"{follower.kind}#") for name in named)
                named[f"{follower.kind}#{count}"] = follower
        return named

    def _tell_followers(self, number: int | None) -> None:
        settlement, told, newcomers = self._beginning
        gives_up = self._on_change is not None and newcomers > 0
        for name, follower in self._living().items():
            if gives_up:
                follower.begin_again(number)
            elif not settlement.is_last and all(name in each.notes for each in told):
                follower.go_on([Note(each.votes, each.notes[name]) for each in told])

    def go_on(self, error: CommunicationError, number: int | None, *, can_repeat: bool = True) -> Outcome:
        """Enters the world of the ranks that are left, in a step of this optimizer; returns what all do with the step.

        ``can_repeat``: this rank could average its gradients again. Raises ``error`` if the same ranks have failed
        several times, and a CommunicationError if others go back to a commit.
        """
        before, size = 0 if number is None else self._passed.get(number, 0), self._size
        if not self._retry.failed(size, self._beginning.newcomers):
            raise error
        log.warning("survive: a rank was lost within a step, and the others go on: %s", error)
        self._step = _StepToFinish(number, can_repeat, self._has_sets())
        self._lost = str(error)
        try:
            point("leave")
            self._enter_again()
        finally:
            self._step = None
        if self.must_restore:
            raise CommunicationError(
                f"a rank was lost, and others go back to their last commit instead of this step ({error})"
            ) from error
        self._tell_followers(number)
        if self._on_change is not None:
            self.is_going_on = True
            try:
                self._on_change(self._beginning.newcomers)
            finally:
                self.is_going_on = False
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "survive: now there %s. The program is in no function of hvd.elastic.run: what it has made for %d "
                "ranks stays as it is, such as its sampler and its learning rate",
                "is 1 rank" if self._size == 1 else f"are {self._size} ranks",
                size,
            )
        if number is None:
            return Outcome.REPEAT
        if self.discards(number):
            return Outcome.DISCARD
        return Outcome.HAS_AVERAGES if self._beginning.settlement.passed.get(number, 0) > before else Outcome.REPEAT

    @contextlib.contextmanager
    def calling(self, on_change: Callable[[int], None]) -> Iterator[None]:
        """A context in which ``on_change`` is called in each new world, in the step, with the number of new ranks."""
        earlier, self._on_change = self._on_change, on_change
        try:
            yield
        finally:
            self._on_change = earlier

    @property
    def all_are_in_step(self) -> bool:
        """Whether all ranks of this world came to it from the same step, and none was in no world before."""
        return self._beginning.settlement.all_are_in_step

    @property
    def must_restore(self) -> bool:
        """Whether ranks of this world had a step to finish, and others none: all go back to their last commit."""
        return self._beginning.settlement.must_restore


def _exchange(group: Group, own: RankReport) -> list[RankReport]:
    what = "the reports of all ranks in hvd.init()"
    told = group.all_gather_signed(encode(own), what, at_most_bytes=MAX_JSON_BYTES)
    return [decode(RankReport, each) for each in told]
