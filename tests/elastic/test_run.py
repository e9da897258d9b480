"""What `run` does when a training function ends in each way."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hvdlite_wire.store_requests import RankAssignment

import hvdlite.torch as hvd
from hvdlite.elastic import HostsUpdatedInterrupt, HostUpdates, State, run, runner
from hvdlite.errors import CommunicationError, MismatchError, NotInitializedError, PeerLostError, StateLostError


class Recorded(State):
    """Notes what is done with it."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(lambda value: value, lambda: 0)
        self.done = done

    def save(self):
        self.done.append("save")

    def restore(self):
        self.done.append("restore")

    def sync(self):
        self.done.append("sync")

    def reset(self):
        self.done.append("reset")


class LostInFirstSync(Recorded):
    def sync(self):
        super().sync()
        if self.done.count("sync") == 1:
            raise PeerLostError("another rank has gone")


@pytest.fixture
def done(monkeypatch):
    """What has been done, in order, under a launcher that replaces workers."""
    done: list[str] = []
    # The package has the function `run` in the place of its runner.
    monkeypatch.setattr(runner, "enter_again", lambda: done.append("enter"))
    monkeypatch.setattr(runner, "allreduce", lambda own, **_: own)
    monkeypatch.setattr(runner, "has_state", lambda: True)
    monkeypatch.setattr(runner, "note_state", lambda: None)
    monkeypatch.setattr(runner, "listening", lambda state: contextlib.nullcontext())
    in_world(monkeypatch, RankAssignment(generation=2, rank=0, size=2, newcomers=0))
    return done


def in_world(monkeypatch, assignment, survival=None, *, stands_by=False):
    topology = SimpleNamespace(rank=0, size=2)
    world = SimpleNamespace(assignment=assignment, topology=topology, survival=survival, stands_by=stands_by)
    monkeypatch.setattr(runner, "current_world", lambda: world)
    monkeypatch.setattr(runner, "is_initialized", lambda: True)


def trained(done, *ends):
    """The result of a function whose calls end in these ways; the last one returns."""
    ways = iter(ends)

    @run
    def train(state, factor, *, offset=0):
        done.append("train")
        end = next(ways, None)
        if end is not None:
            raise end
        return 2 * factor + offset

    return train(Recorded(done), 3, offset=1)


def test_a_function_that_ends_well_is_called_once_after_states_were_made_equal(done):
    assert trained(done) == 7
    assert done == ["sync", "train"]


@pytest.mark.parametrize(
    "error",
    [PeerLostError("rank 1 has gone"), CommunicationError("timed out"), hvd.HorovodInternalError("the program's own")],
)
def test_a_lost_rank_restores_the_last_commit_and_begins_again(done, error):
    assert trained(done, error) == 7
    assert done == ["sync", "train", "restore", "enter", "reset", "sync", "train"]


def test_a_rank_that_is_lost_in_a_commit_costs_nothing_and_that_is_said_once(done, caplog):
    state = Recorded(done)
    losses = iter(["in the broadcast of a commit", "in a step"])

    def lose(*_):
        raise PeerLostError(next(losses))

    @run
    def train(state):
        done.append("train")
        if done.count("train") == 1:
            state.commit()
        elif done.count("train") == 2:
            lose()

    state._bcast_object = lose
    train(state)
    assert done == [
        "sync",
        "train",
        "save",
        "restore",
        "enter",
        "reset",
        "sync",
        "train",
        "restore",
        "enter",
        "reset",
        "sync",
        "train",
    ]
    lines = [each.getMessage() for each in caplog.records if "going back" in each.getMessage()]
    assert ["this commit, which loses nothing" in line for line in lines] == [True, False]


def test_new_hosts_keep_the_state_and_make_it_equal_on_all(done):
    trained(done, HostsUpdatedInterrupt())
    assert done == ["sync", "train", "enter", "reset", "sync", "train"]


def test_removed_hosts_alone_leave_states_equal(done):
    trained(done, HostsUpdatedInterrupt(skip_sync=True))
    assert done == ["sync", "train", "enter", "reset", "train"]


def test_a_rank_that_is_lost_after_hosts_were_removed_makes_states_equal_again(done):
    trained(done, HostsUpdatedInterrupt(skip_sync=True), PeerLostError("rank 1 has gone"))
    assert done[-5:] == ["restore", "enter", "reset", "sync", "train"]


@pytest.mark.parametrize("error", [MismatchError("other shapes"), ValueError("the program's"), KeyboardInterrupt()])
def test_what_would_come_again_at_each_try_is_raised(done, error):
    with pytest.raises(type(error)):
        trained(done, error)
    assert done == ["sync", "train"]


def test_a_lost_rank_is_raised_where_nobody_takes_its_place(done, monkeypatch):
    in_world(monkeypatch, None)
    with pytest.raises(PeerLostError):
        trained(done, PeerLostError("rank 1 has gone"))
    assert "restore" not in done


def test_a_rank_that_is_lost_while_states_are_made_equal_counts_too(done):
    assert run(lambda state: "done")(LostInFirstSync(done)) == "done"
    assert done == ["sync", "restore", "enter", "reset", "sync"]


