"""Litmus tests of what ranks count on between their processes: in which order one's writes are seen by another.

Each plays a pattern of the literature (message passing, store buffering) many times over, between two processes and
with more processes computing than there are cores, so that a rank is interrupted between any two steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvdlite.comm.gloo import InitTimeout
from hvdlite.shm.control_block import DONE, POSTED, fence
from hvdlite.shm.peers import Peers
from hvdlite.shm.setup import exchange_control_blocks, open_segment
from hvdlite.signing import Signer

TIMEOUT_S = 60.0


@pytest.fixture
def load() -> Iterator[None]:
    """Runs as many busy processes as this process may use cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def between_two_processes(directory: Path, play: Callable[[Peers], Any]) -> list[Any]:
    """Returns what ``play`` returns on rank 0, in this process, and on rank 1, in a child; JSON's types only."""
    said = directory / "said"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            said.write_text(json.dumps(_play_as(1, directory, play)))
            code = 0
        finally:
            os._exit(code)
    try:
        first = _play_as(0, directory, play)
    finally:
        _, status = os.waitpid(child, 0)
    assert status == 0
    return [first, json.loads(said.read_text())]


def _play_as(rank: int, directory: Path, play: Callable[[Peers], Any]) -> Any:
    store = dist.FileStore(str(directory / "store"), 2)
    context = exchange_control_blocks(
        store, rank, 2, open_segment, InitTimeout(timedelta(seconds=TIMEOUT_S)), Signer(b"test")
    )
    return play(context.peers)


def come_to(peers: Peers, counter: int, value: int) -> None:
    peers.wait_for(counter, value, time.monotonic() + TIMEOUT_S)


@pytest.mark.usefixtures("load")
def test_who_sees_a_counter_sees_what_was_written_before_it(tmp_path: Path) -> None:
    """Message passing: needs the fence before a counter is written, and on ARM the one after it is read."""

    def play(peers: Peers) -> int:
        stale = 0
        payloads = [control_block.payloads[0].view(torch.int64) for control_block in peers.control_blocks]
        for number in range(1, 3001):
            payloads[peers.rank].fill_(number)
            peers.advance(POSTED, number)
            come_to(peers, POSTED, number)
            stale += int((payloads[1 - peers.rank] != number).any())
            peers.advance(DONE, number)
            # Before the payload is overwritten.
            come_to(peers, DONE, number)
        return stale

    assert between_two_processes(tmp_path, play) == [0, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("load")
def test_of_two_ranks_that_write_at_once_and_then_look_at_least_one_sees_the_other(tmp_path: Path) -> None:
    """Store buffering: no sleeping rank may be overlooked. It needs a full fence, on x86 too."""

    def play(peers: Peers) -> list[int]:
        own, other = peers.own.words, peers.control_blocks[1 - peers.rank].words
        seen = []
        for number in range(1, 20_001):
            peers.advance(POSTED, number)
            come_to(peers, POSTED, number)
            own[DONE] = number
            fence()
            seen.append(other[DONE])
        return seen

    for number, seen in enumerate(zip(*between_two_processes(tmp_path, play), strict=True), start=1):
        assert max(seen) >= number
