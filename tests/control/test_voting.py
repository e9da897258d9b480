"""Ranks that share memory agree by votes instead of messages, and all reach the same result in any order."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.calls.mailbox import Mailbox, mailbox_pair
from hvdlite.calls.messages import CloseRound, Go, GoAsStandIn, OperationRequest, ToRank0
from hvdlite.control import voting
from hvdlite.control.voting import DirectVote, Voter
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.stall import StallRules
from hvdlite.coordinator.stragglers import StragglerWatch
from hvdlite.runtime.world import current_world
from hvdlite.shm.board import DIGEST_BYTES, Board, VoteData
from hvdlite.shm.control_block import CONTROL_BLOCK_BYTES, ControlBlock
from hvdlite.shm.segment import Segment
from hvdlite.signing import Signer

SHARED = "shared memory"


def all_reduced(name: str | None, value: float) -> float:
    return hvd.allreduce(torch.tensor([value]), name=name, op=hvd.Sum).item()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects the messages that ranks, and rank 0, send from now on."""
    messages: list[object] = []
    send_all = Mailbox.send_all

    def note(mailbox: Mailbox, sent: Any) -> None:
        sent = list(sent)
        messages.extend(sent)
        send_all(mailbox, sent)

    monkeypatch.setattr(Mailbox, "send_all", note)
    return messages


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes wait for as long as a test may take."""
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_calls_that_all_ranks_make_in_one_order_are_agreed_on_without_a_message(said):
    def rank(own: int) -> list[float]:
        # A rank that comes before rank 0 has opened the board asks by a message.
        while current_world().controller._requests._voter._board.open_round == 0:
            threading.Event().wait(0.001)
        return [all_reduced(name, own + number) for number, name in enumerate(["a", None, "a", "b"])]

    assert run_worlds(3, rank, engine=SHARED) == [[3.0, 6.0, 9.0, 12.0]] * 3
    assert not [message for message in said if isinstance(message, OperationRequest | Go)]


@pytest.mark.usefixtures("patient")
def test_calls_that_differ_are_refused_with_the_error_of_messages_on_all_ranks():
    def rank(own: int) -> float:
        with pytest.raises(hvd.MismatchError, match="Mismatched data types: One rank had type"):
            hvd.allreduce(torch.ones(1, dtype=[torch.float32, torch.float64][own % 2]), name="x")
        return all_reduced("x", 1.0)

    assert run_worlds(3, rank, engine=SHARED) == [3.0] * 3


def test_ranks_that_wait_for_none_of_the_others_agree_by_messages(said, monkeypatch):
    monkeypatch.setattr(voting, "PATIENCE_S", 0.0)
    here = threading.Barrier(2)

    def rank(own: int) -> float:
        if own == 1:
            # Rank 0 has waited, and then asked by a message.
            _until_asked(said, here)
        else:
            threading.Thread(target=_until_asked, args=(said, here), daemon=True).start()
        return all_reduced("x", 1.0)

    assert run_worlds(2, rank, engine=SHARED) == [2.0] * 2
    assert [type(message) for message in said].count(Go) == 2


def _until_asked(said: list[object], here: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        while not any(isinstance(message, OperationRequest) for message in said):
            here.wait(60)
    here.abort()


@pytest.mark.usefixtures("patient")
def test_what_a_rank_calls_during_a_vote_follows_it_in_the_order_of_its_calls():
    called = threading.Event()

    def rank(own: int) -> list[float]:
        if own == 1:
            # The first call of rank 0 is voted on and waits for this rank; the other calls are held.
            assert called.wait(60)
        handles = [hvd.allreduce_async(torch.tensor([float(value)]), op=hvd.Sum) for value in (1, 10, 100)]
        called.set()
        return [hvd.synchronize(handle).item() for handle in handles]

    assert run_worlds(2, rank, engine=SHARED) == [[2.0, 20.0, 200.0]] * 2


@pytest.mark.usefixtures("patient")
def test_a_call_that_another_rank_does_not_make_is_told_to_those_who_make_it_as_without_votes():
    over = threading.Event()

    def rank(own: int) -> Any:
        if own == 1:
            try:
                return hvd.broadcast(torch.ones(1), 0, name="y")
            finally:
                over.set()
        try:
            return all_reduced("x", 1.0)
        finally:
            assert over.wait(60)

    outcomes = attempt_worlds(2, rank, engine=SHARED)
    assert all(isinstance(outcome, hvd.MismatchError) for outcome in outcomes), outcomes
    assert str(outcomes[0]) == str(outcomes[1])


def test_a_go_that_rank_0_has_given_before_it_ended_is_carried_out(monkeypatch):
    """Rank 1 looks at the board only after it has learned that rank 0 has ended."""
    is_going = threading.Event()
    wait = Board.wait

    def wait_late(board: Board, is_over: Callable[[], bool], timeout_s: float) -> bool:
        if board.rank == 1 and is_going.is_set():
            assert ended.wait(60)
            return False
        return wait(board, is_over, timeout_s)

    ended = threading.Event()
    monkeypatch.setattr(Board, "wait", wait_late)
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0)

    def rank(own: int) -> str:
        hvd.barrier()
        world = current_world()
        if own == 1:
            is_going.set()
            threading.Thread(target=_note_end, args=(world.controller, ended), daemon=True).start()
        hvd.barrier()
        return "passed"

    assert run_worlds(2, rank, engine=SHARED) == ["passed"] * 2


def _note_end(controller: Any, ended: threading.Event) -> None:
    while controller._connection.end_reason is None:
        threading.Event().wait(0.01)
    ended.set()


def test_ranks_that_join_are_stood_in_for_and_votes_go_on_after(said):
    def rank(own: int) -> list[float]:
        sums = [all_reduced(f"step {step}", 1.0) for step in range(own + 1)]
        assert hvd.join() == 2
        before = len(said)
        hvd.barrier()
        assert own or not [message for message in said[before:] if isinstance(message, GoAsStandIn)]
        return sums

    assert run_worlds(3, rank, engine=SHARED) == [[3.0], [3.0, 2.0], [3.0, 2.0, 1.0]]


def test_a_thread_that_goes_on_calling_does_not_keep_the_executor_from_what_was_voted_for():
    board = Board(0, [ControlBlock(Segment().allocate(CONTROL_BLOCK_BYTES))])
    board.decide(go=False)
    connection = SimpleNamespace(lock=threading.Lock(), end_reason=None, say=lambda message: None)
    voter = Voter(board, connection, None)
    assert voter.begin()
    said = []

    def say() -> None:
        said.append("held")
        # As another thread finds it that calls at this moment.
        assert not voter.hold(say)

    assert voter.hold(say)
    assert voter.say_held()
    assert said == ["held"]


# -- what rank 0 decides


class TwoRanks:
    """Rank 0's coordinator, which runs when the test says so, with the boards and mailboxes of two ranks."""

    def __init__(self) -> None:
        segment, rules = Segment(), StallRules()
        blocks = [ControlBlock(segment.allocate(CONTROL_BLOCK_BYTES)) for _ in range(2)]
        self.boards = [Board(rank, blocks) for rank in range(2)]
        self.coordinator = Coordinator(Negotiation(["here"] * 2, rules), StragglerWatch(["here"] * 2, None))
        self.ends = [mailbox_pair(Signer(b"two")) for _ in range(2)]
        for rank, (_, other_end) in enumerate(self.ends):
            self.coordinator.add(rank, other_end)
        self.coordinator.open_board(self.boards[0])

    def say(self, rank: int, message: ToRank0) -> None:
        self.ends[rank][0].send(message)
        self.coordinator._serve()

    def vote(self) -> int:
        """Both ranks vote for the same call; returns the number of the round."""
        number = self.boards[0].open_round
        for board in self.boards:
            board.vote(number, b"1" * DIGEST_BYTES)
        assert self.boards[0].have_all_voted(number)
        return number

    def decide(self, number: int) -> list[bool | None]:
        ask = OperationRequest(1, 0, "barrier", "x", "x", (), {}, None)
        self.coordinator.decide_round(number, ask)
        return [board.outcome(number) for board in self.boards]

    def close(self) -> None:
        self.coordinator._selector.close()
        for end in itertools.chain(*self.ends):
            end.close()


