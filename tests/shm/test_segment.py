"""Segments of shared memory: which tensors are in them, how much memory they take, and that it is given back."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import mmap
import os
import signal
import stat
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import in_child
from shm.engines import attempt_threads, begin_all_reduce, run_engines, until

from hvdlite.comm.gloo import InitTimeout
from hvdlite.errors import CommunicationError
from hvdlite.shm import segment as segment_module
from hvdlite.shm.segment import DIRECTORY, KeptSegment, NoMemoryError, Segment
from hvdlite.shm.setup import exchange_control_blocks, open_segment
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES
from hvdlite.signing import Signer

MIB = 2**20
TIMEOUT = timedelta(seconds=60)


def used_bytes(segment: Segment) -> int:
    return os.fstat(segment.address.fd).st_blocks * 512


def mapped() -> list[str]:
    """Returns this process's maps of shared memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {DIRECTORY}/" in line]


def open_files() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_the_file_is_the_users_alone_and_has_no_name() -> None:
    before = set(os.listdir(DIRECTORY))
    segment = open_segment()
    segment.allocate(1)
    state = os.fstat(segment.address.fd)
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert state.st_uid == os.getuid()
    assert state.st_nlink == 0
    for name in set(os.listdir(DIRECTORY)) - before:
        with contextlib.suppress(FileNotFoundError):  # another process's, which has removed it
            assert os.stat(Path(DIRECTORY, name)).st_ino != state.st_ino


def test_memory_is_all_zero_and_given_back_when_nothing_refers_to_it() -> None:
    segment = Segment()
    tensors = [segment.allocate(MIB + 1).tensor for _ in range(3)]
    assert all(not tensor.any() for tensor in tensors)
    assert used_bytes(segment) == 3 * (MIB + os.sysconf("SC_PAGESIZE"))
    view = tensors[1][8:12].view(torch.float32)
    view.fill_(2)
    tensors.clear()
    assert used_bytes(segment) == MIB + os.sysconf("SC_PAGESIZE")
    assert view.item() == 2
    del view
    assert used_bytes(segment) == 0


def test_a_tensor_is_found_where_it_lies_and_others_are_not() -> None:
    segment, other = Segment(), Segment()
    pieces = [segment.allocate(8192) for _ in range(5)]
    del pieces[2]
    for piece in pieces:
        for start in (0, 4, 8188):
            assert segment.find(piece.tensor[start : start + 4]) == (piece.offset, 8192, start)
    assert segment.find(other.allocate(4096).tensor) is None
    assert segment.find(torch.ones(4)) is None
    assert segment.find(torch.empty(0)) is None


def test_a_segment_that_others_see_is_the_same_memory() -> None:
    mine, theirs = Segment(), Segment()
    mine.allocate(4096)
    piece = mine.allocate(4096)
    seen = theirs.see(mine.address, piece.offset, 4096)
    piece.tensor[7] = 5
    assert seen.tensor[7] == 5
    seen.tensor[8] = 6
    assert piece.tensor[8] == 6


def test_a_file_that_is_shorter_than_was_told_is_refused() -> None:
    """The message may come from a program that is no rank of the job; reading beyond the file's end is a SIGBUS."""
    theirs, ours = Segment(), Segment()
    piece = theirs.allocate(MIB)
    with pytest.raises(NoMemoryError, match="is shorter than that process announced"):
        ours.see(theirs.address, piece.offset, 2 * MIB)
    assert ours.see(theirs.address, piece.offset, MIB).tensor.numel() == MIB


class Somewhere:
    """A stand-in for a tensor, with an address, for `Segment.find`."""

    def __init__(self, pointer: int) -> None:
        self.data_ptr = lambda: pointer
        self.numel = self.element_size = lambda: 1


@pytest.mark.parametrize("moment", ["sorted", "_map"])
def test_memory_that_is_let_go_while_more_is_allocated_is_known_no_more(monkeypatch: Any, moment: str) -> None:
    segment = Segment()
    garbage = [segment.allocate(MIB).tensor]
    pointer = garbage[0].data_ptr()
    usual = getattr(segment_module, moment, sorted)

    def with_collector(*arguments: Any, **more: Any) -> Any:
        result = usual(*arguments, **more)
        garbage.clear()
        return result

    monkeypatch.setattr(segment_module, moment, with_collector, raising=False)
    kept = segment.allocate(MIB)
    if kept.tensor.data_ptr() != pointer:
        assert segment.find(Somewhere(pointer)) is None  # type: ignore[arg-type]  # as much as it looks at
    assert segment.find(kept.tensor) == (kept.offset, MIB, 0)
    assert used_bytes(segment) == MIB


