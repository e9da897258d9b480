"""Several threads of a rank communicate: each gets its own values, or all ranks get an error that says what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hvdlite_wire.codec import decode, encode
from worlds import PLAIN, attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.calls.messages import CallingThread
from hvdlite.comm.group import Group
from hvdlite.comm.work import CollectiveWatch
from hvdlite.control import callers
from hvdlite.control.callers import ThreadLabels
from hvdlite.environment import Environment
from hvdlite.runtime import world as world_module
from hvdlite.runtime.world import current_world

CALLS = 10


def in_threads(*functions: Callable[[], Any], names: tuple[str, ...] = ("first", "second")) -> list[Any]:
    """Runs each function in a thread of the calling rank; returns what each returns or raises."""
    outcomes: list[Any] = [None] * len(functions)

    def attempt(number: int) -> None:
        try:
            outcomes[number] = functions[number]()
        except Exception as error:  # noqa: BLE001 - it is handed to the test
            outcomes[number] = error

    start = world_module._world.starts
    threads = [start(lambda number=number: attempt(number), names[number]) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return outcomes


def parameters(number: int, own: int) -> list[bool]:
    # Equal shapes, different names.
    right = []
    for call in range(CALLS):
        params = {f"model {number}": torch.full((3,), 1000.0 * own + 10 * call + number)}
        hvd.broadcast_parameters(params, root_rank=1)
        right.append(params[f"model {number}"].tolist() == [1000.0 + 10 * call + number] * 3)
    return right


def optimizer_state(number: int, own: int) -> list[bool]:
    right = []
    for call in range(CALLS):
        param = torch.nn.Parameter(torch.zeros(2 + number))
        optimizer = torch.optim.SGD([param], lr=1000.0 * own + 10 * call + number + 1, momentum=0.5)
        param.sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        right.append(optimizer.param_groups[0]["lr"] == 1000.0 + 10 * call + number + 1)
    return right


def objects(number: int, own: int) -> list[bool]:
    right = []
    for call in range(CALLS):
        mine = {"rank": own, "call": call, "thread": number, "text": "x" * (100 * number * own)}
        root = {**mine, "rank": 1, "text": "x" * (100 * number)}
        right.append(hvd.broadcast_object(mine, 1, name=f"object {number}") == root)
        everyones = hvd.allgather_object(mine, name=f"object {number}")
        right.append([(each["rank"], each["call"], each["thread"]) for each in everyones] == [
            (rank, call, number) for rank in range(hvd.size())
        ])  # fmt: skip
    return right


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [parameters, optimizer_state, objects])
def test_threads_that_start_equal_each_get_the_roots_values_of_their_own(function, size):
    def rank(own: int) -> list[Any]:
        # In an order that differs by rank.
        numbers = (0, 1) if own % 2 else (1, 0)
        names = tuple(("first", "second")[number] for number in numbers)
        return in_threads(*(lambda number=number: function(number, own) for number in numbers), names=names)

    for outcomes in run_worlds(size, rank):
        for outcome in outcomes:
            assert isinstance(outcome, list), outcome
            assert all(outcome)


def unnamed_calls() -> dict[str, Callable[[float], Any]]:
    return {
        "allreduce": lambda value: hvd.allreduce(torch.tensor([value]), op=hvd.Sum).item() == 2 * value,
        "allgather": lambda value: hvd.allgather(torch.tensor([value])).tolist() == [value] * 2,
        "allgather_object": lambda value: hvd.allgather_object(value) == [value] * 2,
        "broadcast_object": lambda value: hvd.broadcast_object(value) == value,
        "broadcast_parameters": _is_kept,
    }


def _is_kept(value: float) -> bool:
    params = {"w": torch.tensor([value])}
    hvd.broadcast_parameters(params)
    return params["w"].item() == value


@pytest.mark.parametrize("kind", list(unnamed_calls()))
@pytest.mark.parametrize("names", [("first", "second"), ("Thread-7 (serve)", "Thread-8 (serve)"), ("same", "same")])
def test_calls_without_a_name_from_several_threads_are_right_or_an_error_on_all_ranks(kind, names):
    call = unnamed_calls()[kind]

    def repeat(value: float) -> str:
        for _ in range(CALLS):
            assert call(value), "another thread's value"
        return "right"

    def rank(own: int) -> list[Any]:
        return in_threads(lambda: repeat(1.0), lambda: repeat(2.0), names=names)

    for _ in range(3):
        for outcomes in attempt_worlds(2, rank):
            for outcome in outcomes:
                assert not isinstance(outcome, AssertionError), outcome
                assert outcome == "right" or isinstance(outcome, (hvd.HvdliteError, ValueError)), outcome


def test_calls_that_cross_are_told_which_threads_they_came_from():
    def rank(own: int) -> list[Any]:
        # On rank 0 the first thread calls first, on rank 1 the second.
        order = ("first", "second") if own == 0 else ("second", "first")
        turn, is_there = threading.Event(), threading.Event()

        def one() -> Any:
            is_there.wait()
            handle = hvd.allreduce_async(torch.ones(1))
            turn.set()
            return hvd.synchronize(handle)

        def other() -> Any:
            is_there.set()
            turn.wait()
            return hvd.allreduce(torch.ones(1))

        return in_threads(one, other, names=order)

    for outcomes in attempt_worlds(2, rank):
        for outcome in outcomes:
            assert isinstance(outcome, hvd.MismatchError)
            assert "Mismatched threads: allreduce was called by different threads" in str(outcome)
            assert "rank 0 (node0): thread 'first'; rank 1 (node1): thread 'second'" in str(outcome) or (
                "rank 0 (node0): thread 'second'; rank 1 (node1): thread 'first'" in str(outcome)
            )
            assert "pass a name" in str(outcome)


@pytest.mark.parametrize("names", [("first", "second"), ("Thread-7 (serve)", "Thread-8 (serve)"), ("same", "same")])
def test_threads_that_an_error_has_left_over_are_not_taken_for_each_other(names):
    def rank(own: int) -> list[Any]:
        outcomes: list[Any] = []
        is_over = threading.Event()

        def call() -> None:
            try:
                outcomes.append(hvd.allreduce(torch.ones(1)))
            except hvd.HvdliteError as error:
                outcomes.append(error)

        def call_late() -> None:
            is_over.wait()
            call()

        # Another thread on each rank calls first, while the other one lives.
        first, second = names if own == 0 else names[::-1]
        start = world_module._world.starts
        early, late = start(call, first), start(call_late, second)
        late.start()
        early.start()
        early.join(60)
        is_over.set()
        late.join(60)
        return outcomes

    for outcomes in attempt_worlds(2, rank):
        assert [type(outcome) for outcome in outcomes] == [hvd.MismatchError] * 2


def test_one_thread_on_each_rank_may_be_called_what_it_likes():
    def rank(own: int) -> list[Any]:
        return in_threads(lambda: [hvd.allgather_object(own) for _ in range(3)], names=(("left", "right")[own],))

    assert run_worlds(2, rank) == [[[[0, 1]] * 3]] * 2


def test_threads_that_come_one_after_the_other_are_one_caller():
    def rank(own: int) -> list[Any]:
        results = []
        for turn in range(3):
            # The counts of calls differ by rank.
            results += in_threads(lambda: hvd.allgather_object(own), names=(f"Thread-{turn * (own + 1)} (serve)",))
        return results

    assert run_worlds(2, rank) == [[[0, 1]] * 3] * 2


def test_the_same_parameters_from_two_threads_of_a_rank_are_a_duplicate(monkeypatch):
    waiting = threading.Event()

    def rank(own: int) -> str:
        if own == 1:
            waiting.wait()
            in_threads(lambda: hvd.broadcast_parameters({"w": torch.zeros(1)}))
            return ""

        def first() -> None:
            hvd.broadcast_parameters({"w": torch.zeros(1)})

        def second() -> None:
            controller = current_world().controller
            while not controller._requests:
                threading.Event().wait(0.001)
            try:
                hvd.broadcast_parameters({"w": torch.zeros(1)})
            finally:
                waiting.set()

        _, told = in_threads(first, second)
        return str(told)

    told, _ = run_worlds(2, rank)
    assert told.startswith("Requested to allreduce, allgather, or broadcast a tensor with the same name")
    assert told.endswith("(broadcast_parameters)")


def test_parameters_under_other_names_are_told_like_other_differences():
    def rank(own: int) -> None:
        hvd.broadcast_parameters({f"w{own}": torch.zeros(1)})

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert str(outcome).startswith(
            "broadcast_parameters: 'w0' is (1,) torch.float32 on cpu on rank 0 (node0) and missing on rank 1 (node1)"
        )


@pytest.mark.parametrize("check", [True, False])
def test_what_is_to_be_equal_is_compared_with_and_without_the_check(check):
    def rank(own: int) -> list[str]:
        told = []
        for call in (
            lambda: hvd.broadcast_parameters({"w": torch.zeros(2 + own)}),
            lambda: hvd.broadcast_parameters({"w": torch.zeros(2)}, root_rank=own),
            lambda: hvd.broadcast_object(1, root_rank=own),
        ):
            with pytest.raises(hvd.MismatchError) as error:
                call()
            told.append(str(error.value))
        return told

    ours, theirs = run_worlds(2, rank, Environment(stall_check=False, check=check))
    assert ours == theirs
    assert ours[0].startswith("broadcast_parameters: 'w' is (2,) torch.float32 on cpu on rank 0 (node0) and (3,)")
    for text, kind in zip(ours[1:], ("broadcast_parameters", "broadcast_object"), strict=True):
        assert (
            text
            == f"{kind}: root_rank is 0 on rank 0 (node0) and 1 on rank 1 (node1): every rank must pass the same value"
        )


def test_without_the_check_a_second_thread_is_refused_while_one_is_in_a_call(monkeypatch):
    inside, refused = threading.Event(), threading.Event()
    all_gather = Group.all_gather_signed

    def slowly(group: Group, *arguments: Any, **more: Any) -> list[bytes]:
        if group.rank == 0 and threading.current_thread().name == "first":
            inside.set()
            refused.wait()
        return all_gather(group, *arguments, **more)

    monkeypatch.setattr(Group, "all_gather_signed", slowly)

    def rank(own: int) -> list[Any]:
        def second() -> Any:
            if own == 1:
                return None
            inside.wait()
            try:
                return hvd.allreduce(torch.ones(1), name="b")
            finally:
                refused.set()

        return in_threads(lambda: hvd.allgather_object(own, name="a"), second)

    (gathered, told), _ = run_worlds(2, rank, Environment(stall_check=False, check=False))
    assert gathered == [0, 1]
    assert isinstance(told, RuntimeError)
    assert str(told).startswith(
        "allreduce of 'b' with HVDLITE_CHECK=0: called by thread 'second' while thread 'first' is in such a call"
    )


# -- the rules


def caller(name: str, *rivals: str, others: tuple[str, ...] = ()) -> CallingThread:
    """Returns the caller of a thread when these others have called and those others live."""
    label = callers._label_of(name)
    beside = [callers._label_of(each) for each in (*rivals, *others)]
    return CallingThread(label, name, bool(rivals), label in beside, tuple(map(callers._label_of, others)))


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (caller("MainThread"), caller("MainThread"), True),
        (caller("MainThread", "a"), caller("MainThread", "b", others=("c",)), True),
        (caller("a"), caller("b"), True),
        (caller("a", others=("c",)), caller("b", others=("d",)), True),
        (caller("a", others=("b",)), caller("b"), False),
        (caller("a", "b"), caller("b"), False),
        (caller("Thread-3 (f)"), caller("Thread-4 (f)"), True),
        (caller("Thread-3 (f)", "MainThread"), caller("Thread-4 (f)", "MainThread"), True),
        (caller("Thread-3 (f)", "Thread-4 (f)"), caller("Thread-4 (f)"), False),
        (caller("Thread-3 (f)", "Thread-4 (f)"), caller("Thread-3 (f)"), True),
        (caller("Thread-3 (f)", others=("Thread-4 (f)",)), caller("Thread-4 (f)"), False),
        (caller("pool-0_1"), caller("pool-1_0"), True),
    ],
)
def test_whether_two_ranks_threads_are_the_same_one(one, other, fits):
    assert one.may_be(other) is other.may_be(one) is fits


def test_what_a_thread_says_of_itself_is_short_once_it_is_the_only_caller():
    known = ThreadLabels()
    seen: list[CallingThread] = []
    done = threading.Event()
    beside = threading.Thread(target=done.wait, name="loader-1", daemon=True)
    beside.start()

    def call() -> None:
        seen.extend(known.of_call("key") for _ in range(2))

    thread = threading.Thread(target=call, name="worker-3")
    thread.start()
    thread.join()
    done.set()
    beside.join()
    first, second = seen
    assert (first.label, first.name) == ("worker", "worker-3")
    assert "loader" in first.others
    assert second == CallingThread("worker", "worker-3")
    for each in seen:
        assert decode(CallingThread, encode(each)) == each
    # This thread lived when another one called, and may be meant in its place.
    assert known.of_call("key").has_rivals
    assert not known.of_call("another key").has_rivals


def test_a_thread_that_begins_to_call_while_the_living_are_listed_is_a_caller(monkeypatch):
    """Otherwise the rank would be taken for blocked while this thread may still call what the others wait for."""
    known = callers.Callers(SimpleNamespace(watch=CollectiveWatch()))
    has_called, over = threading.Event(), threading.Event()

    def call() -> None:
        known.called()
        has_called.set()
        over.wait(60)

    thread, list_living = threading.Thread(target=call), callers._living_threads

    def list_living_before_it() -> set[int | None]:
        alive = list_living()
        thread.start()
        assert has_called.wait(60)
        return alive

    monkeypatch.setattr(callers, "_living_threads", list_living_before_it)
    known.can_ask(frozenset())
    assert known.threads() == {thread.ident}
    over.set()
    thread.join()
    # Once it has ended it is none.
    monkeypatch.setattr(callers, "_living_threads", list_living)
    known.can_ask(frozenset())
    assert known.threads() == frozenset()


def test_threads_that_python_has_not_made_are_one_caller(monkeypatch):
    known = ThreadLabels()
    monkeypatch.setattr(threading, "current_thread", threading._DummyThread)
    assert known.of_call("key").name == "autograd"
    assert known.of_call("key") == CallingThread("autograd", "autograd")


def test_the_world_of_a_thread_is_that_of_its_rank():
    assert run_worlds(2, lambda own: in_threads(hvd.rank), PLAIN) == [[0], [1]]
