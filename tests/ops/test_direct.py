"""Small calls whose data go with the vote: the same results and errors as other calls, on the calling thread."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.comm.flat_bytes import as_bytes
from hvdlite.control import voting
from hvdlite.control.executor import Executor
from hvdlite.control.voting import DirectVote, Voter
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.runtime import world
from hvdlite.runtime.world import current_world
from hvdlite.shm.board import Board, VoteData

SHARED = "shared memory"
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]
OPS = [hvd.Sum, hvd.Min, hvd.Max, hvd.Product]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes wait for as long as a test may take, so that all calls that ranks make together are direct."""
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the calls of all ranks that end with a go on their data."""
    made: list[str] = []
    data_soon = Voter.data_soon

    def note(voter: Voter, vote: DirectVote) -> VoteData | None:
        data = data_soon(voter, vote)
        if data is not None:
            made.append(threading.current_thread().name)
        return data

    monkeypatch.setattr(Voter, "data_soon", note)
    return made


def once_votes_are_open() -> None:
    """Waits until rank 0 has opened the board: a rank that comes before asks by a message."""
    while current_world().controller._requests._voter._board.open_round == 0:
        threading.Event().wait(0.001)
    hvd.barrier()


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 3
    return numbers.to(dtype)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_results_have_the_bits_of_calls_through_the_engine(size, direct):
    calls: list[tuple[Callable[..., Any], Callable[..., Any], torch.dtype, dict[str, Any]]] = []
    for dtype in [*FLOATS, *WHOLE]:
        calls += [(hvd.allreduce, hvd.allreduce_async, dtype, {"op": op}) for op in OPS]
    calls += [(hvd.allreduce, hvd.allreduce_async, dtype, {}) for dtype in FLOATS[:2]]
    for dtype in [*FLOATS, *WHOLE, torch.int16, torch.bool]:
        calls.append((hvd.allgather, hvd.allgather_async, dtype, {}))
        calls.append((hvd.broadcast, hvd.broadcast_async, dtype, {"root_rank": size - 1}))

    def rank(own: int) -> int:
        once_votes_are_open()
        before = len(direct)
        for function, begin, dtype, arguments in calls:
            for shape in [(), (1,), (3, 5), (2, 3, 4)]:
                tensor = values(shape, dtype, own)
                expected = hvd.synchronize(begin(tensor, **arguments))
                got = function(tensor, **arguments)
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert as_bytes(got).equal(as_bytes(expected)), (function, dtype, shape)
                assert got.data_ptr() != tensor.data_ptr()
                assert tensor.equal(values(shape, dtype, own))
        hvd.barrier()
        return len(direct) - before

    assert min(run_worlds(size, rank, engine=SHARED)) >= 4 * len(calls)
    assert len(direct) >= size * 4 * len(calls)


@pytest.mark.usefixtures("patient")
def test_the_thread_that_calls_makes_the_result_itself_and_the_executor_does_nothing(direct, monkeypatch):
    carried_out = []
    monkeypatch.setattr(Executor, "carry_out", lambda *arguments: carried_out.append(arguments))

    def rank(own: int) -> list[float]:
        while current_world().controller._requests._voter._board.open_round == 0:
            threading.Event().wait(0.001)
        return [hvd.allreduce(torch.tensor(float(own)), name=name).item() for name in ("a", None, "a")]

    assert run_worlds(2, rank, engine=SHARED) == [[0.5] * 3] * 2
    assert len(direct) == 6
    assert not any(name.startswith("hvdlite") for name in direct)
    assert not carried_out


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "odd",
    [
        lambda x: hvd.allreduce(x.double(), name="x"),
        lambda x: hvd.allreduce(x.view(2, 2), name="x"),
        lambda x: hvd.allreduce(x, name="x", op=hvd.Sum),
        lambda x: hvd.allreduce(x, name="x", prescale_factor=2.0),
        lambda x: hvd.allreduce(x, name="x", compression=hvd.Compression.fp16),
        lambda x: hvd.broadcast(x, 0, name="x"),
    ],
)
def test_ranks_that_call_different_things_get_the_error_of_calls_through_the_engine(odd):
    """Of which only the form of the call differs: `allreduce_async` has no direct form."""

    def rank(own: int, usual: Callable[..., Any]) -> Any:
        once_votes_are_open()
        return odd(torch.ones(4)) if own == 1 else usual(torch.ones(4), name="x")

    def begun(x: Tensor, name: str) -> Tensor:
        return hvd.synchronize(hvd.allreduce_async(x, name=name))

    over = threading.Barrier(2)

    def both(usual: Callable[..., Any]) -> list[str]:
        outcomes = attempt_worlds(2, lambda own: ended(own, usual), engine=SHARED)
        assert all(isinstance(outcome, hvd.MismatchError) for outcome in outcomes), outcomes
        return [str(outcome) for outcome in outcomes]

    def ended(own: int, usual: Callable[..., Any]) -> Any:
        try:
            return rank(own, usual)
        finally:
            over.wait(60)

    assert both(hvd.allreduce) == both(begun)


@pytest.mark.usefixtures("patient")
def test_a_rank_whose_tensor_needs_a_gradient_calls_with_one_whose_tensor_does_not():
    def rank(own: int) -> tuple[float, float]:
        once_votes_are_open()
        x = torch.tensor([2.0 + own], requires_grad=own == 0)
        total = hvd.allreduce(x, name="x", op=hvd.Sum)
        with torch.no_grad():
            again = hvd.allreduce(x, name="x", op=hvd.Sum)
        assert not again.requires_grad
        if own == 0:
            # The other rank's result needs no gradient; its part of the backward pass is a call of its own.
            total.sum().backward()
        else:
            hvd.allreduce(torch.ones(1), name="x.gradient", op=hvd.Sum)
        return total.item(), again.item()

    assert run_worlds(2, rank, engine=SHARED) == [(5.0, 5.0)] * 2


@pytest.mark.usefixtures("patient")
def test_results_of_inference_mode_are_tensors_of_it():
    def rank(own: int) -> bool:
        once_votes_are_open()
        with torch.inference_mode():
            results = [hvd.allreduce(torch.ones(1)), hvd.broadcast(torch.ones(1), 0), hvd.allgather(torch.ones(1))]
        return all(result.is_inference() for result in results)

    assert run_worlds(2, rank, engine=SHARED) == [True] * 2


@pytest.mark.usefixtures("patient")
def test_a_default_device_does_not_change_the_result():
    def rank(own: int) -> str:
        once_votes_are_open()
        x = torch.ones(1)
        with torch.device("meta"):
            return hvd.allreduce(x, op=hvd.Sum).device.type

    assert run_worlds(2, rank, engine=SHARED) == ["cpu"] * 2


@pytest.mark.usefixtures("patient")
def test_no_rank_passes_a_barrier_before_all_have_come(direct):
    here = [0, 0, 0]

    def rank(own: int) -> None:
        once_votes_are_open()
        for number in range(1, 20):
            here[own] = number
            hvd.barrier()
            assert min(here) >= number
            hvd.barrier()

    run_worlds(3, rank, engine=SHARED)
    assert len(direct) >= 3 * 38


def test_a_barrier_of_which_a_rank_is_late_is_one_barrier(monkeypatch):
    """Without a go it is requested by a message, and that alone is waited for."""
    monkeypatch.setattr(voting, "PATIENCE_S", 0.0)

    def rank(own: int) -> float:
        for _ in range(10):
            hvd.barrier()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_worlds(3, rank, engine=SHARED) == [3.0] * 3


@pytest.mark.usefixtures("patient")
def test_what_other_threads_call_during_a_direct_call_follows_it():
    """Another thread of rank 0 calls while the first waits for rank 1, which then makes the calls in this order."""
    called = threading.Event()

    def rank(own: int) -> list[float]:
        once_votes_are_open()
        if own == 1:
            assert called.wait(60)
            return [hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum).item() for name in ("first", "second")]
        voter, handles = current_world().controller._requests._voter, []

        def call_second() -> None:
            while not voter.is_voting:
                threading.Event().wait(0.001)
            handles.append(hvd.allreduce_async(torch.ones(1), name="second", op=hvd.Sum))
            called.set()

        thread = world._world.starts(call_second, "other")
        thread.start()
        first = hvd.allreduce(torch.ones(1), name="first", op=hvd.Sum).item()
        thread.join()
        return [first, hvd.synchronize(handles[0]).item()]

    assert run_worlds(2, rank, engine=SHARED) == [[2.0, 2.0]] * 2


@pytest.mark.usefixtures("patient")
def test_a_name_that_is_in_use_is_refused_on_both_ways():
    refused = threading.Barrier(2)

    def rank(own: int) -> float:
        once_votes_are_open()
        if own == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum)
            with pytest.raises(ValueError, match="Requested to allreduce, allgather, or broadcast a tensor with the"):
                hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum)
            refused.wait(60)
            return hvd.synchronize(handle).item()
        refused.wait(60)
        return hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()

    assert run_worlds(2, rank, engine=SHARED) == [2.0] * 2


@pytest.mark.parametrize("goes", [True, False])
def test_a_call_whose_wait_is_interrupted_goes_on_and_the_ranks_stay_in_step(goes, monkeypatch):
    """Rank 0 is interrupted between its vote and the decision: the other gets its result, and later calls pair up."""
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0 if goes else 0.0)
    wait, interrupted = Board.wait, threading.Event()

    def wait_interrupted(board: Board, is_over: Callable[[], bool], timeout_s: float) -> bool:
        is_main = not threading.current_thread().name.startswith("hvdlite")
        if board.rank == 0 and is_armed.is_set() and is_main and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return wait(board, is_over, timeout_s)

    is_armed = threading.Event()
    monkeypatch.setattr(Board, "wait", wait_interrupted)

    def rank(own: int) -> list[float]:
        once_votes_are_open()
        results = []
        if own == 0:
            is_armed.set()
            with pytest.raises(KeyboardInterrupt, match="allreduce of 'x'"):
                hvd.allreduce(torch.tensor([1.0]), name="x", op=hvd.Sum)
        else:
            assert interrupted.wait(60)
            results.append(hvd.allreduce(torch.tensor([10.0]), name="x", op=hvd.Sum).item())
        return [*results, *(hvd.allreduce(torch.tensor([value]), op=hvd.Sum).item() for value in (2.0, 3.0))]

    assert run_worlds(2, rank, engine=SHARED) == [[4.0, 6.0], [11.0, 4.0, 6.0]]


@pytest.mark.usefixtures("patient")
def test_a_result_that_cannot_be_made_fails_on_its_rank_alone_and_the_ranks_stay_in_step(monkeypatch):
    reduced = VoteData.reduced

    def fail_once(data: VoteData, *arguments: Any) -> Tensor:
        if threading.current_thread() is failing[0]:
            failing.pop()
            failing.append(None)
            raise MemoryError("no memory")
        return reduced(data, *arguments)

    failing: list[Any] = [None]
    monkeypatch.setattr(VoteData, "reduced", fail_once)

    def rank(own: int) -> list[float]:
        once_votes_are_open()
        if own == 1:
            failing[0] = threading.current_thread()
            with pytest.raises(MemoryError):
                hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum)
        else:
            assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 2.0
        return [hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() for _ in range(3)]

    assert run_worlds(2, rank, engine=SHARED) == [[2.0] * 3] * 2


@pytest.mark.usefixtures("patient")
def test_results_stay_when_later_calls_write_their_data():
    def rank(own: int) -> bool:
        once_votes_are_open()
        kept = [
            (hvd.broadcast(torch.full((4,), float(number)), 0), hvd.allgather(torch.full((2,), float(number))))
            for number in range(6)
        ]
        return all(torch.cat(results).eq(float(number)).all().item() for number, results in enumerate(kept))

    assert run_worlds(2, rank, engine=SHARED) == [True] * 2


def test_a_call_that_rank_0_does_not_decide_on_is_among_what_the_rank_waits_for(monkeypatch):
    """As where rank 0 is stopped: reports name the call, as any other."""
    decided, decide_round = threading.Event(), Coordinator.decide_round

    def decide_late(coordinator: Coordinator, number: int, ask: Any) -> None:
        if is_armed.is_set():
            assert decided.wait(60)
        decide_round(coordinator, number, ask)

    is_armed = threading.Event()
    monkeypatch.setattr(Coordinator, "decide_round", decide_late)

    def rank(own: int) -> float:
        once_votes_are_open()
        controller = current_world().controller

        def watch() -> None:
            while "allreduce of 'x'" not in [what for what, _ in controller.waits()]:
                threading.Event().wait(0.001)
            decided.set()

        is_armed.set()
        if own == 1:
            threading.Thread(target=watch, name="watch", daemon=True).start()
        return hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()

    assert run_worlds(2, rank, engine=SHARED) == [2.0] * 2


@pytest.mark.parametrize("call", [lambda x: hvd.broadcast(x, 0, name="x"), lambda x: hvd.allreduce(x, name="x")])
def test_a_call_in_whose_vote_the_world_ends_says_so(call, monkeypatch):
    """As where another thread calls hvd.shutdown(), or a generation of an elastic job is revoked."""
    wait, over = Board.wait, threading.Barrier(2)

    def wait_revoked(board: Board, is_over: Callable[[], bool], timeout_s: float) -> bool:
        if board.rank == 1 and is_armed.is_set():
            current_world().controller._connection.revoke("hvd.shutdown() was called")
            return False
        return wait(board, is_over, timeout_s)

    is_armed = threading.Event()
    monkeypatch.setattr(Board, "wait", wait_revoked)

    def rank(own: int) -> None:
        once_votes_are_open()
        try:
            if own == 1:
                is_armed.set()
                call(torch.ones(1))
        finally:
            over.wait(60)

    outcome = attempt_worlds(2, rank, engine=SHARED)[1]
    assert isinstance(outcome, hvd.CommunicationError), outcome
    assert "hvd.shutdown() was called" in str(outcome)


def test_ranks_that_share_no_memory_call_as_ever(direct):
    assert run_worlds(2, lambda own: hvd.allreduce(torch.ones(1), op=hvd.Sum).item()) == [2.0] * 2
    assert not direct


@pytest.mark.usefixtures("patient")
def test_members_of_a_process_set_call_as_ever(direct):
    def rank(own: int) -> float:
        once_votes_are_open()
        members = hvd.add_process_set([0, 1])
        return 0.0 if own == 2 else hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=members).item()

    assert run_worlds(3, rank, engine=SHARED) == [2.0, 2.0, 0.0]
    assert len(direct) <= 3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 3])
def test_autocast_and_inference_mode_change_no_result(size):
    def rank(own: int) -> list[list[float]]:
        once_votes_are_open()
        half = torch.tensor([own + 1.0], dtype=torch.float16)
        results = []
        for context in (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad()):
            with context:
                results += [hvd.allgather(half), hvd.allreduce(half, op=hvd.Sum), hvd.broadcast(half, 1)]
        assert all(each.dtype is torch.float16 for each in results)
        return [each.tolist() for each in results]

    everyone = [1.0, 2.0, 3.0][:size]
    assert run_worlds(size, rank, engine=SHARED) == [[everyone, [sum(everyone)], [2.0]] * 3] * size


@pytest.mark.parametrize("goes", [True, False])
def test_a_signal_handler_may_call_in_the_middle_of_a_call(goes, monkeypatch):
    """As one that has all ranks agree to save. Ranks are threads, so the handler is called where a signal would come.

    Each rank's handler calls while it waits for the decision, and once more while it makes its result.
    """
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0 if goes else 0.0)
    wait, reduced = Board.wait, VoteData.reduced
    here = threading.local()

    def handle_signal() -> None:
        # Not again within its own calls.
        if getattr(here, "signals", 0):
            here.signals -= 1
            left, here.signals = here.signals, 0
            here.handled.append(hvd.allreduce(torch.tensor([100.0]), op=hvd.Sum).item())
            here.handled.append(hvd.allgather(torch.tensor([1.0])).tolist())
            here.signals = left

    def wait_handling(board: Board, is_over: Callable[[], bool], timeout_s: float) -> bool:
        handle_signal()
        return wait(board, is_over, timeout_s)

    def reduce_handling(data: VoteData, *arguments: Any) -> Tensor:
        result = reduced(data, *arguments)
        handle_signal()
        return result

    monkeypatch.setattr(Board, "wait", wait_handling)
    monkeypatch.setattr(VoteData, "reduced", reduce_handling)

    def rank(own: int) -> list[Any]:
        once_votes_are_open()
        here.handled, results = [], []
        for value in (1.0, 2.0, 3.0):
            here.signals = 2
            results.append(hvd.allreduce(torch.tensor([value + own]), name=f"x{value}", op=hvd.Sum).item())
            while here.signals:  # a call that found no vote had no such place
                handle_signal()
        return [results, here.handled]

    outcomes = run_worlds(2, rank, engine=SHARED)
    assert outcomes == [[[3.0, 5.0, 7.0], [200.0, [1.0, 1.0]] * 6]] * 2


@pytest.mark.parametrize("goes", [True, False])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_call_that_is_interrupted_at_any_line_leaves_the_ranks_in_step(interrupted, goes, monkeypatch):
    """Ctrl-C at each line from the vote's begin to the call's end: the other rank gets its result, and both go on."""
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0 if goes else 0.0)
    files = ("control/requests.py", "control/voting.py", "shm/board.py", "coordinator/coordinator.py")
    begun, over = threading.Barrier(2), threading.Barrier(2)
    is_last = threading.Event()

    def rank(own: int) -> int:
        once_votes_are_open()
        requests, lines = current_world().controller._requests, 0
        for number in range(3000):
            begun.wait(60)
            if own == interrupted:
                tracer = Interrupt(files, requests, lines)
                sys.settrace(tracer)
                with contextlib.suppress(KeyboardInterrupt):
                    hvd.allreduce(torch.tensor([1.0]), name=f"x {number}", op=hvd.Sum)
                sys.settrace(None)
                # Without a vote the call has no such lines, and is repeated.
                lines += tracer.has_begun
                if tracer.has_begun and tracer.left >= 0:
                    is_last.set()
            else:
                assert hvd.allreduce(torch.tensor([10.0]), name=f"x {number}", op=hvd.Sum).item() == 11.0
            over.wait(60)
            for value in (2.0, 3.0):
                assert hvd.allreduce(torch.tensor([value]), name=f"y {number}", op=hvd.Sum).item() == 2 * value
            if is_last.is_set():
                return lines
        raise AssertionError("the call has no end")

    assert max(run_worlds(2, rank, engine=SHARED)) > 20


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("goes", [True, False])
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_handler_may_make_a_call_at_any_line_and_return(signalled, goes, monkeypatch):
    """The call goes on where it was, with results that are right on both ranks, and later calls pair up."""
    monkeypatch.setattr(voting, "PATIENCE_S", 60.0 if goes else 0.0)
    files = ("control/requests.py", "control/voting.py", "shm/board.py")
    begun, over = threading.Barrier(2), threading.Barrier(2)
    is_last = threading.Event()
    requests_of: dict[int, Any] = {}

    def until_the_other_waits() -> None:
        other = requests_of[1 - signalled]
        while not (other._by_ticket or (other._direct is not None and other._direct.may_wait)):
            threading.Event().wait(0.0001)
        # A vote of this rank that should not be there would be decided on now.
        threading.Event().wait(0.001)

    def rank(own: int) -> int:
        once_votes_are_open()
        requests, lines = current_world().controller._requests, 0
        requests_of[own] = requests
        executor = current_world().controller._executor
        for number in range(3000):
            handled: list[float] = []

            def handle_signal(number: int = number, handled: list[float] = handled) -> None:
                handled.append(hvd.allreduce(torch.tensor([100.0]), name=f"h {number}", op=hvd.Sum).item())

            begun.wait(60)
            if own == signalled:
                tracer = Interrupt(files, requests, lines, handle_signal)
                sys.settrace(tracer)
                result = hvd.allreduce(torch.tensor([1.0]), name="x", op=hvd.Sum)
                sys.settrace(None)
                lines += tracer.has_begun
                if tracer.has_begun and tracer.left >= 0:
                    is_last.set()
                if not handled:
                    handle_signal()
            else:
                result = hvd.allreduce(torch.tensor([10.0]), name="x", op=hvd.Sum)
                handle_signal()
            assert result.item() == 11.0, lines
            assert handled == [200.0], lines
            over.wait(60)
            for value in (2.0, 3.0):
                if own == signalled:
                    until_the_other_waits()
                assert hvd.allreduce(torch.tensor([value]), name="x", op=hvd.Sum).item() == 2 * value, lines
            # What rank 0 is told of operations that are over.
            assert executor.begun == executor.ended
            if is_last.is_set():
                return lines
        raise AssertionError("the call has no end")

    assert max(run_worlds(2, rank, engine=SHARED)) > 20


class Interrupt:
    """A trace function that handles a signal at one of the lines of some files, once a direct call votes.

    By default it raises KeyboardInterrupt. A handler that calls hvdlite is not called where the thread has a lock.

    Not at those with the word `with`: Python handles no signal between a block and its lock's release.
    """

    def __init__(
        self, files: tuple[str, ...], requests: Any, line: int, handle_signal: Callable[[], None] | None = None
    ) -> None:
        self._files, self._requests = files, requests
        self._handle_signal, self._locks = handle_signal, []
        if handle_signal is not None:
            coordinator = current_world().controller._coordinator
            self._locks = [requests._lock, *([] if coordinator is None else [coordinator._lock])]
        self.left = line
        self.has_begun = False
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        file, requests = frame.f_code.co_filename, self._requests
        if event != "line" or self.left < 0 or not file.endswith(self._files):
            return self
        self.has_begun = self.has_begun or (requests._direct is not None and requests._voter.is_voting)
        if not self.has_begun or any(lock.locked() for lock in self._locks):
            return self
        # A wait may come to its lines any number of times.
        is_new = (file, frame.f_lineno) not in self._seen
        self._seen.add((file, frame.f_lineno))
        if is_new and not linecache.getline(file, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left < 0 and self._handle_signal is not None:
                self._handle_signal()
            elif self.left < 0:
                raise KeyboardInterrupt
        return self