def test_memory_that_is_let_go_while_another_thread_allocates_is_given_back_by_that_one(monkeypatch: Any) -> None:
    segment = Segment()
    tensors = [segment.allocate(MIB).tensor]
    is_inside, may_go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(60)
        return sorted(*arguments)

    monkeypatch.setattr(segment_module, "sorted", slowly, raising=False)
    pieces: list[Any] = []
    thread = threading.Thread(target=lambda: pieces.append(segment.allocate(MIB)))
    thread.start()
    assert is_inside.wait(60)
    # It does not wait for the other one.
    tensors.clear()
    may_go_on.set()
    thread.join()
    assert len(pieces) == 1
    assert used_bytes(segment) == MIB


def test_files_are_closed_once_whoever_closes_them(monkeypatch: Any) -> None:
    closed: list[int] = []
    fds = dict(enumerate(range(5)))

    def close(fd: int) -> None:
        closed.append(fd)
        # Another thread, or the garbage collector, in the middle of it.
        segment_module.close_all(fds)

    monkeypatch.setattr(os, "close", close)
    segment_module.close_all(fds)
    assert sorted(closed) == list(range(5))


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_forked_child_writes_into_a_piece_no_other_process_sees(is_closed: bool) -> None:
    segment, other = Segment(), Segment()
    tensor = segment.allocate(3 * 4096).tensor.fill_(3)
    alias = tensor[5000:6000].view(torch.float32)
    seen = other.see(segment.address, 0, 3 * 4096).tensor
    if is_closed:  # as after hvd.shutdown()
        segment.close()

    def child() -> list[bool]:
        as_it_was = bool((tensor == 3).all())
        tensor[:4096] = 7
        alias.add_(1)
        changed = alias.clone()
        wrote = bool((tensor[:4096] == 7).all()), bool((tensor[4096:5000] == 3).all()), torch.equal(alias, changed)
        with pytest.raises(NoMemoryError, match="was closed"):
            segment.allocate(1)
        return [as_it_was, *wrote]

    assert in_child(child) == [True] * 4
    assert bool((tensor == 3).all())
    assert bool((seen == 3).all())
    tensor.fill_(4)
    assert bool((seen == 4).all()), "the parent's is shared as before"


def test_a_segment_whose_lock_another_thread_holds_can_be_left_to_the_parent() -> None:
    segment = Segment()
    tensors = [segment.allocate(4096).tensor.fill_(3)]
    with segment._lock:
        assert in_child(lambda: (tensors[0].fill_(1), tensors.clear(), segment.close())) is not None
    assert bool((tensors[0] == 3).all())


def test_a_forked_child_whose_copy_cannot_be_made_ends_rather_than_change_its_parents(monkeypatch) -> None:
    segment = Segment()
    tensor = segment.allocate(4096).tensor.fill_(3)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(segment_module, "_mapped", fail)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        tensor.fill_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert bool((tensor == 3).all())


def test_a_forked_child_that_lets_go_takes_nothing_from_its_parent() -> None:
    segment = Segment()
    tensors = [segment.allocate(4096).tensor.fill_(3)]
    child = os.fork()
    if child == 0:
        try:
            tensors.clear()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert bool((tensors[0] == 3).all())


def test_a_limit_of_the_size_of_files_is_named(monkeypatch) -> None:
    segment = Segment()

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NoMemoryError, match=r": this process may write no larger files: .* with ulimit -f$"):
        segment.allocate(4096)


def test_what_is_too_much_is_refused_in_one_line_and_takes_nothing() -> None:
    segment = Segment()
    kept = segment.allocate(4096)
    too_much = os.statvfs(DIRECTORY).f_blocks * os.statvfs(DIRECTORY).f_frsize + MIB
    with pytest.raises(NoMemoryError, match=r"^cannot allocate [\d.]+ MiB more in /dev/shm of [\d.]+ MiB: No space"):
        segment.allocate(too_much)
    assert used_bytes(segment) == 4096
    assert segment.allocate(4096).offset == 4096
    assert kept.offset == 0


def test_engines_and_their_tensors_leave_nothing() -> None:
    def on_rank(engine: ShmEngine) -> None:
        resident = engine.zeros(CHUNK_BYTES, torch.float32)
        assert resident is not None
        for tensor in (resident, torch.ones(CHUNK_BYTES)):
            begin_all_reduce(engine, tensor).wait()
        segment = engine._context.segment
        used = used_bytes(segment)
        del resident, tensor
        until(lambda: used_bytes(segment) == used - 4 * CHUNK_BYTES)

    # Collects what earlier tests of this process have left.
    gc.collect()
    files, maps = len(open_files()), len(mapped())
    for _ in range(2):
        run_engines(2, on_rank)
        # Looked at repeatedly: a thread that is about to end may hold a part of a reference cycle a little longer.
        until(lambda: gc.collect() >= 0 and len(mapped()) <= maps and len(open_files()) <= files)


