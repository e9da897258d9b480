"""Process groups of gloo prove each of their connections, and let nobody in afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import attempt_threads

from hvdlite.comm.gloo import ConnectingRanks, InitTimeout, open_proven, wait_for_all
from hvdlite.errors import CommunicationError
from hvdlite.signing import Signer

PATIENCE = timedelta(seconds=20)


def ranks_of(store: dist.Store, rank: int, size: int, key: bytes = b"key") -> ConnectingRanks:
    names = tuple(f"rank {each} (node{each})" for each in range(size))
    return ConnectingRanks(store, Signer(key), rank, names, InitTimeout(PATIENCE))


def open_group(store: dist.Store, ranks: ConnectingRanks, label: str = "x", discard=lambda group: None):
    def make():
        return dist.ProcessGroupGloo(dist.PrefixStore(label, store), ranks.rank, ranks.size, PATIENCE)

    return open_proven(make, discard, ranks, label)[0]


def listening_ports() -> dict[int, str]:
    """The TCP ports on which this process listens, with the addresses."""
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = [*line.split()[:4], line.split()[9]]
        if state == "0A" and f"socket:[{inode}]" in own:
            address, _, port = local.partition(":")
            found[int(port, 16)] = socket.inet_ntoa(bytes.fromhex(address)[::-1])
    return found


def lets_in(port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.5)
        return stranger.connect_ex(("127.0.0.1", port)) == 0


class AtOnce(InitTimeout):
    def left(self) -> timedelta:
        return timedelta(seconds=0.05)


@pytest.fixture
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_group_whose_ranks_have_the_key_works(size, on_loopback):
    store = dist.HashStore()

    def total(rank: int) -> float:
        ranks = ranks_of(store, rank, size)
        wait_for_all(ranks, "x")
        ones = torch.ones(3)
        open_group(store, ranks).allreduce([ones]).wait()
        return float(ones.sum())

    assert attempt_threads(size, total) == [3.0 * size] * size


def test_nobody_gets_in_once_the_group_is_connected(on_loopback):
    before = listening_ports()
    store = dist.HashStore()
    groups = attempt_threads(2, lambda rank: open_group(store, ranks_of(store, rank, 2)))
    new = listening_ports().keys() - before.keys()
    assert len(new) == 2, "gloo listens, or this test looks in the wrong place"
    assert not any(map(lets_in, new))
    attempt_threads(2, lambda rank: groups[rank].allreduce([torch.ones(1)]).wait())


def test_a_listener_stays_open_while_another_group_of_the_process_connects(on_loopback):
    before = listening_ports()
    stores = {"early": dist.HashStore(), "late": dist.HashStore()}
    late_listens = threading.Event()

    def run(place: int):
        if place == 3:
            # The other group is done, and its doors would be closed, before this rank of the late one comes.
            late_listens.wait(20)
        label, rank = ("early", place) if place < 2 else ("late", place - 2)
        group = open_group(stores[label], ranks_of(stores[label], rank, 2), label)
        if label == "early":
            late_listens.set()
        group.allreduce([torch.ones(1)]).wait()
        return group

    groups = attempt_threads(4, run)
    assert [group for group in groups if isinstance(group, BaseException)] == []
    assert not any(map(lets_in, listening_ports().keys() - before.keys()))


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_a_rank_without_the_key_is_named_on_all_others(stranger, on_loopback):
    store = dist.HashStore()
    discarded = []

    def attempt(rank: int):
        key = b"guessed" if rank == stranger else b"key"
        return open_group(store, ranks_of(store, rank, 3, key), discard=lambda group: discarded.append(rank))

    for rank, outcome in enumerate(attempt_threads(3, attempt)):
        assert isinstance(outcome, CommunicationError)
        if rank != stranger:
            assert f"rank {rank} (node{rank}) has a connection in the place of rank {stranger} " in str(outcome)
            assert "not signed with this job's key" in str(outcome)
    assert sorted(discarded) == [0, 1, 2]


def test_a_proof_of_another_group_does_not_count(on_loopback):
    store = dist.HashStore()

    def attempt(rank: int):
        def make():
            return dist.ProcessGroupGloo(store, rank, 2, PATIENCE)

        return open_proven(make, lambda group: None, ranks_of(store, rank, 2), "this" if rank else "that")

    assert all(isinstance(outcome, CommunicationError) for outcome in attempt_threads(2, attempt))


def test_one_who_connects_and_says_nothing_is_an_error_before_long(on_loopback, monkeypatch):
    monkeypatch.setattr("hvdlite.comm.gloo._PROOF_S", 0.2)
    store = dist.HashStore()

    def attempt(rank: int):
        if rank == 1:
            return dist.ProcessGroupGloo(dist.PrefixStore("x", store), 1, 2, PATIENCE)
        return open_group(store, ranks_of(store, 0, 2))

    outcome, _silent = attempt_threads(2, attempt)
    assert isinstance(outcome, CommunicationError)
    assert "in the place of rank 1 (node1)" in str(outcome)
    assert "nothing came" in str(outcome)


def test_files_are_limited_as_before_once_all_are_connected(on_loopback):
    import resource  # noqa: PLC0415

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = dist.HashStore()
    attempt_threads(2, lambda rank: open_group(store, ranks_of(store, rank, 2)))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_where_strangers_keep_files_open_there_is_room_for_more(on_loopback):
    import resource  # noqa: PLC0415

    def used() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = dist.HashStore()
    ranks = ranks_of(store, 0, 1)
    of_strangers: list[int] = []

    def make():
        of_strangers.extend(os.dup(0) for _ in range(600))
        return dist.ProcessGroupGloo(store, 0, 1, PATIENCE)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used() + 400, before[1]))
        open_proven(make, lambda group: None, ranks, "x")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= used() + 100
    finally:
        for each in of_strangers:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_with_connections(store: dist.Store, rank: int):
    def make():
        return dist.ProcessGroupGloo(dist.PrefixStore("x", store), rank, 2, PATIENCE)

    return open_proven(make, lambda group: None, ranks_of(store, rank, 2), "x")


def in_a_job_of_two_processes(program: str) -> list[subprocess.CompletedProcess[str]]:
    """``program`` in two processes of their own, with ``store``, ``rank``, ``group`` and ``connections``."""
    prelude = """