@pytest.fixture
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


def ask_of(ticket: int, name: str) -> OperationRequest:
    return OperationRequest(ticket, 0, "barrier", name, name, (), {}, None)


def test_a_round_in_which_both_voted_for_the_same_is_a_go(two_ranks):
    assert two_ranks.decide(two_ranks.vote()) == [True, True]


def test_a_round_that_was_closed_stays_so_when_all_have_voted(two_ranks):
    number = two_ranks.vote()
    two_ranks.say(1, CloseRound(number))
    assert two_ranks.decide(number) == [False, False]
    assert two_ranks.boards[1].open_round == number + 1


def test_a_round_is_closed_once_though_both_ranks_ask_for_it(two_ranks):
    number = two_ranks.vote()
    two_ranks.say(1, CloseRound(number))
    two_ranks.say(0, CloseRound(number))
    assert two_ranks.boards[1].open_round == number + 1


def test_nothing_is_a_go_while_a_message_is_unsettled(two_ranks, monkeypatch):
    """This is before the coordinator has come to close the round."""
    monkeypatch.setattr(two_ranks.coordinator, "_pause_votes", lambda: None)
    two_ranks.say(1, ask_of(1, "y"))
    assert two_ranks.decide(two_ranks.vote()) == [False, False]


def test_a_message_closes_the_open_round_and_votes_go_on_when_it_is_settled(two_ranks):
    number = two_ranks.boards[0].open_round
    two_ranks.boards[0].vote(number, b"1" * DIGEST_BYTES)
    two_ranks.say(1, ask_of(1, "y"))
    assert two_ranks.boards[0].outcome(number) is False
    assert two_ranks.boards[1].is_paused
    two_ranks.say(0, ask_of(1, "y"))
    assert not two_ranks.boards[1].is_paused


