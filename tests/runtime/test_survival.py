"""All orders in which three ranks may be lost within their steps: the others always agree on what became of each step.

The model is of `Reducer._complete` and `hvd.init`; what the ranks conclude is the real `Survival`'s.
"""

from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from long_run import trials

from hvdlite.errors import CommunicationError, PeerLostError
from hvdlite.rendezvous.seat import Newcomers, Seat
from hvdlite.runtime import survival as module
from hvdlite.runtime.survival import Report, Settlement, Survival, settle

SIZE, MOST_DEATHS = 3, 2
REPORTS, REDUCE, VOTE, LEFT, DEAD = "reports", "reduce", "vote", "left", "dead"
# What of a Survival is no state, and is given anew.
GIVEN = {"_enter_again", "_revoke", "_has_sets", "_listener", "_on_change"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """No thread listens to hvdlite-run, and there is none."""
    monkeypatch.setattr(module, "KeyListener", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "StoreClient", SimpleNamespace(from_url=lambda _: None))
    of_a_survival.cache_clear()


class Reported(Exception):  # noqa: N818 - no error: it ends `begin` as soon as the report is known
    """What a rank reports in a new world."""


def group_with(reports=None):
    """The group of a world in which the ranks report this; without it, one whose ranks never hear of each other."""

    def all_gather_json(own, what):
        if reports is None:
            raise Reported(own)
        assert own in reports
        return reports

    return SimpleNamespace(all_gather_json=all_gather_json)


def enter(survival, size, reports=None, newcomers=0):
    """Begins a world of this size, as hvd.init does."""
    survival.begin(group_with(reports), Seat(1, 0, size, newcomers))


# ------------------------------------------------------------------ the exploration


@functools.cache
def of_a_survival(state, sizes, error_in, reports=None):
    """What a rank does that enters worlds of these sizes: only the last one's reports arrive, if there are any.

    ``state`` is its survival's, as bytes; ``error_in`` is the optimizer in whose step it is, or None outside a step.
    Returns what it reports, or else its next state and what `go_on` returns.
    """

    def enter_again():
        for size in sizes[:-1]:
            with pytest.raises(Reported):
                enter(survival, size)
            survival.end()
        enter(survival, sizes[-1], None if reports is None else [pickle.loads(each) for each in reports])

    survival = survival_of(state, enter_again)
    try:
        result = enter_again() if error_in is None else survival.go_on(PeerLostError("lost"), error_in)
    except Reported as reported:
        return pickle.dumps(reported.args[0])
    return state_of(survival), result


def survival_of(state, enter_again=lambda: None):
    survival = Survival(enter_again, lambda _: None)
    vars(survival).update(pickle.loads(state))
    return survival


def state_of(survival):
    return pickle.dumps({name: value for name, value in vars(survival).items() if name not in GIVEN})


class Rank(NamedTuple):
    """A rank: the collective that it is in, or comes to next."""

    state: bytes  # of its Survival
    does: str = LEFT
    is_inside: bool = False  # it has entered the collective
    averages: tuple[int, ...] | None = None  # whose gradients are in the averages of its step, once it has all of them
    applied: tuple[tuple[int, ...], ...] = ()  # the same, of each step that it has applied
    is_in_step: bool = False  # it is in `go_on`
    sizes: tuple[int, ...] = ()  # of the worlds that it has entered in one `go_on` or `init`


class World(NamedTuple):
    """All ranks, and the current generation: its members, its collectives, and how many of them each has entered."""

    ranks: tuple[Rank, ...]
    members: tuple[int, ...] = ()
    names: tuple[tuple[str, int], ...] = ()
    entered: tuple[int, ...] = (0,) * SIZE
    ended: tuple[int, ...] = (0,) * SIZE
    reports: tuple[bytes, ...] = ()


class Exploration:
    """Every world that ``steps`` steps of optimizers in turn, with some deaths, may lead to."""

    def __init__(self, steps, optimizers=1):
        self.steps, self.optimizers = steps, optimizers
        self.ends = set()

    def run(self):
        """Returns how many worlds were seen."""
        world = World((Rank(state_of(Survival(lambda: None, lambda _: None))),) * SIZE)
        seen, next_ones = {world}, [(world, ())]
        while next_ones:
            world, path = next_ones.pop()
            try:
                self._check(world)
                for event, then in self._after(world):
                    if then not in seen:
                        seen.add(then)
                        next_ones.append((then, (path, event)))
            except AssertionError as error:
                raise AssertionError(f"{error} after {unrolled(path)}") from error
        return len(seen)

    def _after(self, world):
        """Yields all that may happen next: events, and the worlds after them."""
        alive = living(world)
        events = []
        if all(world.ranks[each].does == LEFT for each in alive):
            events.append(("form", self._formed(world, alive)))
        for number in alive:
            rank = world.ranks[number]
            if rank.does == LEFT:
                continue
            # At the end of the exploration no rank begins another step, and each still follows the others.
            if not rank.is_inside and (rank.does == REPORTS or len(rank.applied) < self.steps):
                events.append((("enter", number), self._entered(world, number)))
            if rank.is_inside and all(world.entered[each] > world.ended[number] for each in world.members):
                events.append((("end", number), self._ended(world, number)))
            if any(world.ranks[each].does == DEAD for each in world.members):
                events.append((("fail", number), self._failed(world, number)))
        if not events:
            assert all(len(world.ranks[each].applied) == self.steps for each in alive), "they wait for ever"
            assert len({world.ranks[each].applied for each in alive}) == 1
            self.ends.add((alive, world.ranks[alive[0]].applied))
        yield from events
        if len(alive) > SIZE - MOST_DEATHS:
            for number in alive:
                yield ("die", number), changed(world, number, world.ranks[number]._replace(does=DEAD))

    def _formed(self, world, alive):
        ranks = list(world.ranks)
        for each in alive:
            ranks[each] = ranks[each]._replace(does=REPORTS, is_inside=False, sizes=(*ranks[each].sizes, len(alive)))
        reports = tuple(of_a_survival(*self._step_of(ranks[each])) for each in alive)
        return World(tuple(ranks), alive, reports=reports)

    def _entered(self, world, number):
        rank, place = world.ranks[number], world.entered[number]
        # Reports are exchanged in no step.
        name = (rank.does, -1 if rank.does == REPORTS else len(rank.applied))
        assert world.names[place : place + 1] in ((), (name,)), "the ranks are in different collectives"
        names = world.names if place < len(world.names) else (*world.names, name)
        then = changed(world, number, rank._replace(is_inside=True))
        return then._replace(names=names, entered=one_more(world.entered, number))

    def _ended(self, world, number):
        rank = world.ranks[number]._replace(is_inside=False)
        if rank.does == REPORTS:
            rank = self._settled(rank, world.reports)
        elif rank.does == REDUCE:
            rank = rank._replace(does=VOTE, averages=world.members)
        else:
            rank = self._applied(rank)
        return changed(world, number, rank)._replace(ended=one_more(world.ended, number))

    def _settled(self, rank, reports):
        state, has_averages = of_a_survival(*self._step_of(rank), reports)
        averages = rank.averages
        rank = rank._replace(does=REDUCE, state=state, is_in_step=False, sizes=(), averages=None)
        if not has_averages:
            return rank
        assert averages is not None, "somebody has passed the vote of a rank without averages"
        return self._applied(rank._replace(averages=averages))

    def _applied(self, rank):
        survival = survival_of(rank.state)
        survival.note_passed(len(rank.applied) % self.optimizers)
        applied = (*rank.applied, rank.averages)
        return rank._replace(does=REDUCE, averages=None, applied=applied, state=state_of(survival))

    def _failed(self, world, number):
        rank = world.ranks[number]
        if rank.does == REPORTS:
            # `init` enters the next world itself.
            return changed(world, number, rank._replace(does=LEFT, is_inside=False))
        return changed(world, number, rank._replace(does=LEFT, is_inside=False, is_in_step=True))

    def _step_of(self, rank):
        return rank.state, rank.sizes, len(rank.applied) % self.optimizers if rank.is_in_step else None

    def _check(self, world):
        alive = living(world)
        longest = max((world.ranks[each].applied for each in alive), key=len)
        for each in alive:
            rank = world.ranks[each]
            assert rank.applied == longest[: len(rank.applied)], "the same step has different averages"
            assert len(longest) - len(rank.applied) <= 1, "a step was lost"
            assert all(set(alive) <= set(step) for step in rank.applied), "a step lacks a rank that lives"
            passed = pickle.loads(rank.state)["_passed"]
            for optimizer in range(self.optimizers):
                assert passed.get(optimizer, 0) == len(rank.applied[optimizer :: self.optimizers])


def living(world):
    return tuple(number for number, rank in enumerate(world.ranks) if rank.does != DEAD)


def changed(world, number, rank):
    return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def one_more(counts, number):
    return (*counts[:number], counts[number] + 1, *counts[number + 1 :])


def unrolled(path):
    events = []
    while path:
        path, event = path
        events.append(event)
    return events[::-1]


def test_whoever_dies_wherever_all_others_apply_the_same_averages_of_each_step_once():
    exploration = Exploration(trials(2, 4))
    assert exploration.run() > 10_000
    # Each number of survivors, and deaths before the first step, between the two and behind the last.
    assert {len(alive) for alive, _ in exploration.ends} == {1, 2, 3}
    applied = {tuple(len(step) for step in steps[:2]) for _, steps in exploration.ends}
    assert applied == {(3, 3), (3, 2), (3, 1), (2, 2), (2, 1), (1, 1)}


def test_whoever_dies_wherever_two_optimizers_in_turn_agree_on_the_steps_of_each():
    assert Exploration(trials(3, 5), optimizers=2).run() > 10_000


def test_the_exploration_finds_ranks_that_settle_for_the_least_instead_of_the_most(monkeypatch):
    def settle_for_least(reports):
        numbers = {number for report in reports for number in report.passed}
        return Settlement({each: min(report.passed.get(each, 0) for report in reports) for each in numbers}, False)

    monkeypatch.setattr(module, "settle", settle_for_least)
    with pytest.raises(AssertionError, match=r"different|lost"):
        Exploration(2).run()


# ------------------------------------------------------------------ what ranks conclude


@pytest.fixture
def survival():
    """A survival in a world of three ranks; each world that it enters has one rank less, and nobody has passed more."""

    def enter_again():
        survival.end()
        enter_the_next()

    def enter_the_next():
        own = [False, True, list(survival._passed.items())]
        enter(survival, survival._size - 1, [own])

    survival = Survival(enter_again, lambda _: None)
    enter(survival, 3, [[True, False, []]])
    return survival


def entering(survival, reports, size=2, newcomers=0):
    """Has the survival enter a world with these reports besides its own whenever it goes on."""

    def enter_again():
        own = [False, True, list(survival._passed.items())]
        enter(survival, size, [own, *reports], newcomers)

    survival._enter_again = enter_again
    return survival


def test_the_most_votes_that_a_rank_has_passed_count_for_each_optimizer():
    reports = [Report(False, True, {0: 3, 1: 2}), Report(False, True, {0: 2, 1: 2, 4: 1})]
    assert settle(reports) == Settlement({0: 3, 1: 2, 4: 1}, must_restore=False, all_are_in_step=True)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Report(False, True, {}), Report(False, True, {})], True),
        ([Report(False, True, {}), Report(False, False, {})], False),
        ([Report(False, True, {}), Report(True, False, {})], False),
    ],
)
def test_all_ranks_know_whether_all_of_them_come_from_the_same_step(reports, expected):
    assert settle(reports).all_are_in_step is expected


