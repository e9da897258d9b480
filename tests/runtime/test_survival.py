"""All orders in which three ranks may be lost within their steps: the others always agree on what became of each step.

The model is of `SurvivingStep.finish` and `hvd.init`; what the ranks conclude is the real `Survival`'s.
"""

from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hvdlite_wire.codec import decode, encode
from hvdlite_wire.store_requests import NewWorkerPolicy, RankAssignment
from long_run import trials

from hvdlite.errors import CommunicationError, PeerLostError
from hvdlite.rendezvous.elastic_store import LastVotes
from hvdlite.runtime import survival as module
from hvdlite.runtime.survival import Outcome, RankReport, SelfReport, Settlement, Survival, settle

SIZE, MOST_DEATHS = 3, 2
REPORTS, REDUCE, VOTE, LEFT, DEAD, DONE = "reports", "reduce", "vote", "left", "dead", "done"
# What of a Survival is no state, and is given anew.
GIVEN = {"_enter_again", "_revoke", "_has_sets", "_read_last_votes", "_listener", "_on_change"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """No thread listens to hvdlite-run, and there is none."""
    monkeypatch.setattr(module, "KeyListener", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "StoreClient", SimpleNamespace(from_url=lambda _: Mock()))
    of_a_survival.cache_clear()


class Reported(Exception):  # noqa: N818 - no error: it ends `begin` as soon as the report is known
    """What a rank reports in a new world."""


def group_with(reports=None):
    """The group of a world in which the ranks report this; without it, one whose ranks never hear of each other."""

    def all_gather_signed(data, what, at_most_bytes):
        own = decode(RankReport, data)
        if reports is None:
            raise Reported(own)
        assert own in reports
        return [encode(each) for each in reports]

    return SimpleNamespace(all_gather_signed=all_gather_signed, describe_rank=lambda rank: f"rank {rank}")


def told(*, is_new=False, is_in_step=False, passed=(), can_repeat=True, discarded=(), left=(), identity="1.0"):
    """What a rank says in a new world, which is in a step of optimizer 0, if in any; by default of the tested one."""
    number = 0 if is_in_step else None
    report = SelfReport(is_new, is_in_step, dict(passed), number, can_repeat, frozenset(discarded))
    return RankReport(report, tuple(left), identity, sum(report.passed.values()) if is_in_step else 0)


def enter(survival, size, reports=None, newcomers=0):
    """Begins a world of this size, as hvd.init does."""
    survival.begin(group_with(reports), RankAssignment(1, 0, size, newcomers))


# ------------------------------------------------------------------ the exploration


@functools.cache
def of_a_survival(state, sizes, error_in, can_repeat, left, reports=None):
    """What a rank does that enters worlds of these sizes: only the last one's reports arrive, if there are any.

    ``state`` is its survival's, as bytes; ``error_in`` is the optimizer in whose step it is, or None outside a step,
    and ``can_repeat`` whether it could average its gradients again. ``left`` is what ranks have left that are done.
    Returns what it reports, or else its next state and what `go_on` returns.
    """

    def enter_again():
        for size in sizes[:-1]:
            with pytest.raises(Reported):
                enter(survival, size)
            survival.end()
        enter(survival, sizes[-1], None if reports is None else [pickle.loads(each) for each in reports])

    survival = survival_of(state, enter_again, lambda: [pickle.loads(each) for each in left])
    try:
        if error_in is None:
            result = enter_again()
        else:
            result = survival.go_on(PeerLostError("lost"), error_in, can_repeat=can_repeat)
    except Reported as reported:
        return pickle.dumps(reported.args[0])
    return state_of(survival), result


def survival_of(state, enter_again=lambda: None, read_last_votes=list):
    survival = Survival(enter_again, lambda *_: None, read_last_votes=read_last_votes)
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
    applied: tuple[tuple[int, ...] | None, ...] = ()  # the same, of each step; None of one that it has discarded
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
    left: tuple[bytes, ...] = ()  # what those had left that were done when it began


class Exploration:
    """Every world that ``steps`` steps of optimizers in turn, with some deaths, may lead to."""

    def __init__(self, steps, optimizers=1, repeaters=range(SIZE)):
        """``repeaters`` are the ranks that could average their gradients again."""
        self.steps, self.optimizers, self.repeaters = steps, optimizers, repeaters
        self.ends = set()

    def run(self):
        """Returns how many worlds were seen; their thousands of losses are not logged."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.log, "disabled", True)
            return self._explore()

    def _explore(self):
        world = World((Rank(state_of(Survival(lambda: None, lambda *_: None))),) * SIZE)
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
        is_over = any(world.ranks[each].does == DONE for each in alive)
        # All programs have equally many steps: none begins another where one has ended.
        may_end = not any(self._is_beyond(world.ranks[each]) for each in alive)
        alive = tuple(each for each in alive if world.ranks[each].does != DONE)
        events = []
        if alive and all(world.ranks[each].does == LEFT for each in alive):
            events.append(("form", self._formed(world, alive)))
        for number in alive:
            rank = world.ranks[number]
            if rank.does == LEFT:
                continue
            if not rank.is_inside and rank.does == REDUCE and self._is_to_discard(rank):
                events.append((("discard", number), changed(world, number, self._discarded(rank))))
                continue
            # At the end of the exploration no rank begins another step, and each still follows the others.
            if not rank.is_inside and (rank.does == REPORTS or len(rank.applied) < self.steps):
                events.append((("enter", number), self._entered(world, number)))
            if rank.is_inside and all(world.entered[each] > world.ended[number] for each in world.members):
                events.append((("end", number), self._ended(world, number)))
            has_ended = rank.does == REDUCE and len(rank.applied) >= self.steps
            if has_ended and may_end:
                events.append((("finish", number), changed(world, number, rank._replace(does=DONE))))
            if any(world.ranks[each].does == DEAD for each in world.members) and not (has_ended and is_over):
                events.append((("fail", number), self._failed(world, number)))
        if not events:
            # A step may be discarded that no rank has begun but by hearing of the loss.
            alive = living(world)
            assert all(len(world.ranks[each].applied) >= self.steps for each in alive), "they wait for ever"
            assert len({world.ranks[each].applied for each in alive}) == 1
            self.ends.add((alive, world.ranks[alive[0]].applied))
        yield from events
        if sum(rank.does == DEAD for rank in world.ranks) < MOST_DEATHS and len(alive) > 1:
            for number in alive:
                yield ("die", number), changed(world, number, world.ranks[number]._replace(does=DEAD))

    def _formed(self, world, alive):
        ranks = list(world.ranks)
        for each in alive:
            ranks[each] = ranks[each]._replace(does=REPORTS, is_inside=False, sizes=(*ranks[each].sizes, len(alive)))
        done = [survival_of(rank.state) for rank in ranks if rank.does == DONE]
        left = tuple(pickle.dumps(votes) for each in done if (votes := each.last_votes()) is not None)
        reports = tuple(of_a_survival(*self._step_of(ranks[each], each), left) for each in alive)
        return World(tuple(ranks), alive, reports=reports, left=left)

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
            rank = self._settled(rank, number, world)
        elif rank.does == REDUCE:
            rank = rank._replace(does=VOTE, averages=world.members)
        else:
            rank = self._applied(rank)
        return changed(world, number, rank)._replace(ended=one_more(world.ended, number))

    def _settled(self, rank, number, world):
        state, outcome = of_a_survival(*self._step_of(rank, number), world.left, world.reports)
        averages = rank.averages
        rank = rank._replace(does=REDUCE, state=state, is_in_step=False, sizes=(), averages=None)
        if outcome is Outcome.DISCARD:
            return self._discarded(rank)
        assert outcome is not Outcome.REPEAT or number in self.repeaters, "it is to repeat a step, and cannot"
        if outcome is not Outcome.HAS_AVERAGES:
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

    def _is_to_discard(self, rank):
        return survival_of(rank.state).discards(len(rank.applied) % self.optimizers)

    def _discarded(self, rank):
        survival = survival_of(rank.state)
        survival.note_discarded(len(rank.applied) % self.optimizers, "a step", "it cannot be repeated")
        return rank._replace(averages=None, applied=(*rank.applied, None), state=state_of(survival))

    def _is_beyond(self, rank):
        """Whether it has begun a step after the last one."""
        return len(rank.applied) > self.steps or (len(rank.applied) == self.steps and rank.is_in_step)

    def _step_of(self, rank, number):
        of_optimizer = len(rank.applied) % self.optimizers if rank.is_in_step else None
        return rank.state, rank.sizes, of_optimizer, number in self.repeaters

    def _check(self, world):
        alive = living(world)
        longest = max((world.ranks[each].applied for each in alive), key=len)
        for each in alive:
            rank = world.ranks[each]
            assert rank.applied == longest[: len(rank.applied)], "the same step has different averages"
            ahead = longest[len(rank.applied) :]
            assert len(ahead) - ahead.count(None) <= 1, "a step was lost"
            assert rank.applied.count(None) <= SIZE - len(alive), "a step is discarded without a death"
            steps = [step for step in rank.applied if step is not None]
            assert all(set(alive) <= set(step) for step in steps), "a step lacks a rank that lives"
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


@pytest.mark.slow
def test_whoever_dies_wherever_two_optimizers_in_turn_agree_on_the_steps_of_each():
    assert Exploration(trials(3, 5), optimizers=2).run() > 10_000


@pytest.mark.parametrize("repeaters", [(), (0, 2)], ids=["none can repeat", "one cannot repeat"])
def test_whoever_dies_wherever_all_others_discard_the_same_steps_where_some_cannot_repeat_them(repeaters):
    exploration = Exploration(trials(2, 4), repeaters=repeaters)
    assert exploration.run() > 10_000
    discarded = {tuple(step is None for step in steps) for _, steps in exploration.ends}
    assert {(False, False), (True, False), (False, True), (True, True)} <= discarded


@pytest.mark.slow
def test_whoever_dies_wherever_two_optimizers_in_turn_agree_on_the_steps_that_they_discard():
    assert Exploration(trials(3, 5), optimizers=2, repeaters=()).run() > 10_000


def test_the_exploration_finds_a_step_that_only_those_discard_that_wait_for_it(monkeypatch):
    go_on, discards = Survival.go_on, Survival.discards

    def note_and_go_on(self, error, number, **named):
        self.waits_for = number
        return go_on(self, error, number, **named)

    def discards_what_it_waits_for(self, number):
        return getattr(self, "waits_for", None) == number and discards(self, number)

    monkeypatch.setattr(Survival, "go_on", note_and_go_on)
    monkeypatch.setattr(Survival, "discards", discards_what_it_waits_for)
    with pytest.raises(AssertionError, match=r"different|lost"):
        Exploration(3, optimizers=2, repeaters=()).run()


def test_the_exploration_finds_ranks_that_settle_for_the_least_instead_of_the_most(monkeypatch):
    def settle_for_least(reports, left):
        numbers = {number for report in reports for number in report.passed}
        return Settlement({each: min(report.passed.get(each, 0) for report in reports) for each in numbers}, False)

    monkeypatch.setattr(module, "settle", settle_for_least)
    with pytest.raises(AssertionError, match=r"different|lost"):
        Exploration(2).run()


def test_the_exploration_finds_ranks_that_do_not_hear_of_those_that_are_done(monkeypatch):
    monkeypatch.setattr(Survival, "last_votes", lambda self: None)
    with pytest.raises(AssertionError, match=r"different|lacks"):
        Exploration(1).run()


# ------------------------------------------------------------------ what ranks conclude


@pytest.fixture
def survival():
    """A survival in a world of three ranks; each world that it enters has one rank less, and nobody has passed more."""

    def enter_again():
        survival.end()
        enter_the_next()

    def enter_the_next():
        own = told(is_in_step=True, passed=survival._passed.items())
        enter(survival, survival._size - 1, [own])

    survival = Survival(enter_again, lambda *_: None)
    enter(survival, 3, [told(is_new=True)])
    return survival


def entering(survival, reports, size=2, newcomers=0):
    """Has the survival enter a world with these reports besides its own whenever it goes on."""

    def enter_again():
        own = told(is_in_step=True, passed=survival._passed.items())
        enter(survival, size, [own, *reports], newcomers)

    survival._enter_again = enter_again
    return survival


def test_the_most_votes_that_a_rank_has_passed_count_for_each_optimizer():
    reports = [SelfReport(False, True, {0: 3, 1: 2}), SelfReport(False, True, {0: 2, 1: 2, 4: 1})]
    assert settle(reports) == Settlement({0: 3, 1: 2, 4: 1}, must_restore=False, all_are_in_step=True)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([SelfReport(False, True, {}), SelfReport(False, True, {})], True),
        ([SelfReport(False, True, {}), SelfReport(False, False, {})], False),
        ([SelfReport(False, True, {}), SelfReport(True, False, {})], False),
    ],
)
def test_all_ranks_know_whether_all_of_them_come_from_the_same_step(reports, expected):
    assert settle(reports).all_are_in_step is expected


def test_newcomers_adopt_the_counts_of_the_others():
    newcomer = Survival(lambda: None, lambda *_: None)
    enter(newcomer, 2, [told(is_new=True), told(passed=[[0, 7], [1, 3]])])
    # JSON has no dicts with numbers as keys, and no tuples.
    assert newcomer._passed == {0: 7, 1: 3}
    assert not newcomer.must_restore


def test_a_rank_within_a_step_keeps_its_own_count_until_it_has_ended_the_step(survival):
    entering(survival, [told(is_in_step=True, passed=[[0, 1]])])
    assert survival.go_on(PeerLostError("lost"), 0) is Outcome.HAS_AVERAGES
    assert survival._passed == {}
    survival.note_passed(0)
    assert survival._passed == {0: 1}


def test_averages_that_nobody_has_are_computed_again(survival):
    survival.note_passed(0)
    entering(survival, [told(is_in_step=True, passed=[[0, 1]])])
    assert survival.go_on(PeerLostError("lost"), 0) is Outcome.REPEAT


def test_a_vote_of_another_optimizer_says_nothing_of_this_one(survival):
    entering(survival, [told(is_in_step=True, passed=[[1, 1]])])
    assert survival.go_on(PeerLostError("lost"), 0) is Outcome.REPEAT


def test_a_step_that_one_rank_cannot_repeat_is_discarded_on_all(survival, caplog):
    entering(survival, [told(is_in_step=True, can_repeat=False)])
    assert survival.go_on(PeerLostError("rank 2 is lost"), 0) is Outcome.DISCARD
    assert survival.discards(0)
    assert not survival.discards(1)
    survival.note_discarded(0, "a step of optimizer 1", "NCCL cannot average gradients again")
    assert not survival.discards(0)
    assert survival._passed == {0: 1}
    (line,) = [each.getMessage() for each in caplog.records if "discarded" in each.getMessage()]
    assert line == (
        "survive: a step of optimizer 1 is discarded on all ranks, and changes no parameter: NCCL cannot average "
        "gradients again. The batches of 2 ranks are lost, since the program has no hvd.elastic.ElasticSampler that "
        "draws them again. (rank 2 is lost)"
    )


def test_averages_that_all_have_are_used_where_they_could_not_be_computed_again(survival):
    entering(survival, [told(is_in_step=True, passed=[[0, 1]], can_repeat=False)])
    assert survival.go_on(PeerLostError("lost"), 0) is Outcome.HAS_AVERAGES
    survival.note_passed(0)
    # The other rank is a step ahead, and it is its step that all discard.
    assert survival.discards(0)


def test_averages_are_used_that_a_rank_had_all_of_whose_program_has_ended_since(survival):
    survival._read_last_votes = lambda: [LastVotes({0: 1})]
    entering(survival, [])._enter_again = lambda: enter(
        survival, 1, [told(is_in_step=True, left=survival._read_last_votes())]
    )
    assert survival.go_on(PeerLostError("lost"), 0) is Outcome.HAS_AVERAGES


def test_a_step_is_discarded_that_a_rank_has_discarded_whose_program_has_ended_since():
    waits = SelfReport(False, True, {0: 3}, 0)
    assert settle([waits], [LastVotes({0: 4}, frozenset({(0, 3)}))]).discarded == {(0, 3)}
    assert settle([waits], [LastVotes({0: 4})]).discarded == set()


def test_a_step_is_the_last_one_if_a_program_has_ended_after_it():
    waits, is_new = SelfReport(False, True, {0: 3}, 0), SelfReport(True, False, {})
    assert settle([waits, is_new], [LastVotes({0: 4})]).is_last
    assert not settle([waits], [LastVotes({0: 3})]).is_last
    assert not settle([waits]).is_last


def test_only_ranks_that_were_in_steps_with_others_leave_votes_at_their_end(survival):
    assert survival.last_votes() is None
    survival.note_passed(0)
    assert survival.last_votes() == LastVotes({0: 1})
    entering(survival, [], size=1).go_on(PeerLostError("lost"), 0)
    assert survival.last_votes() is None


def test_a_rank_that_is_removed_from_the_job_leaves_no_votes_since_others_train_on(survival):
    survival.note_passed(0)
    survival.note_removed()
    assert survival.last_votes() is None


def test_a_step_stays_discarded_until_all_ranks_have_come_to_it():
    behind = SelfReport(False, True, {0: 3}, 0)
    ahead = SelfReport(False, True, {0: 5}, 0, True, frozenset({(0, 2), (0, 3), (0, 4)}))
    assert settle([behind, ahead]).discarded == {(0, 3), (0, 4)}
    # The one behind does not wait for averages of its own step: that is discarded.
    assert settle([behind, ahead._replace(can_repeat=False)]).discarded == {(0, 3), (0, 4), (0, 5)}


def test_all_go_back_to_a_commit_where_some_have_given_up_the_step_that_others_wait_for(survival):
    waits, has_given_up = SelfReport(False, True, {0: 1}), SelfReport(False, False, {0: 1})
    assert settle([waits, has_given_up]).must_restore
    assert not settle([waits, waits]).must_restore
    assert not settle([has_given_up, has_given_up]).must_restore
    entering(survival, [told()])
    error = PeerLostError("a rank was lost")
    with pytest.raises(CommunicationError, match="others go back to their last commit") as raised:
        survival.go_on(error, 0)
    assert raised.value.__cause__ is error
    assert survival.must_restore


def test_a_newcomer_makes_nobody_go_back_to_a_commit():
    newcomer = SelfReport(True, False, {})
    for is_in_step in (False, True):
        assert not settle([newcomer, SelfReport(False, is_in_step, {0: 1}), newcomer]).must_restore


def test_a_rank_whose_first_seat_was_in_a_generation_that_never_began_is_still_new(survival):
    """By its rank in the next generation it is none, but it has no step to finish."""
    changes = []
    entering(survival, [told(is_new=True)], newcomers=0)
    with survival.calling(changes.append):
        survival.go_on(PeerLostError("lost"), 0)
    assert changes == [1]


def test_newcomers_are_welcome_outside_a_step_and_within_one_only_to_programs_that_can_begin_it_again(survival):
    asked = []
    go_on_there = entering(survival, [])._enter_again
    survival._enter_again = lambda: (asked.append(survival.newcomers), go_on_there())
    assert survival.newcomers is NewWorkerPolicy.WELCOME
    survival.go_on(PeerLostError("lost"), 0)
    with survival.calling(lambda _: None):
        assert survival.newcomers is NewWorkerPolicy.WELCOME
        survival.go_on(PeerLostError("lost"), 0)
        survival._has_sets = lambda: True
        survival.go_on(PeerLostError("lost"), 0)
    assert asked == [NewWorkerPolicy.NEVER, NewWorkerPolicy.AFTERWARDS, NewWorkerPolicy.IF_NEEDED]
    assert survival.newcomers is NewWorkerPolicy.WELCOME


def test_a_world_that_cannot_be_entered_ends_the_step(survival):
    def fail():
        raise CommunicationError("no rank")

    survival._enter_again = fail
    with pytest.raises(CommunicationError, match="no rank"):
        survival.go_on(PeerLostError("lost"), 0)
    assert survival.newcomers is NewWorkerPolicy.WELCOME


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


def test_a_worker_that_dies_in_each_step_and_is_replaced_each_time_ends_no_step_of_the_others(survival):
    with survival.calling(lambda _: None):
        for _ in range(10):
            entering(survival, [], size=3, newcomers=1).go_on(PeerLostError("lost"), 0)


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
