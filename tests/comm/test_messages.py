"""All-to-alls over gloo, and all-gathers of two ranks: messages of each rank to each other, receives first."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import attempt_ranks, attempt_threads, run_ranks

from hvdlite.comm import messages, torch_engine
from hvdlite.comm.gloo import ConnectingRanks, InitTimeout
from hvdlite.comm.group import Group
from hvdlite.comm.messages import NOT_DONE_YET
from hvdlite.comm.torch_engine import TorchEngine, TorchEngineFactory
from hvdlite.errors import CommunicationError, PeerLostError
from hvdlite.signing import Signer

# What each of up to four ranks sends the others: uneven, and some of it empty. In each swap ranks take other rows.
COUNTS = [[7, 1000, 300_000, 1], [5, 3, 0, 0], [0, 70_000, 5, 64], [2, 0, 11, 0]]


def count_of(sender: int, receiver: int, swap: int = 0) -> int:
    return COUNTS[(sender + swap) % 4][receiver]


def sent_by(sender: int, receiver: int, swap: int = 0) -> torch.Tensor:
    """What one rank sends another in the swap of this number."""
    return ((torch.arange(count_of(sender, receiver, swap)) + 5 * sender + receiver + 31 * swap) % 251).to(torch.uint8)


def begin(group: Group, swap: int = 0) -> tuple[list[torch.Tensor], Any]:
    ranks = range(group.size)
    parts = [sent_by(group.rank, other, swap) for other in ranks]
    received = [count_of(other, group.rank, swap) for other in ranks]
    # Every other swap into memory that the caller keeps.
    output = torch.empty(sum(received), dtype=torch.uint8) if swap % 2 else None
    return group.begin_all_to_all(torch.cat(parts), [len(part) for part in parts], received, "a swap", output)


def require_right(group: Group, parts: Sequence[torch.Tensor], swap: int = 0) -> None:
    for other, part in enumerate(parts):
        assert torch.equal(part, sent_by(other, group.rank, swap)), (group.rank, other, swap)


class Posting:
    """A process group of gloo whose messages are noted. While it ``holds`` they are sent only by `let_go`."""

    def __init__(self, group: Group) -> None:
        engine = group.engine
        assert isinstance(engine, TorchEngine)
        self._real = engine.process_group
        self.options = self._real.options
        self.posted: list[tuple[str, int]] = []
        self.holds = False
        self.held: list[tuple[list[torch.Tensor], int, int]] = []
        engine._messages._process_group = self

    def rank(self) -> int:
        return self._real.rank()

    def size(self) -> int:
        return self._real.size()

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self.posted.append(("receive", other))
        return self._real.recv(tensors, other, tag)

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self.posted.append(("send", other))
        if self.holds:
            self.held.append((tensors, other, tag))
            return self
        return self._real.send(tensors, other, tag)

    def wait(self, timeout: timedelta) -> None:
        """As the work of a message that is held."""

    def let_go(self) -> None:
        for work in [self._real.send(*message) for message in self.held]:
            work.wait(timedelta(seconds=60))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_gets_what_each_other_sends_it_in_swaps_of_uneven_parts_at_the_same_time(size: int) -> None:
    def rank(group: Group) -> None:
        begun = [(swap, *begin(group, swap)) for swap in range(6)]
        # The later ones need not be waited for last.
        for swap, parts, work in reversed(begun):
            work.wait()
            require_right(group, parts, swap)

    run_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("longest", [5, 70_000])
def test_an_all_gather_has_the_parts_of_all_ranks_whatever_their_sizes(size: int, longest: int) -> None:
    counts = [max(longest - 2 * rank, 0) for rank in range(size)]

    def rank(group: Group) -> None:
        own = torch.full((counts[group.rank],), group.rank + 1, dtype=torch.uint8)
        for _ in range(3):
            parts, work = group.begin_all_gather(own, "an all-gather", counts)
            work.wait()
            assert [(len(part), set(part.tolist())) for part in parts] == [
                (n, {i + 1} if n else set()) for i, n in enumerate(counts)
            ]

    run_ranks(size, rank)


@pytest.mark.parametrize("numel", [3, 40_000])
@pytest.mark.parametrize("size", [2, 3])
def test_an_all_gather_into_one_tensor_has_the_parts_in_rank_order(size: int, numel: int) -> None:
    def rank(group: Group) -> None:
        output = torch.empty(size * numel)
        group.engine.allgather_base(output, torch.full((numel,), float(group.rank))).wait()
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(numel))

    run_ranks(size, rank)


def test_two_ranks_swap_larger_tensors_of_an_all_gather_and_more_leave_them_to_gloo() -> None:
    def rank(group: Group) -> int:
        posting = Posting(group)
        for numel in (100, 70_000):
            own = torch.zeros(numel, dtype=torch.uint8)
            group.all_gather(own, "an all-gather", [numel] * group.size)
        return len(posting.posted)

    assert run_ranks(2, rank) == [2, 2]
    assert run_ranks(3, rank) == [0, 0, 0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_receive_comes_before_the_sends_and_ranks_receive_from_one_other_at_a_time_each_from_its_own(
    size: int,
) -> None:
    def rank(group: Group) -> list[tuple[str, int]]:
        posting, sizes = Posting(group), [10] * group.size
        group.begin_all_to_all(torch.zeros(sum(sizes), dtype=torch.uint8), sizes, sizes, "a swap")[1].wait()
        return posting.posted

    for own, posted in enumerate(run_ranks(size, rank)):
        left = [(own - distance) % size for distance in range(1, size)]
        assert posted[0] == ("receive", left[0])
        assert [other for kind, other in posted if kind == "receive"] == left
        assert [other for kind, other in posted if kind == "send"] == left[::-1]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_a_swap_that_come_before_those_of_an_earlier_one_are_not_taken_for_them(size: int) -> None:
    def rank(group: Group) -> None:
        posting = Posting(group)
        posting.holds = group.rank == 0
        # Of the same sizes.
        earlier, earlier_work = begin(group, 0)
        while posting.holds and len(posting.held) < size - 1:
            time.sleep(0.001)
        posting.holds = False
        later, later_work = begin(group, 4)
        posting.let_go()
        for parts, work, swap in ((later, later_work, 4), (earlier, earlier_work, 0)):
            work.wait()
            require_right(group, parts, swap)

    run_ranks(size, rank)


def test_the_messages_of_a_program_on_the_same_process_group_are_not_taken_for_those_of_a_swap() -> None:
    def rank(group: Group) -> None:
        own_group, other = group.engine.process_group, 1 - group.rank  # type: ignore[attr-defined]
        received = [torch.empty(8), torch.empty(8)]
        receives = [own_group.recv([tensor], other, tag) for tag, tensor in enumerate(received)]
        parts, work = begin(group)
        for tag in range(2):
            own_group.send([torch.full((8,), 10.0 * group.rank + tag)], other, tag).wait()
        work.wait()
        require_right(group, parts)
        for tag, receive in enumerate(receives):
            receive.wait()
            assert received[tag].tolist() == [10.0 * other + tag] * 8

    run_ranks(2, rank)


def test_a_swap_that_nobody_keeps_goes_on_in_memory_that_stays() -> None:
    others_may_begin = threading.Event()

    def rank(group: Group) -> None:
        if group.rank > 0:
            assert others_may_begin.wait(60)
            parts, work = begin(group)
            work.wait()
            require_right(group, parts)
            return
        parts, work = begin(group)
        del work
        gc.collect()
        others_may_begin.set()
        until_s = time.monotonic() + 60
        while not all(torch.equal(part, sent_by(other, 0)) for other, part in enumerate(parts)):
            assert time.monotonic() < until_s
            time.sleep(0.001)

    run_ranks(3, rank)


def test_a_wait_with_a_timeout_ends_nothing() -> None:
    may_begin = threading.Event()

    def rank(group: Group) -> None:
        if group.rank == 1:
            assert may_begin.wait(60)
        parts, work = begin(group)
        if group.rank == 0:
            with pytest.raises(RuntimeError, match=NOT_DONE_YET):
                work._work._work.wait(timedelta(seconds=0.01))
            assert not work.is_completed()
            may_begin.set()
        work.wait()
        assert work.is_completed()
        require_right(group, parts)

    run_ranks(2, rank)


@pytest.mark.parametrize(("size", "lost"), [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_a_lost_rank_is_the_error_at_once_also_of_later_swaps_though_other_ranks_have_not_come(
    size: int, lost: int
) -> None:
    all_wait, is_over = threading.Barrier(2), threading.Event()

    def rank(group: Group) -> None:
        if group.rank == lost:
            all_wait.wait(60)
            group.close()
        elif group.rank > 0:
            assert is_over.wait(60)
        else:
            _, work = begin(group)
            all_wait.wait(60)
            try:
                for _ in range(3):
                    with pytest.raises(PeerLostError, match=r"a swap failed on rank 0 \(node0\)"):
                        work.wait()
                    # Its error comes out of the wait, too.
                    _, work = begin(group, 4)
            finally:
                is_over.set()

    run_ranks(size, rank)


def test_a_lost_rank_is_told_without_anybody_who_waits() -> None:
    def rank(group: Group) -> None:
        if group.rank == 1:
            group.close()
            return
        is_told = threading.Event()
        begin(group)[1].when_done(is_told.set)
        assert is_told.wait(60)

    run_ranks(2, rank)


def test_groups_of_many_ranks_use_gloo_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "MOST_RANKS", 2)

    def rank(group: Group) -> list[tuple[str, int]]:
        posting = Posting(group)
        parts, work = begin(group)
        work.wait()
        require_right(group, parts)
        return posting.posted

    assert run_ranks(3, rank) == [[]] * 3
    assert all(run_ranks(2, rank))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_does_not_come_within_the_timeout_is_told_as_one(size: int) -> None:
    is_over = threading.Event()

    def rank(group: Group) -> None:
        if group.rank > 0:
            assert is_over.wait(60)
            return
        try:
            group.engine.process_group._set_default_timeout(timedelta(seconds=0.2))  # type: ignore[attr-defined]
            with pytest.raises(CommunicationError, match="another rank did not take part within the timeout"):
                begin(group)[1].wait()
        finally:
            is_over.set()

    run_ranks(size, rank)


def groups_with_connections(size: int) -> Callable[[int], Group]:
    """Returns what opens a rank's group on connections that can be cut, as those of a job."""
    store, timeout = dist.HashStore(), InitTimeout(timedelta(seconds=60))
    names = tuple(f"node{each}" for each in range(size))

    def group_of(rank: int) -> Group:
        ranks = ConnectingRanks(store, Signer(b"key"), rank, names, timeout)
        return Group(TorchEngineFactory("gloo", ranks), rank, size, names, signer=Signer(b"test"))

    return group_of