def test_newcomers_adopt_the_counts_of_the_others():
    newcomer = Survival(lambda: None, lambda _: None)
    enter(newcomer, 2, [[True, False, []], [False, False, [[0, 7], [1, 3]]]])
    # JSON has no dicts with numbers as keys, and no tuples.
    assert newcomer._passed == {0: 7, 1: 3}
    assert not newcomer.must_restore


def test_a_rank_within_a_step_keeps_its_own_count_until_it_has_ended_the_step(survival):
    entering(survival, [[False, True, [[0, 1]]]])
    assert survival.go_on(PeerLostError("lost"), 0)
    assert survival._passed == {}
    survival.note_passed(0)
    assert survival._passed == {0: 1}


def test_averages_that_nobody_has_are_computed_again(survival):
    survival.note_passed(0)
    entering(survival, [[False, True, [[0, 1]]]])
    assert not survival.go_on(PeerLostError("lost"), 0)


def test_a_vote_of_another_optimizer_says_nothing_of_this_one(survival):
    entering(survival, [[False, True, [[1, 1]]]])
    assert not survival.go_on(PeerLostError("lost"), 0)


def test_all_go_back_to_a_commit_where_some_have_given_up_the_step_that_others_wait_for(survival):
    waits, has_given_up = Report(False, True, {0: 1}), Report(False, False, {0: 1})
    assert settle([waits, has_given_up]).must_restore
    assert not settle([waits, waits]).must_restore
    assert not settle([has_given_up, has_given_up]).must_restore
    entering(survival, [[False, False, []]])
    error = PeerLostError("a rank was lost")
    with pytest.raises(CommunicationError, match="others go back to their last commit") as raised:
        survival.go_on(error, 0)
    assert raised.value.__cause__ is error
    assert survival.must_restore


