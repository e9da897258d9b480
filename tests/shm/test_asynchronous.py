"""Asynchronous operations in shared memory: several threads wait, callbacks run, and unawaited operations end."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm.engines import (
    attempt_engines,
    attempt_threads,
    begin_all_reduce,
    begin_broadcast,
    make_engine,
    run_engines,
    until,
)

from hvdlite.comm.engine import LostError
from hvdlite.shm import peers
from hvdlite.shm.control_block import PAYLOAD_BYTES, WINDOW
from hvdlite.shm.queue import Queue
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES, ShmOperation

SMALL, STAGED = 3, CHUNK_BYTES // 4 + 1  # the number of floats in a payload, in two chunks


def begin_some(engine: ShmEngine, count: int) -> list[tuple[Any, Callable[[], bool]]]:
    """Begins works of every kind, alternately small and large; returns each with a check of its result."""
    begun: list[tuple[Any, Callable[[], bool]]] = []
    for number in range(count):
        numel = STAGED if number % 5 == 4 else SMALL
        own, kind = float(engine.rank + number), number % 4
        total = sum(range(engine.size)) + engine.size * number
        if kind == 0:
            tensor = torch.full((numel,), own)
            begun.append((begin_all_reduce(engine, tensor), lambda t=tensor, v=total: bool((t == v).all())))
        elif kind == 1:
            tensor = torch.full((numel,), own)
            work = begin_broadcast(engine, tensor, number % engine.size)
            begun.append((work, lambda t=tensor, v=number % engine.size + number: bool((t == v).all())))
        elif kind == 2:
            outputs = [torch.empty(numel) for _ in range(engine.size)]
            work = engine.allgather([outputs], [torch.full((numel,), own)])
            right = [rank + number for rank in range(engine.size)]
            begun.append((work, lambda o=outputs, v=right: [t.unique().tolist() for t in o] == [[x] for x in v]))
        else:
            begun.append((engine.barrier(), lambda: True))
    return begun


@pytest.mark.parametrize("size", [1, 3])
def test_more_than_there_is_room_for_may_be_under_way_and_be_waited_for_in_any_order(size: int) -> None:
    def on_rank(engine: ShmEngine) -> None:
        begun = begin_some(engine, 2 * WINDOW + 3)
        random.Random(engine.rank).shuffle(begun)
        for work, is_right in begun:
            assert work.wait()
            assert work.is_completed()
            assert is_right()

    run_engines(size, on_rank)


def test_an_operation_takes_no_place_of_which_another_rank_has_yet_to_read_the_data(monkeypatch: Any) -> None:
    # Without the thread in the background, the engine carries operations on only when the rank waits or begins one.
    monkeypatch.setattr(Queue, "carry_on_in_background", lambda queue, at_once: None)
    have_begun, is_one_done, may_read = threading.Event(), threading.Event(), threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        tensors = [torch.full((SMALL,), 10.0 * number + engine.rank) for number in range(WINDOW + 2)]
        if engine.rank == 0:
            works = [begin_all_reduce(engine, tensor) for tensor in tensors]
            # The end of the first one begins those that have found no room, where they have some now.
            have_begun.set()
            assert is_one_done.wait(60)
            works[0].wait()
            may_read.set()
        else:
            assert have_begun.wait(60)
            works = [begin_all_reduce(engine, tensors[0])]
            works[0].wait()
            is_one_done.set()
            assert may_read.wait(60)
            works += [begin_all_reduce(engine, tensor) for tensor in tensors[1:]]
        for work in works:
            work.wait()
        assert [tensor.tolist() for tensor in tensors] == [[20.0 * number + 1] * SMALL for number in range(WINDOW + 2)]

    run_engines(2, on_rank)


def test_a_slot_is_filled_again_only_once_the_other_ranks_have_read_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(Queue, "carry_on_in_background", lambda queue, at_once: None)
    has_begun, may_read = threading.Event(), threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        sent = torch.arange(6 * CHUNK_BYTES // 8)
        tensor = sent.clone() if engine.rank == 0 else torch.zeros_like(sent)
        if engine.rank == 0:
            assert has_begun.wait(60)
        work = begin_broadcast(engine, tensor)
        has_begun.set()
        if engine.rank == 0:
            may_read.set()
        assert may_read.wait(60)
        work.wait()
        assert torch.equal(tensor, sent)

    run_engines(2, on_rank)


def test_a_rank_that_fails_alone_ends_the_waits_of_the_others(monkeypatch: Any) -> None:
    told = threading.Event()
    check = ShmOperation.check

    def check_or_fail(operation: ShmOperation) -> None:
        if operation.peers.rank == 1:
            raise ValueError("an error of rank 1 alone")
        check(operation)

    monkeypatch.setattr(ShmOperation, "check", check_or_fail)

    def on_rank(engine: ShmEngine) -> None:
        work = begin_all_reduce(engine, torch.ones(STAGED))
        if engine.rank == 1:
            with pytest.raises(ValueError, match="an error of rank 1 alone"):
                work.wait()
            # Its engine stays open, whose end would end the waits too.
            assert told.wait(60)
            return
        try:
            with pytest.raises(RuntimeError, match=r"^rank 1 .* has failed with an error of its own"):
                work.wait()
        finally:
            told.set()

    run_engines(2, on_rank, timeout_s=30.0)


@pytest.mark.slow
def test_several_threads_may_wait() -> None:
    def on_rank(engine: ShmEngine) -> None:
        for _ in range(5):
            begun = begin_some(engine, 2 * WINDOW + 3)

            def wait_for_some(first: int, begun: Any = begun) -> None:
                for work, is_right in begun[first::3][:: -1 if first else 1]:
                    work.wait()
                    assert is_right()

            assert attempt_threads(3, wait_for_some) == [None] * 3

    run_engines(2, on_rank)


@pytest.mark.parametrize("numel", [SMALL, STAGED])
def test_what_nobody_waits_for_ends_too_and_futures_tell(numel: int) -> None:
    def on_rank(engine: ShmEngine) -> None:
        tensors = [torch.full((numel,), 1.0) for _ in range(WINDOW + 4)]
        told = threading.Semaphore(0)
        futures = [begin_all_reduce(engine, tensor).get_future() for tensor in tensors]
        for future in futures:
            future.add_done_callback(lambda _: told.release())
        for tensor, future in zip(tensors, futures, strict=True):
            (result,) = future.wait()
            assert result.data_ptr() == tensor.data_ptr()
            assert bool((result == engine.size).all())
        for _ in tensors:
            assert told.acquire(timeout=60)

    run_engines(2, on_rank)


@pytest.mark.parametrize("numel", [SMALL, STAGED])
def test_asking_is_enough_for_it_to_be_completed_at_some_time(numel: int) -> None:
    def on_rank(engine: ShmEngine) -> None:
        tensor = torch.ones(numel)
        work = begin_all_reduce(engine, tensor)
        until(work.is_completed)
        assert bool((tensor == engine.size).all())
        assert work.wait()

    run_engines(2, on_rank)


@pytest.mark.parametrize("count", [1, WINDOW + 5])
def test_other_ranks_do_not_wait_for_one_that_has_begun_all_and_is_busy_otherwise(count: int) -> None:
    busy = threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        tensors = [torch.ones(STAGED if number % 7 == 6 else SMALL) for number in range(count)]
        works = [begin_all_reduce(engine, tensor) for tensor in tensors]
        if engine.rank == 0:
            # It calls no function of the engine until the others have all their results.
            assert busy.wait(60)
        for work in works:
            work.wait()
        busy.set()
        assert all(bool((tensor == 2).all()) for tensor in tensors)

    run_engines(2, on_rank)


def test_a_callback_may_begin_collectives_and_wait_for_them() -> None:
    """As PowerSGD does, which is a communication hook of DDP."""

    def on_rank(engine: ShmEngine) -> None:
        for numel in (SMALL, STAGED):
            first, second = torch.ones(numel), torch.ones(numel)

            def go_on(future: Any, tensor: torch.Tensor = second) -> torch.Tensor:
                begin_all_reduce(engine, tensor).get_future().wait()
                work = begin_all_reduce(engine, tensor)
                work.wait()
                return future.value()[0] + tensor

            result = begin_all_reduce(engine, first).get_future().then(go_on).wait()
            assert bool((result == 2 + 4).all())

    run_engines(2, on_rank)


def test_a_rank_that_has_its_result_may_leave_before_others_have_looked_at_what_it_gave(monkeypatch: Any) -> None:
    store, has_left = dist.HashStore(), threading.Event()
    # Without the thread in the background, the engine carries operations on only when the rank waits.
    monkeypatch.setattr(Queue, "carry_on_in_background", lambda queue, at_once: None)

    def on_rank(rank: int) -> None:
        engine = make_engine(store, rank, 2)
        small, large = torch.full((SMALL,), rank + 1.0), torch.full((STAGED,), rank + 1.0)
        works = [begin_all_reduce(engine, small), begin_broadcast(engine, large)]
        if rank == 0:
            for work in works:
                work.wait()
            engine.close()
            del engine, works, work
            gc.collect()
            has_left.set()
            return
        assert has_left.wait(60)
        for work in works:
            work.wait()
        engine.close()
        assert small.tolist() == [3.0] * SMALL
        assert large.unique().tolist() == [1.0]

    assert attempt_threads(2, on_rank) == [None, None]


def test_closing_ends_what_is_under_way() -> None:
    def on_rank(engine: ShmEngine) -> str:
        if engine.rank == 1:
            return ""
        works = [begin_all_reduce(engine, torch.ones(numel)) for numel in (SMALL, STAGED)]
        waiting = threading.Thread(target=engine.close)
        waiting.start()
        with pytest.raises(RuntimeError, match=r"the engine was closed|has left") as caught:
            works[1].wait()
        waiting.join()
        assert works[0].is_completed()
        assert not works[0].is_success()
        with pytest.raises(RuntimeError, match=r"this process group .*: make a new one"):
            engine.barrier()
        return str(caught.value)

    run_engines(2, on_rank)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_when_time_is_out(monkeypatch: Any) -> None:
    over, both_have_begun = threading.Event(), threading.Barrier(2)
    # Without the thread in the background, time counts from the wait on, when both others have begun.
    monkeypatch.setattr(Queue, "carry_on_in_background", lambda queue, at_once: None)

    def on_rank(engine: ShmEngine) -> None:
        if engine.rank == 1:
            assert over.wait(60)
            return
        try:
            work = begin_all_reduce(engine, torch.ones(PAYLOAD_BYTES))
            both_have_begun.wait(60)
            work.wait()
        finally:
            over.set()

    outcomes = attempt_engines(3, on_rank, timeout_s=0.3)
    told = [str(outcomes[0]), str(outcomes[2])]
    # The first rank that sees it reports it; the other may see only that one's end.
    assert any("timed out after 0.3 s: rank 1 of this group (pid" in each for each in told), told
    assert all(isinstance(outcomes[rank], RuntimeError) for rank in (0, 2))


def test_a_rank_that_leaves_is_named() -> None:
    def on_rank(engine: ShmEngine) -> None:
        begin_all_reduce(engine, torch.ones(2)).wait()
        if engine.rank != 2:
            begin_all_reduce(engine, torch.ones(STAGED)).wait()

    outcomes = attempt_engines(3, on_rank)
    assert outcomes[2] is None
    # The first rank that sees it reports it; the other may see only that one's end.
    assert any("rank 2 of this group" in str(outcome) and "has left" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes[:2])


@pytest.mark.parametrize("numel", [SMALL, STAGED])
def test_an_operation_names_the_ranks_that_have_not_begun_what_it_waits_for_first(numel: int) -> None:
    has_begun, was_named = threading.Event(), threading.Event()

    def on_rank(engine: ShmEngine) -> list[int]:
        begin_all_reduce(engine, torch.ones(SMALL)).wait()
        tensors = [torch.ones(numel), torch.ones(numel)]
        works = [begin_all_reduce(engine, tensor) for tensor in tensors[: 2 - engine.rank]]
        named = []
        if engine.rank == 0:
            assert has_begun.wait(60)
            # Rank 1 has not begun the second either, which waits for nothing but the first.
            named = [*works[0].not_begun(), *works[1].not_begun()]
            was_named.set()
        elif engine.rank == 1:
            has_begun.set()
        assert was_named.wait(60)
        works += [begin_all_reduce(engine, tensor) for tensor in tensors[len(works) :]]
        for work in works:
            work.wait()
            assert work.not_begun() == []
        return named

    assert run_engines(3, on_rank) == [[2, 2], [], []]


@pytest.mark.parametrize("numel", [SMALL, STAGED])
def test_a_wait_may_be_given_up_and_begun_again(numel: int) -> None:
    given_up = threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        tensor = torch.ones(numel)
        if engine.rank == 0:
            work = begin_all_reduce(engine, tensor)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"timed out! It was not done within 0\.01 s") as caught:
                    work.wait(timedelta(milliseconds=10))
                assert f"begins an all-reduce of {numel} elements of torch.float32 by SUM" in str(caught.value)
                assert re.search(r"not begun by rank 1 of this group \(pid \d+\)$", str(caught.value))
            given_up.set()
        else:
            assert given_up.wait(60)
            work = begin_all_reduce(engine, tensor)
        assert work.wait(timedelta(seconds=30))
        assert tensor.unique().tolist() == [2.0]
        # An operation that is done is not waited for.
        assert work.wait(timedelta(microseconds=1))

    run_engines(2, on_rank)


def test_who_waits_goes_on_when_that_is_done_though_another_thread_waits_for_what_comes_later() -> None:
    second_may_come, first_is_over = threading.Event(), threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        if engine.rank == 1:
            assert second_may_come.wait(60)
            for _ in range(2):
                begin_all_reduce(engine, torch.ones(SMALL)).wait()
                # The second operation begins only once a thread of the other rank has its result.
                assert first_is_over.wait(60)
            return
        first, second = (begin_all_reduce(engine, torch.ones(SMALL)) for _ in range(2))
        waits_for_second = threading.Thread(target=second.wait)
        waits_for_second.start()
        # This thread carries on the first operation too, and no other thread can.
        until(engine._queue._carrying.locked)
        waits_for_first = threading.Thread(target=lambda: (first.wait(), first_is_over.set()))
        waits_for_first.start()
        until(lambda: engine._queue._waiters == 2)
        second_may_come.set()
        waits_for_first.join(60)
        waits_for_second.join(60)
        assert second.is_success()

    run_engines(2, on_rank)


def test_threads_that_wait_with_a_timeout_are_all_told_and_all_get_the_same_future() -> None:
    may_begin = threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        tensor = torch.ones(SMALL)
        if engine.rank == 1:
            assert may_begin.wait(60)
            begin_all_reduce(engine, tensor).wait()
            return
        work = begin_all_reduce(engine, tensor)

        def wait(_: int) -> Any:
            return work.wait(timedelta(seconds=60)), work.get_future()

        threading.Thread(target=lambda: (until(lambda: len(work._bells) == 3), may_begin.set())).start()
        outcomes = attempt_threads(3, wait)
        assert [done for done, _ in outcomes] == [True] * 3
        assert all(future is outcomes[0][1] for _, future in outcomes)

    run_engines(2, on_rank)


def test_the_thread_in_the_background_wakes_once_however_often_it_was_wanted(monkeypatch: Any) -> None:
    """It must not wake fifty times a second long after, for each operation that others have carried on meanwhile."""
    may_go_on = threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        wakes: list[int] = []

        def has_free_cores() -> bool:
            wakes.append(len(wakes))
            return may_go_on.wait(60)

        # Of this engine alone: the thread of one that an earlier test has closed may look once more.
        monkeypatch.setattr(engine._context.peers, "has_free_cores", has_free_cores)
        for _ in range(50):
            begin_all_reduce(engine, torch.ones(STAGED)).wait()
        engine.barrier().wait()
        may_go_on.set()
        # No thread waits for this one: the thread in the background finishes it at its last wake-up.
        tensor = torch.ones(STAGED)
        work = begin_all_reduce(engine, tensor)
        until(lambda: work.is_done and not engine._queue._is_wanted.is_set())
        assert len(wakes) <= 3
        assert bool((tensor == 2).all())

    run_engines(2, on_rank)


def test_where_reads_may_be_reordered_what_others_have_written_is_read_behind_a_fence(monkeypatch: Any) -> None:
    """The effect of a fence shows only on such a machine; this checks that there is one, after the counters."""
    seen: list[bool] = []
    is_over = threading.Event()
    fence = peers.fence
    monkeypatch.setattr(peers, "READS_IN_ORDER", False)

    def on_rank(engine: ShmEngine) -> None:
        try:
            monkeypatch.setattr(peers, "fence", lambda: (seen.append(True), fence()))
            assert not engine._context.peers.reached(0, 1)
            assert not seen
            assert engine._context.peers.reached(0, 0)
            assert len(seen) == 1
        finally:
            is_over.set()

    # The other rank passes a fence when it leaves.
    on_two = attempt_engines(2, lambda engine: on_rank(engine) if engine.rank == 0 else is_over.wait(60))
    assert on_two == [None, True]

    def sums(engine: ShmEngine) -> None:
        for numel in (SMALL, STAGED):
            tensor = torch.ones(numel)
            begin_all_reduce(engine, tensor).wait()
            assert tensor.unique().tolist() == [2.0]

    run_engines(2, sums)


def test_what_all_ranks_have_come_to_is_done_when_a_rank_is_lost_and_the_rest_fails() -> None:
    """A rank may have passed the vote at a step's end, and be lost, before another gets a processor to wait for it."""
    begun, voted = threading.Event(), threading.Event()

    def rank(engine: ShmEngine) -> list[float]:
        vote = torch.ones(1)
        if engine.rank == 0:
            assert begun.wait(60)
            begin_all_reduce(engine, vote).wait()
            voted.set()
            return vote.tolist()
        work, later = begin_all_reduce(engine, vote), begin_all_reduce(engine, torch.ones(1))
        begun.set()
        assert voted.wait(60)
        engine.revoke("rank 0 was lost")
        work.wait()
        with pytest.raises(LostError, match="rank 0 was lost"):
            later.wait()
        return vote.tolist()

    assert run_engines(2, rank) == [[2.0], [2.0]]


def test_of_several_reasons_for_which_ranks_are_revoked_the_first_counts() -> None:
    first, both = threading.Event(), threading.Event()

    def rank(engine: ShmEngine) -> None:
        if engine.rank == 1:
            engine.revoke("rank 3 was lost")
            first.set()
            assert both.wait(60)
        elif engine.rank == 0:
            assert first.wait(60)
            engine.revoke("rank 1 has gone on without this one")
            both.set()
        else:
            assert both.wait(60)
            with pytest.raises(LostError, match=r"^rank 3 was lost$"):
                engine.barrier().wait()

    run_engines(3, rank)