@pytest.mark.parametrize("size", [2, 3])
def test_a_revoked_engine_ends_swaps_and_lets_go_of_their_tensors(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group_of, is_over = groups_with_connections(size), threading.Event()

    def run(rank: int) -> bool:
        with closing(group_of(rank)) as group:
            if rank > 0:
                assert is_over.wait(60)
                return True
            _, work = begin(group)
            group.revoke("rank 7 has crashed")
            with pytest.raises(PeerLostError, match=r"a swap failed on rank 0 \(node0\): rank 7 has crashed"):
                work.wait()
            group.quiesce("rank 7 has crashed")
            is_over.set()
            return bool(work._work.has_ended)  # type: ignore[attr-defined]  # a TorchWork's

    assert attempt_threads(size, run) == [True] * size


def test_the_thread_that_waits_ends_with_the_engine() -> None:
    def threads() -> int:
        return sum(each.name == "hvdlite-messages" for each in threading.enumerate())

    before = threads()
    assert attempt_ranks(2, lambda group: begin(group)[1].wait()) == [None] * 2
    until_s = time.monotonic() + 60
    while threads() > before and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.01)
    assert threads() <= before


@pytest.mark.parametrize(("size", "lost"), [(2, 1), (3, 2)])
def test_a_swap_that_failed_keeps_neither_its_group_nor_its_tensors(size: int, lost: int) -> None:
    kept: list[weakref.ref[Any]] = []

    def rank(group: Group) -> None:
        if group.rank == lost:
            group.close()
            return
        parts, work = begin(group)
        engine = group.engine
        assert isinstance(engine, TorchEngine)
        kept.extend([weakref.ref(engine.process_group), weakref.ref(work._work._work), *map(weakref.ref, parts)])
        with pytest.raises(PeerLostError):
            work.wait()
        group.close()

    run_ranks(size, rank)
    until_s = time.monotonic() + 60
    while any(each() is not None for each in kept) and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.01)
    assert kept
    assert not [each() for each in kept if each() is not None]