# -- any order of turns


class Turns:
    """Threads of which one runs at a time, up to its next access to shared memory; the next one is chosen at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: dict[threading.Thread, threading.Semaphore] = {}
        self._weights: dict[threading.Thread, float] = {}
        self._ranks: set[threading.Thread] = set()
        self._count = 0
        self._has_ended = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self.is_over = False

    def run(self, ranks: list[Callable[[], None]], others: list[Callable[[], None]]) -> None:
        """Runs until all ``ranks`` have returned; ``others`` must end when ``is_over`` is set."""
        threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in [*ranks, *others]]
        # Some are chosen a hundred times as often as others.
        self._weights = {thread: 10 ** self._random.uniform(0, 2) for thread in threads}
        self._waiting = {thread: threading.Semaphore(0) for thread in threads}
        self._ranks = set(threads[: len(ranks)])
        for thread in threads:
            thread.start()
        self._waiting[self._chosen()].release()
        self._has_ended.acquire()
        for error in self._errors:
            raise error

    def step(self) -> None:
        """Lets other threads run first, or not."""
        self._count += 1
        assert self._count <= 100_000, "they do not come to an end"
        own, chosen = threading.current_thread(), self._chosen()
        if chosen is not own:
            self._waiting[chosen].release()
            self._waiting[own].acquire()

    def _chosen(self) -> threading.Thread:
        (chosen,) = self._random.choices([*self._waiting], [self._weights[each] for each in self._waiting])
        return chosen

    def _run(self, function: Callable[[], None]) -> None:
        own = threading.current_thread()
        self._waiting[own].acquire()
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - it is raised by `run`
            self._errors.append(error)
        del self._waiting[own]
        self.is_over = self._ranks.isdisjoint(self._waiting)
        if self._waiting and not self._errors:
            self._waiting[self._chosen()].release()
        else:
            self._has_ended.release()


class Memory:
    """Words of shared memory that other threads may change before each access."""

    def __init__(self, words: Any, turns: Turns) -> None:
        self._words, self._turns = words, turns

    def __getitem__(self, place: Any) -> Any:
        self._turns.step()
        return self._words[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._turns.step()
        self._words[place] = value

    def __eq__(self, other: object) -> bool:
        return self[:] == (other._words if isinstance(other, Memory) else other)

    __hash__ = None  # type: ignore[assignment]  # it changes


class Lock:
    """A lock for threads of which one runs at a time."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._is_held = turns, False

    def __enter__(self) -> None:
        self._turns.step()
        while self._is_held:
            self._turns.step()
        self._is_held = True

    def __exit__(self, *error: object) -> None:
        self._is_held = False


class SteppedData:
    """A slot of data that another thread may find half written, and that may change between two reads."""

    def __init__(self, data: VoteData, turns: Turns) -> None:
        self._data, self._turns = data, turns

    def write(self, address: int, nbytes: int) -> None:
        for written in range(1, nbytes + 1):
            self._turns.step()
            self._data.write(address, written)

    def elements(self, dtype: torch.dtype, numel: int) -> list[list[int]]:
        found = self._data.elements(dtype, numel)
        return [[self._read(each, place) for place in range(numel)] for each in found]

    def _read(self, elements: torch.Tensor, place: int) -> int:
        self._turns.step()
        return int(elements[place])