def test_a_newcomer_makes_nobody_go_back_to_a_commit():
    newcomer = Report(True, False, {})
    for is_in_step in (False, True):
        assert not settle([newcomer, Report(False, is_in_step, {0: 1}), newcomer]).must_restore


def test_newcomers_are_welcome_outside_a_step_and_within_one_only_to_programs_that_can_begin_it_again(survival):
    asked = []
    go_on_there = entering(survival, [])._enter_again
    survival._enter_again = lambda: (asked.append(survival.newcomers), go_on_there())
    assert survival.newcomers is Newcomers.WELCOME
    survival.go_on(PeerLostError("lost"), 0)
    with survival.calling(lambda _: None):
        assert survival.newcomers is Newcomers.WELCOME
        survival.go_on(PeerLostError("lost"), 0)
        survival._has_sets = lambda: True
        survival.go_on(PeerLostError("lost"), 0)
    assert asked == [Newcomers.NEVER, Newcomers.AFTERWARDS, Newcomers.IF_NEEDED]
    assert survival.newcomers is Newcomers.WELCOME


def test_a_world_that_cannot_be_entered_ends_the_step(survival):
    def fail():
        raise CommunicationError("no rank")

    survival._enter_again = fail
    with pytest.raises(CommunicationError, match="no rank"):
        survival.go_on(PeerLostError("lost"), 0)
    assert survival.newcomers is Newcomers.WELCOME


