"""Memory that is kept from one generation to the next: when it is used again, and when everything begins anew."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shm.engines import begin_all_reduce, run_engines, until

from hvdlite.shm import segment as segment_module
from hvdlite.shm.segment import KeptMemory, KeptSegment, NoMemoryError
from hvdlite.shm.shm_engine import ShmEngine

BYTES = 3 * 4096
ME = os.getpid()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each mapping that is made."""
    lengths: list[int] = []
    usual = segment_module._map

    def counted(fd: int, offset: int, length: int, **more: Any) -> Any:
        lengths.append(length)
        return usual(fd, offset, length, **more)

    monkeypatch.setattr(segment_module, "_map", counted)
    return lengths


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that could be another rank of this host."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def other_with_threads() -> Iterator[subprocess.Popen[bytes]]:
    """One whose first thread is exiting, and the other goes on."""
    program = """
import ctypes, platform, threading
main = threading.main_thread().native_id
def goes_on():
    while int(open(f"/proc/self/task/{main}/stat").read().rpartition(")")[2].split()[6]) & 4 == 0:
        pass
    print("alone", flush=True)
    threading.Event().wait()
threading.Thread(target=goes_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"alone\n"
    yield process
    process.kill()
    process.communicate()


class NothingIsReadable:
    def register(self, *arguments: Any) -> None:
        pass

    def poll(self, timeout: int) -> list[Any]:
        return []


def test_what_another_rank_has_is_mapped_once_for_all_generations(mapped: list[int]) -> None:
    mine, theirs = KeptSegment(), KeptSegment()
    piece = theirs.allocate(BYTES)
    seen = mine.see(theirs.address, piece.offset, BYTES)
    mapped.clear()
    for _ in range(3):
        mine.begin(lambda _: False)
        assert mine.see(theirs.address, piece.offset, BYTES) is seen
    assert mapped == []


def test_mappings_that_no_engine_has_asked_for_in_a_whole_generation_are_dropped(mapped: list[int]) -> None:
    mine, theirs = KeptSegment(), KeptSegment()
    piece = theirs.allocate(BYTES)
    mine.see(theirs.address, piece.offset, BYTES)
    mine.begin(lambda _: False)
    mine.begin(lambda _: False)
    mapped.clear()
    mine.see(theirs.address, piece.offset, BYTES)
    assert mapped == [BYTES]


def test_files_and_mappings_of_a_process_that_is_gone_are_dropped() -> None:
    mine, theirs = KeptSegment(), KeptSegment()
    piece = theirs.allocate(BYTES)
    mine.see(theirs.address, piece.offset, BYTES)
    mine.begin(lambda pid: pid == theirs.address.pid)
    assert mine._seen_before == {}
    assert list(mine._fds) == [mine.address]


def test_slots_are_the_same_memory_in_each_generation() -> None:
    segment = KeptSegment()
    first = [segment.take_slots(BYTES) for _ in range(9)]
    assert first[8] is None
    segment.begin(lambda _: False)
    assert [segment.take_slots(BYTES) for _ in range(9)] == first


def test_slots_are_there_again_when_there_was_no_memory_for_those_of_an_engine_before(monkeypatch) -> None:
    segment, allocate = KeptSegment(), KeptSegment.allocate

    def fail(*_: object, **__: object) -> None:
        raise NoMemoryError("no space left on device")

    monkeypatch.setattr(KeptSegment, "allocate", fail)
    with pytest.raises(NoMemoryError):
        segment.take_slots(BYTES)
    monkeypatch.setattr(KeptSegment, "allocate", allocate)
    taken = [segment.take_slots(BYTES) for _ in range(7)]
    assert len({piece.offset for piece in taken}) == 7


def test_the_memory_stays_when_a_rank_is_lost(other: subprocess.Popen[bytes]) -> None:
    memory = KeptMemory()
    memory.begin([ME, other.pid])
    segment = memory.segment()
    other.kill()
    other.wait()
    memory.begin([ME])
    assert memory.segment() is segment


def test_the_memory_stays_when_a_killed_rank_has_not_ended_and_all_its_threads_are_exiting(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the kernel takes back the memory of a large process."""
    memory = KeptMemory()
    memory.begin([ME, other.pid])
    segment = memory.segment()
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(select, "poll", NothingIsReadable)
    memory.begin([ME])
    assert memory.segment() is segment


def test_everything_begins_anew_while_one_thread_of_a_former_rank_goes_on(
    other_with_threads: subprocess.Popen[bytes],
) -> None:
    """Its first thread has ended by itself."""
    memory = KeptMemory()
    memory.begin([ME, other_with_threads.pid])
    segment = memory.segment()
    memory.begin([ME])
    assert memory.segment() is not segment


def test_everything_begins_anew_while_a_former_rank_may_still_write(other: subprocess.Popen[bytes]) -> None:
    """One that hvdlite-run has given up, and that has not ended yet."""
    memory = KeptMemory()
    memory.begin([ME, other.pid])
    segment = memory.segment()
    bucket = segment.allocate(BYTES).tensor
    memory.begin([ME])
    assert memory.segment() is not segment
    assert memory.segment().find(bucket) is None
    again = memory.segment()
    memory.begin([ME])
    assert memory.segment() is again


def test_a_rank_is_quiet_only_once_no_thread_carries_out_an_operation() -> None:
    is_over = threading.Event()

    def on_rank(engine: ShmEngine) -> None:
        if engine.rank == 1:
            assert is_over.wait(60)  # so that the other's operation does not end by itself
            return
        memory, is_inside, may_go_on, is_quiet = KeptMemory(), threading.Event(), threading.Event(), threading.Event()
        usual = engine._queue._peers.wait_for

        def wait_for(*arguments: Any, **more: Any) -> None:
            is_inside.set()
            assert may_go_on.wait(60)
            usual(*arguments, **more)

        engine._queue._peers.wait_for = wait_for  # type: ignore[method-assign]
        work = begin_all_reduce(engine, torch.ones(4))
        carrying = threading.Thread(target=lambda: engine._queue.carry_on(work))
        carrying.start()
        assert is_inside.wait(60)
        engine.close()
        memory.add_closed(engine.wait_until_quiet)
        waiting = threading.Thread(target=lambda: (memory.wait_until_quiet(), is_quiet.set()))
        waiting.start()
        assert not is_quiet.wait(0.05)
        may_go_on.set()
        until(is_quiet.is_set)
        carrying.join()
        assert work.is_done
        is_over.set()

    run_engines(2, on_rank)