def test_the_same_ranks_that_fail_three_times_without_a_commit_raise_the_error(done):
    with pytest.raises(PeerLostError, match="third"):
        trained(done, *(PeerLostError(which) for which in ("first", "second", "third")))
    assert done.count("restore") == 2


def test_a_commit_in_between_is_progress(done):
    failures = iter(range(10))

    class Committed(Recorded):
        def check_host_updates(self):
            pass

    @run
    def train(state):
        state.commit()
        if next(failures, None) is not None:
            raise PeerLostError("again")
        return "done"

    assert train(Committed(done)) == "done"


def test_other_ranks_than_those_that_failed_try_again(done, monkeypatch):
    newcomers = iter([0, 0, 1, 0])
    world = SimpleNamespace(assignment=None, topology=SimpleNamespace(rank=0, size=2), survival=None, stands_by=False)

    def seat_taken():
        done.append("enter")
        world.assignment = RankAssignment(generation=3, rank=0, size=2, newcomers=next(newcomers))

    seat_taken()
    monkeypatch.setattr(runner, "current_world", lambda: world)
    monkeypatch.setattr(runner, "is_initialized", lambda: True)
    monkeypatch.setattr(runner, "enter_again", seat_taken)
    assert trained(done, *(PeerLostError(f"{number}") for number in range(3))) == 7


def test_news_of_hosts_that_come_while_reset_callbacks_run_are_heard_and_those_of_the_world_before_are_not(
    done, monkeypatch
):
    heard_in = []

    @contextlib.contextmanager
    def listening(state):
        heard_in.append(len(heard_in))
        state.on_hosts_updated(float(len(heard_in)), HostUpdates.ADDED)
        yield

    monkeypatch.setattr(runner, "listening", listening)

    @run
    def train(state):
        if len(heard_in) == 1:
            raise PeerLostError("rank 1 has gone")
        if len(heard_in) == 2:
            done.append("check")
            state.check_host_updates()
        return "done"

    assert train(Recorded(done)) == "done"
    assert done.count("check") == 1
    assert len(heard_in) == 3, "the news of the second world have interrupted it"


def test_a_program_that_has_not_called_init_is_told_so_once():
    with pytest.raises(NotInitializedError) as raised:
        run(lambda state: None)(Recorded([]))
    assert raised.value.__context__ is None


def test_a_worker_that_stands_by_becomes_a_rank_before_anything_else(done, monkeypatch):
    in_world(monkeypatch, RankAssignment(generation=0, rank=1, size=2, newcomers=1), stands_by=True)
    assert trained(done) == 7
    assert done == ["enter", "reset", "sync", "train"]


def who_trains(monkeypatch, have_state: dict[int, bool]):
    """What becomes of each rank before its function is called: None if it is called, or the class of the error."""
    told: dict[int, torch.Tensor] = {}

    def one(rank, allreduce):
        monkeypatch.setattr(runner, "allreduce", allreduce)
        monkeypatch.setattr(runner, "has_state", lambda: have_state[rank])
        world = SimpleNamespace(
            assignment=RankAssignment(generation=3, rank=rank, size=len(have_state), newcomers=0),
            topology=SimpleNamespace(rank=rank),
        )
        monkeypatch.setattr(runner, "current_world", lambda: world)
        return runner._must_sync(not have_state[rank])

    for rank in have_state:
        one(rank, lambda tensor, rank=rank, **_: torch.ones_like(told.setdefault(rank, tensor)))
    ends = {}
    for rank in have_state:
        try:
            assert one(rank, lambda tensor, **_: torch.stack(list(told.values())).amax(0))
            ends[rank] = None
        except hvd.HorovodInternalError as error:
            ends[rank] = type(error)
    return ends


def test_ranks_that_have_no_state_get_it_from_rank_0(monkeypatch):
    assert who_trains(monkeypatch, {0: True, 1: True, 2: False}) == {0: None, 1: None, 2: None}


def test_ranks_of_which_none_has_the_state_do_not_begin_anew(monkeypatch):
    assert who_trains(monkeypatch, {0: False, 1: False}) == {0: StateLostError, 1: StateLostError}


def test_a_rank_0_that_has_not_got_the_state_ends_and_the_others_try_again_without_it(monkeypatch):
    ends = who_trains(monkeypatch, {0: False, 1: True, 2: False})
    assert ends == {0: StateLostError, 1: CommunicationError, 2: CommunicationError}


def test_a_worker_without_the_state_of_the_training_raises_that_at_once(done, monkeypatch):
    monkeypatch.setattr(runner, "has_state", lambda: False)
    with pytest.raises(StateLostError):
        trained(done)
    assert done == []


def test_a_worker_has_the_state_once_it_has_got_all_of_it(done, monkeypatch):
    monkeypatch.setattr(runner, "note_state", lambda: done.append("has it"))
    run(lambda state: done.append("train"))(LostInFirstSync(done))
    assert done == ["sync", "restore", "enter", "reset", "sync", "has it", "train"]