def test_the_same_ranks_try_a_step_three_times(survival):
    entering(survival, [], size=3)
    for _ in range(2):
        for _ in range(3):
            survival.go_on(PeerLostError("lost"), 0)
        # A step that was passed begins the count anew.
        survival.note_passed(0)
    for _ in range(3):
        survival.go_on(PeerLostError("lost"), 0)
    error = PeerLostError("the fourth time")
    with pytest.raises(PeerLostError) as raised:
        survival.go_on(error, 0)
    assert raised.value is error


def test_other_ranks_try_a_step_anew(survival):
    for size in (3, 3, 2, 2, 1):
        entering(survival, [], size=size).go_on(PeerLostError("lost"), 0)


def test_a_plain_loop_is_warned_once_that_what_it_has_made_for_more_ranks_stays(survival, caplog):
    for _ in range(2):
        survival.go_on(PeerLostError("lost"), 0)
    (warning,) = [each.getMessage() for each in caplog.records if "hvd.elastic.run" in each.getMessage()]
    assert warning.startswith("survive: now there are 2 ranks.")
    assert "for 3 ranks stays as it is" in warning


def test_a_program_that_is_called_in_each_new_world_is_not_warned(survival, caplog):
    called = []
    with survival.calling(called.append):
        entering(survival, [], newcomers=1).go_on(PeerLostError("lost"), 0)
    assert called == [1]
    assert "hvd.elastic.run" not in caplog.text


def test_calling_restores_the_earlier_callback_even_after_an_error(survival):
    outer, inner = [], []
    with survival.calling(outer.append):
        with pytest.raises(KeyError), survival.calling(inner.append):
            raise KeyError
        survival.go_on(PeerLostError("lost"), 0)
    assert (outer, inner) == ([0], [])
    survival.go_on(PeerLostError("lost"), 0)
    assert outer == [0]