import os, sys, time, torch, torch.distributed as dist
sys.path[:0] = {tests!r}
from datetime import timedelta
from test_gloo import open_with_connections
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
group, connections = open_with_connections(store, rank)
"""
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
        command = [sys.executable, "-c", prelude.format(tests=paths) + program]
        processes = [
            subprocess.Popen([*command, str(rank), f"{directory}/store"], stdout=-1, stderr=-1, text=True)
            for rank in range(2)
        ]
        ended = [process.communicate(timeout=60) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(processes, ended, strict=True)
    ]


@pytest.mark.slow
def test_what_is_under_way_ends_with_an_error_once_its_connections_are_cut(on_loopback):
    program = """
if rank == 0:
    work = group.allreduce([torch.ones(4)])
    connections.cut()
    try:
        work.wait()
    except RuntimeError:
        print("ended")
    store.set("over", "")
else:
    store.wait(["over"])
"""
    first, second = in_a_job_of_two_processes(program)
    assert (first.returncode, first.stdout, second.returncode) == (0, "ended\n", 0), first.stderr + second.stderr


@pytest.mark.slow
def test_a_forked_child_cuts_no_connection_of_its_parent(on_loopback):
    program = """
child = os.fork()
if child == 0:
    connections.cut()
    os._exit(0)
os.waitpid(child, 0)
total = torch.ones(1)
group.allreduce([total]).wait()
print(total.item())
"""
    first, second = in_a_job_of_two_processes(program)
    assert (first.stdout, second.stdout) == ("2.0\n", "2.0\n"), first.stderr + second.stderr


def test_groups_that_are_gone_leave_no_file_open(on_loopback):
    def open_one() -> int:
        store = dist.HashStore()
        attempt_threads(2, lambda rank: open_group(store, ranks_of(store, rank, 2)) and None)
        return len(os.listdir("/proc/self/fd"))

    assert open_one() == open_one() == open_one()


def test_ranks_that_do_not_come_to_connect_are_named():
    names = ("rank 0 (a)", "rank 1 (b)", "rank 2 (c)")
    store = dist.HashStore()
    store.set("x/here/1", "1")
    ranks = ConnectingRanks(store, Signer(b"key"), 0, names, AtOnce(PATIENCE))
    with pytest.raises(CommunicationError, match=r"not all have come: rank 2 \(c\)"):
        wait_for_all(ranks, "x")


def test_all_waits_of_init_have_one_time_together_and_later_ones_each_their_own():
    now_s = [100.0]
    init_timeout = InitTimeout(timedelta(seconds=30), clock=lambda: now_s[0])
    assert init_timeout.left() == timedelta(seconds=30)
    now_s[0] += 20
    assert init_timeout.left() == timedelta(seconds=10)
    now_s[0] += 20
    assert init_timeout.left() == timedelta(seconds=1)
    init_timeout.end_of_init()
    assert init_timeout.left() == timedelta(seconds=30)