def test_whatever_a_wait_raises_ends_the_swap_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = messages._receive

    def run_out(*arguments: Any) -> None:
        with lock:
            is_first = not has_failed
            has_failed.append(True)
        if is_first:
            raise MemoryError("no memory")
        receive(*arguments)

    lock, has_failed = threading.Lock(), []
    monkeypatch.setattr(messages, "_receive", run_out)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group_of = groups_with_connections(3)

    def run(rank: int) -> None:
        with closing(group_of(rank)) as group:
            begin(group)[1].wait()

    outcomes = attempt_threads(3, run)
    failed = [str(outcome) for outcome in outcomes if isinstance(outcome, CommunicationError)]
    assert sum("MemoryError: no memory" in each for each in failed) == 1
    # Those that still needed a message of it are not left waiting.
    assert all("within the timeout" not in each for each in failed)


def test_a_rank_that_can_start_no_thread_is_told_so_and_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, has_failed = threading.Thread.start, threading.Event()

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "hvdlite-messages" and not has_failed.is_set():
            has_failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def rank(group: Group) -> int:
        tries = 0
        while True:
            tries += 1
            try:
                parts, work = begin(group)
            except (CommunicationError, RuntimeError):
                continue
            work.wait()
            require_right(group, parts)
            return tries

    monkeypatch.setattr(threading.Thread, "start", start_later)
    assert sorted(run_ranks(3, rank)) == [1, 1, 2]


def test_a_rank_that_fails_between_its_messages_is_a_lost_one_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = messages._posted

    def interrupted(post: Any, timeout: timedelta) -> Any:
        if post.args[1] == 2 and post.func.__name__ == "send" and post.func.__self__.rank() == 1:
            raise KeyboardInterrupt
        return posted(post, timeout)

    monkeypatch.setattr(messages, "_posted", interrupted)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group_of = groups_with_connections(3)

    def run(rank: int) -> None:
        with closing(group_of(rank)) as group:
            begin(group)[1].wait()

    lost, interrupted_one, other = attempt_threads(3, run)
    assert isinstance(interrupted_one, KeyboardInterrupt)
    assert isinstance(other, CommunicationError)
    assert all("within the timeout" not in str(each) for each in (lost, other))