def test_engines_over_one_segment_may_come_and_go() -> None:
    """Like the engines of optimizers."""
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        segment = Segment()
        for number in range(4):
            context = exchange_control_blocks(
                dist.PrefixStore(str(number), store), rank, 2, lambda: segment, InitTimeout(TIMEOUT), Signer(b"test")
            )
            engine = ShmEngine(context, "test")
            bucket = engine.zeros(MIB, torch.float32)
            assert bucket is not None
            bucket.fill_(1.0)
            begin_all_reduce(engine, bucket).wait()
            assert bucket[-1] == 2
            engine.close()
            del context, engine, bucket
            gc.collect()
            until(lambda: used_bytes(segment) == 0)

    assert attempt_threads(2, on_rank) == [None, None]


def test_a_rank_that_alone_fails_at_the_end_of_the_setup_ends_the_waits_of_those_that_use_the_engine() -> None:
    """As in an elastic job, where the store may refuse the last answer to some of the ranks once one is lost."""
    store = dist.HashStore()

    def wait(store: dist.Store, keys: Any) -> None:
        store.wait(list(keys), TIMEOUT)
        if threading.current_thread() is failing and "result" in keys[0]:
            raise RuntimeError("a rank was lost")

    failing: threading.Thread | None = None

    def on_rank(rank: int) -> None:
        nonlocal failing
        if rank == 1:
            failing = threading.current_thread()
        timeout = InitTimeout(TIMEOUT)
        context = exchange_control_blocks(store, rank, 3, Segment, timeout, Signer(b"test"), wait)
        engine = ShmEngine(context, "test")
        try:
            engine.barrier().wait()
        finally:
            engine.close()

    first, second, third = map(str, attempt_threads(3, on_rank))
    assert "setting up shared memory failed on rank 1 of 3" in second
    assert "a rank was lost" in second
    for each in (first, third):
        assert "rank 1 of this group" in each
        assert "has failed with an error of its own" in each


def test_a_rank_that_has_no_memory_is_named_on_every_rank() -> None:
    store = dist.HashStore()

    def none() -> Segment:
        raise NoMemoryError("there is none")

    def on_rank(rank: int) -> None:
        make = none if rank == 1 else Segment
        exchange_control_blocks(store, rank, 2, make, InitTimeout(TIMEOUT), Signer(b"test"))

    for outcome in attempt_threads(2, on_rank):
        assert isinstance(outcome, NoMemoryError)
        assert str(outcome) == "rank 1 of 2 has no shared memory: there is none"


def test_a_piece_costs_no_file_descriptor() -> None:
    def on_rank(engine: ShmEngine) -> None:
        tensors: list[Any] = [engine.zeros(2 * MIB, torch.uint8) for _ in range(20)]
        engine.barrier().wait()
        before = len(open_files())
        engine.barrier().wait()
        for tensor in tensors:
            begin_all_reduce(engine, tensor).wait()
        assert len(open_files()) <= before + 4

    run_engines(2, on_rank)