def board_of(rank: int, blocks: list[ControlBlock], turns: Turns, lots: random.Random) -> Board:
    board = Board(rank, blocks)
    board._words = [Memory(words, turns) for words in board._words]
    board._own, board._of_rank_0 = board._words[rank], board._words[0]
    board._digests = [Memory(digest, turns) for digest in board._digests]
    board._own_digest = board._digests[rank]
    board._data = [SteppedData(data, turns) for data in board._data]  # type: ignore[misc]  # what the voter needs of it

    def wait(is_over: Callable[[], bool], timeout_s: float) -> bool:
        # Sometimes it is too late at once.
        return any(is_over() for _ in range(lots.choice([1, 3, 30])))

    board.wait = wait  # type: ignore[method-assign]
    return board


def windows_of(rank: int, seed: int) -> Iterator[list[str]]:
    """Returns a rank's calls: those of a window are made at once, in an order that sometimes differs by rank."""
    lots = random.Random(seed)
    for window in range(6):
        calls = [f"{window}.{number}" for number in range(lots.choice([1, 1, 1, 2, 3]))]
        if lots.random() < 0.5:
            random.Random(f"{seed} {rank} {window}").shuffle(calls)
        yield calls


def vote_for(call: bytes, data: list[int]) -> DirectVote:
    return DirectVote(None, SimpleNamespace(tensor=torch.tensor(data, dtype=torch.uint8)), None, call)


def is_direct(call: str, rank: int, seed: int) -> bool:
    """Whether the call's data go with its vote: for some calls on some ranks alone."""
    lots = random.Random(f"{seed} {call}")
    return lots.random() < 0.7 and not (lots.random() < 0.2 and rank == 1)


def data_of(call: str, rank: int) -> list[int]:
    lots = random.Random(f"{call} {rank}")
    return [lots.randrange(256) for _ in range(3)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_of_turns_all_ranks_carry_out_the_same_in_one_order_and_none_waits_for_ever(
    seed, size, monkeypatch
):
    monkeypatch.setattr(Coordinator, "_patience_s", lambda self: 0.0)
    turns, lots = Turns(seed), random.Random(seed)
    segment = Segment()
    blocks = [ControlBlock(segment.allocate(CONTROL_BLOCK_BYTES)) for _ in range(size)]
    rules = StallRules()
    coordinator = Coordinator(Negotiation(["here"] * size, rules), StragglerWatch(["here"] * size, None))
    ends = [mailbox_pair(Signer(b"turns")) for _ in range(size)]
    for rank, (_, other_end) in enumerate(ends):
        coordinator.add(rank, other_end)
    done: list[list[str]] = [[] for _ in range(size)]

    def serve() -> None:
        coordinator._lock = Lock(turns)  # type: ignore[assignment]
        coordinator.open_board(board_of(0, blocks, turns, lots))
        while not turns.is_over:
            coordinator._serve()
            turns.step()

    def run(rank: int) -> None:
        mailbox, numbers = ends[rank][0], itertools.count(1)
        voter = Voter(
            board_of(rank, blocks, turns, lots),
            SimpleNamespace(lock=threading.Lock(), end_reason=None, say=mailbox.send),
            None if rank else coordinator.decide_round,
        )
        for calls in windows_of(rank, seed):
            asked = {next(numbers): call for call in calls}
            asks = [ask_of(ticket, call) for ticket, call in asked.items()]
            if voter.begin():
                for ask in asks[1:]:
                    assert voter.hold(lambda ask=ask: mailbox.send(ask))
                first = asks[0]
                call = repr((first.kind, first.name)).encode()
                if is_direct(first.what, rank, seed):
                    vote = vote_for(call, data_of(first.what, rank))
                    voter.cast(vote)
                    data = voter.data_soon(vote) or voter.data_of_go(vote)
                    if data is not None:
                        expected = [data_of(first.what, each) for each in range(size)]
                        assert data.elements(torch.uint8, 3) == expected
                    is_go = data is not None
                else:
                    is_go = voter.vote(call, first)
                if is_go:
                    done[rank].append(asked.pop(first.ticket))
                else:
                    mailbox.send(first)
                voter.say_held()
            else:
                for ask in asks:
                    mailbox.send(ask)
            while asked:
                turns.step()
                goes = [message for message in mailbox.receive() if isinstance(message, Go)]
                done[rank] += [asked.pop(go.ticket) for go in goes]

    turns.run([lambda rank=rank: run(rank) for rank in range(size)], [serve])
    assert all(each == done[0] for each in done)
    assert sorted(done[0]) == sorted(itertools.chain(*windows_of(0, seed)))
    coordinator._selector.close()
    for pair in ends:
        for end in pair:
            end.close()