@pytest.mark.parametrize("kind", [Segment, KeptSegment])
def test_memory_that_its_rank_has_freed_is_unmapped_whenever_each_rank_frees_its_own(kind: type[Segment]) -> None:
    store = dist.HashStore()
    gc.collect()
    maps = len(mapped())

    def on_rank(rank: int) -> tuple[int, int, int]:
        segment = kind()
        context = exchange_control_blocks(store, rank, 2, lambda: segment, InitTimeout(TIMEOUT), Signer(b"test"))
        engine = ShmEngine(context, "test")
        stays = engine.zeros(3 * 4096, torch.uint8)
        # Rank 0 frees each in the next round, and rank 1 eight at once, while the next operation is on its way.
        held: list[Any] = []
        for number in range(200):
            tensor = engine.zeros(2048 + number % 3 * 1024, torch.float32)
            assert stays is not None
            assert tensor is not None
            tensor.fill_(number + rank)
            stays.fill_(rank + 1)
            works = [begin_all_reduce(engine, stays)]
            if number % 2:
                part = torch.empty(tensor.numel() // 2)
                options = dist.ReduceScatterOptions()
                works.append(engine.reduce_scatter_base(part, tensor, [part.numel()] * 2, options))
            else:
                part = tensor
                works.append(begin_all_reduce(engine, tensor))
            if len(held) == (1, 8)[rank]:
                held.clear()
            for work in works:
                work.wait()
            assert part.eq(2 * number + 1).all()
            assert stays.eq(3).all()
            held.append(tensor)
            del works, work, part, tensor
        counts = len(context._seen), len(getattr(segment, "_seen", ())), len(mapped()) - maps
        engine.close()
        return counts

    for outcome in attempt_threads(2, on_rank):
        if isinstance(outcome, BaseException):
            raise outcome
        pieces, kept, more_maps = outcome
        # Of rank 1 eight that it has freed at once and eight of later rounds, and a few of rank 0.
        assert pieces < 30
        assert kept < 30
        # Both ranks' own pieces, and those that they see.
        assert more_maps < 90


def rss_bytes(pointer: int) -> int:
    """Returns how much of this process's mapping at an address is in its page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{pointer:x}-"):
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    raise AssertionError("there is no such mapping")


def test_a_rank_maps_only_its_share_of_what_others_reduce_in_place() -> None:
    """The pages of all ranks in each of them would make its process's end slower, for which the others may wait."""

    def on_rank(engine: ShmEngine) -> None:
        tensor = engine.zeros(MIB, torch.float32)
        assert tensor is not None
        begin_all_reduce(engine, tensor.fill_(1.0)).wait()
        assert tensor.eq(2).all()
        seen = {group_rank: piece for (group_rank, _), piece in engine._context._seen.items()}
        # The kernel maps some pages around those that are used, and may take some back.
        assert 0 < rss_bytes(seen[1 - engine.rank].tensor.data_ptr()) < 3 * MIB

    run_engines(2, on_rank)


def test_a_rank_maps_no_page_of_any_slots_before_it_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many ranks on a host, all pages of all would take most of the time of opening an engine."""
    # Ranks that are threads do without it.
    monkeypatch.setattr(mmap, "MAP_POPULATE", 0x8000)

    def on_rank(engine: ShmEngine) -> None:
        slots = [engine._context.slots[rank][0].data_ptr() for rank in range(engine.size)]
        assert [rss_bytes(each) for each in slots] == [0, 0]
        tensor = torch.ones(CHUNK_BYTES // 4)
        begin_all_reduce(engine, tensor).wait()
        assert tensor.eq(2).all()
        # The kernel maps some pages around each.
        assert all(0 < rss_bytes(each) < 2 * CHUNK_BYTES for each in slots)

    run_engines(2, on_rank)


def test_a_forked_child_is_refused_operations_and_waits_for_none_of_its_parents() -> None:
    both_have_forked = threading.Barrier(2)

    def on_rank(engine: ShmEngine) -> float:
        tensor = torch.ones(MIB)
        pending = begin_all_reduce(engine, tensor) if engine.rank == 0 else None

        def child() -> None:
            for call in (pending and pending.wait, lambda: begin_all_reduce(engine, tensor), engine.barrier):
                if call is not None:
                    with pytest.raises(RuntimeError, match="is a forked child of a rank"):
                        call()
            engine.close()
            engine.wait_until_quiet()

        in_child(child)
        both_have_forked.wait()
        (pending or begin_all_reduce(engine, tensor)).wait()
        return float(tensor[0])

    assert run_engines(2, on_rank) == [2.0, 2.0]


@pytest.mark.parametrize("stays", [True, False])
def test_what_others_look_at_stays_when_its_rank_has_done_with_it(stays):
    mine, others = Segment(), Segment()
    piece = mine.allocate(64, is_permanent=stays)
    seen = others.see(mine.address, piece.offset, len(piece.memory))
    piece.tensor.fill_(7)
    assert seen.tensor[0] == 7
    del piece
    # Otherwise the memory is back with the system, and reads as zeros.
    assert seen.tensor[0] == (7 if stays else 0)


@pytest.mark.parametrize("request_", ["set", "wait", "multi_get"])
def test_a_rank_that_is_lost_while_shared_memory_is_set_up_is_a_communication_error(monkeypatch, request_):
    """hvdlite-run's store then fails every request, also one for values that are there."""

    class Store(dist.HashStore):
        pass

    def fail(*_: Any) -> None:
        raise dist.DistStoreError("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(Store, request_, fail)
    segment = open_segment()
    with pytest.raises(CommunicationError, match=r"another rank has ended|did not join.*rank 1 was killed by SIGKILL"):
        exchange_control_blocks(Store(), 0, 1, lambda: segment, InitTimeout(TIMEOUT), Signer(b"test"))
    segment.close()
