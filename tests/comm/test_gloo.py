"""Gloo's process groups authenticate each of their connections, and accept none afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ports import lets_in, listening_ports
from ranks import attempt_threads

from hvdlite.comm import gloo, torch_engine
from hvdlite.comm.engine import RevokedError
from hvdlite.comm.gloo import ConnectingRanks, InitTimeout, make_gloo, open_proven, wait_for_all
from hvdlite.comm.gloo_sockets import Connections
from hvdlite.comm.torch_engine import TorchEngineFactory, TorchWork
from hvdlite.errors import CommunicationError
from hvdlite.signing import Signer

PATIENCE = timedelta(seconds=60)


def ranks_of(store: dist.Store, rank: int, size: int, key: bytes = b"key") -> ConnectingRanks:
    names = tuple(f"rank {each} (node{each})" for each in range(size))
    return ConnectingRanks(store, Signer(key), rank, names, InitTimeout(PATIENCE))


def open_group(store: dist.Store, ranks: ConnectingRanks, label: str = "x", discard=lambda group: None):
    def make(connections):
        return make_gloo(dist.PrefixStore(label, store), ranks.rank, ranks.size, PATIENCE, connections)

    return open_proven(make, discard, ranks, label)[0]


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
            # The other group is connected, and its listeners would be closed, before this rank of the late group comes.
            late_listens.wait(60)
        label, rank = ("early", place) if place < 2 else ("late", place - 2)
        group = open_group(stores[label], ranks_of(stores[label], rank, 2), label)
        if label == "early":
            late_listens.set()
        group.allreduce([torch.ones(1)]).wait()
        return group

    groups = attempt_threads(4, run)
    assert [group for group in groups if isinstance(group, BaseException)] == []
    assert not any(map(lets_in, listening_ports().keys() - before.keys()))


def test_a_group_that_the_program_opens_meanwhile_stays_as_it_is(on_loopback):
    programs_store, own_store = dist.HashStore(), dist.HashStore()
    before = listening_ports().keys()
    ports: list[int] = []
    programs: dict[int, dist.ProcessGroupGloo] = {}

    def open_programs(rank: int) -> None:
        programs[rank] = dist.ProcessGroupGloo(dist.PrefixStore("its", programs_store), rank, 2, PATIENCE)

    early = threading.Thread(target=open_programs, args=(0,), daemon=True)

    def open_own(rank: int) -> tuple[dist.ProcessGroupGloo, Connections]:
        def make(connections: Connections) -> dist.ProcessGroupGloo:
            if rank == 0:
                early.start()
                until_s = time.monotonic() + 60
                while not ports and time.monotonic() < until_s:
                    ports.extend(listening_ports().keys() - before)
                    time.sleep(0.01)
                own_store.set("the program's group listens", "")
            else:
                own_store.wait(["the program's group listens"], PATIENCE)
            return make_gloo(own_store, rank, 2, PATIENCE, connections)

        return open_proven(make, lambda group: None, ranks_of(own_store, rank, 2), "own")

    own = attempt_threads(2, open_own)
    (port,) = ports
    assert lets_in(port, 30)
    own_ports = listening_ports().keys() - before - {port}
    assert len(own_ports) == 2
    assert not any(map(lets_in, own_ports))
    # The other rank of the program's group comes only now, and hvdlite's group ends before that group is used.
    open_programs(1)
    early.join(60)
    for _, connections in own:
        assert connections.inodes
        connections.end_waits()
    assert attempt_threads(2, lambda rank: programs[rank].allreduce([torch.ones(1)]).wait()) == [True, True]


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
            assert f"rank {rank} (node{rank}): the connection to rank {stranger} " in str(outcome)
            assert "not signed with this job's key" in str(outcome)
    assert sorted(discarded) == [0, 1, 2]


def test_a_proof_of_another_group_does_not_count(on_loopback):
    store = dist.HashStore()

    def attempt(rank: int):
        def make(connections):
            return make_gloo(store, rank, 2, PATIENCE, connections)

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
    assert "the connection to rank 1 (node1) does not lead there" in str(outcome)
    assert "no data signed with this job's key arrived" in str(outcome)


def test_every_device_of_a_group_is_proven(monkeypatch):
    """A stranger may have got in where one of a host's interfaces listens."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    monkeypatch.setattr("hvdlite.comm.gloo._PROOF_S", 0.2)
    store = dist.HashStore()

    def attempt(rank: int):
        if rank == 0:
            return open_group(store, ranks_of(store, 0, 2))
        group = dist.ProcessGroupGloo(dist.PrefixStore("x", store), 1, 2, PATIENCE)
        # It knows what the first device is asked for, and stands for a rank there alone.
        gloo._prove(group, ranks_of(store, 1, 2), "x/0")
        return group

    outcome, _half_a_rank = attempt_threads(2, attempt)
    assert "the connection to rank 1 (node1) does not lead there: no data signed" in str(outcome)


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

    def make(_connections):
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


def open_with_connections(store: dist.Store, rank: int, timeout: timedelta = PATIENCE):
    def make(_connections):
        return dist.ProcessGroupGloo(dist.PrefixStore("x", store), rank, 2, timeout)

    return open_proven(make, lambda group: None, ranks_of(store, rank, 2), "x")


def in_a_job_of_two_processes(program: str, timeout: timedelta = PATIENCE) -> list[subprocess.CompletedProcess[str]]:
    """Runs ``program`` in two processes, with ``store``, ``rank``, ``group`` and ``connections`` defined.

    ``timeout`` is that of the group's operations.
    """
    prelude = """
import os, sys, time, torch, torch.distributed as dist
sys.path[:0] = {tests!r}
from datetime import timedelta
from test_gloo import open_with_connections
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
PATIENCE_S = 60
group, connections = open_with_connections(store, rank, timedelta(seconds={timeout_s}))
"""
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
        command = [sys.executable, "-c", prelude.format(tests=paths, timeout_s=timeout.total_seconds()) + program]
        processes = [
            subprocess.Popen([*command, str(rank), f"{directory}/store"], stdout=-1, stderr=-1, text=True)
            for rank in range(2)
        ]
        ended = [process.communicate(timeout=200) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(processes, ended, strict=True)
    ]


@pytest.mark.slow
def test_what_is_under_way_ends_with_an_error_once_its_connections_are_cut(on_loopback):
    program = """
if rank == 0:
    work = group.allreduce([torch.ones(4)])
    connections.end_waits()
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


# Rank 0 has given up a message before rank 1 sends it, so gloo reads nothing more from the connection between them:
# there is no buffer for the data. Then an operation of rank 0 waits for that connection.
BLOCKED = """
if rank == 0:
    given_up = group.recv([torch.empty(1000)], 1, 7)
    del given_up
    store.set("given up", "")
    store.wait(["sent"])
    work = group.allreduce([torch.ones(4)])
else:
    store.wait(["given up"])
    group.send([torch.ones(1000)], 0, 7).wait()
    store.set("sent", "")
"""


@pytest.mark.night
@pytest.mark.slow
def test_an_operation_on_a_connection_that_gloo_has_stopped_reading_ends_once_it_is_cut(on_loopback):
    program = f"""{BLOCKED}
if rank == 0:
    connections.end_waits()
    try:
        work.wait(timedelta(seconds=PATIENCE_S / 2))
    except RuntimeError as error:
        print("still in progress" if "Operation timed out" in str(error) else "ended")
    store.set("over", "")
else:
    store.wait(["over"])
"""
    first, second = in_a_job_of_two_processes(program)
    assert (first.returncode, first.stdout, second.returncode) == (0, "ended\n", 0), first.stderr + second.stderr


@pytest.mark.slow
def test_a_program_with_such_a_connection_ends_without_waiting_for_the_timeout(on_loopback):
    """The timeout of the group's operations is far beyond the test's own patience."""
    program = f"""{BLOCKED}
if rank == 0:
    connections.end_waits()
    store.set("over", "")
    del work, group
    print("ended")
else:
    store.wait(["over"])
"""
    first, second = in_a_job_of_two_processes(program, timedelta(hours=1))
    assert (first.returncode, first.stdout, second.returncode) == (0, "ended\n", 0), first.stderr + second.stderr


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize("operation", ["a broadcast", "an all-to-all"])
def test_a_program_ends_though_gloo_never_ends_an_operation_that_was_sent_in_part(on_loopback, operation):
    """Rank 1 reads nothing, so rank 0 cannot send all: gloo forgets such a message when the connection closes."""
    begin = {
        "a broadcast": "engine.broadcast([torch.ones(1 << 24)], options)",
        "an all-to-all": "engine.alltoall_base(torch.empty(1 << 25), torch.ones(1 << 25), [1 << 24] * 2, [1 << 24] * 2,"
        " AllToAllOptions())",
    }[operation]
    program = """
from hvdlite.comm.torch_engine import TorchEngine
from torch._C._distributed_c10d import AllToAllOptions
import array, fcntl, termios

def unsent_bytes():
    sockets = [each for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")]
    own = [int(each) for each in sockets if os.stat(f"/proc/self/fd/{each}").st_ino in connections.inodes]
    count = array.array("i", [0])
    return max((fcntl.ioctl(each, termios.TIOCOUTQ, count), count[0])[1] for each in own)

options = dist.BroadcastOptions()
options.rootRank, options.rootTensor = 0, 0
engine = TorchEngine(group, cut=connections.end_waits)
if rank == 1:
    given_up = group.recv([torch.empty(1000)], 0, 7)
    del given_up
    store.set("given up", "")
    store.wait(["sent"])
    work = BEGIN
    store.wait(["over"])
    print("ended", flush=True)
    # With an operation in progress: only the end of the other rank is looked at.
    os._exit(0)
else:
    store.wait(["given up"])
    group.send([torch.ones(1000)], 1, 7).wait()
    store.set("sent", "")
    work = BEGIN
    while unsent_bytes() == 0:
        time.sleep(0.01)
    engine.revoke("a rank was lost")
    engine.quiesce("a rank was lost")
    try:
        work.wait()
    except RuntimeError as error:
        print(error)
    is_blocked = not work.has_ended
    engine.close()
    del group, engine
    print("ended, blocked:", is_blocked, file=sys.stderr)
    store.set("over", "")
""".replace("BEGIN", begin)
    first, second = in_a_job_of_two_processes(program, timedelta(hours=1))
    outcome = first.returncode, first.stdout, second.returncode, second.stdout
    assert outcome == (0, "a rank was lost\n", 0, "ended\n"), first.stderr + second.stderr


@pytest.mark.parametrize("numel", [4, 100_000])
def test_a_revoked_engine_is_quiet_at_once_though_gloo_has_stopped_reading_a_connection(
    on_loopback, monkeypatch, numel
):
    # Less than PATIENCE, and more than gloo's thread may need on a busy machine.
    monkeypatch.setattr(torch_engine, "_ENDING_S", 20.0)
    store = dist.HashStore()
    given_up, sent = threading.Event(), threading.Event()

    def run(rank: int) -> bool:
        factory = TorchEngineFactory("gloo", ranks_of(store, rank, 2))
        engine = factory.open()
        group = engine.process_group
        is_quiet = False
        if rank == 0:
            group.recv([torch.empty(1000)], 1, 7)
            given_up.set()
            assert sent.wait(60)
            work = engine.allreduce([torch.ones(numel)], dist.AllreduceOptions())
            operation = work if isinstance(work, TorchWork) else work._sent
            engine.revoke("a rank was lost")
            with pytest.raises(RevokedError, match="a rank was lost"):
                work.wait()
            engine.quiesce("a rank was lost")
            is_quiet = operation.has_ended
        else:
            assert given_up.wait(60)
            group.send([torch.ones(1000)], 0, 7).wait()
            sent.set()
        engine.close()
        return is_quiet

    assert attempt_threads(2, run) == [True, False]


@pytest.mark.slow
def test_a_forked_child_cuts_no_connection_of_its_parent(on_loopback):
    program = """
child = os.fork()
if child == 0:
    connections.end_waits()
    os._exit(0)
os.waitpid(child, 0)
total = torch.ones(1)
group.allreduce([total]).wait()
print(total.item())
"""
    first, second = in_a_job_of_two_processes(program)
    assert (first.stdout, second.stdout) == ("2.0\n", "2.0\n"), first.stderr + second.stderr


def test_groups_that_are_gone_leave_no_file_open(on_loopback):
    def open_one() -> None:
        store = dist.HashStore()
        attempt_threads(2, lambda rank: open_group(store, ranks_of(store, rank, 2)) and None)

    def count() -> int:
        # Without what earlier tests of this process have left.
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    open_one()
    before = count()
    for _ in range(3):
        open_one()
    until_s = time.monotonic() + 60
    while (now := count()) > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert now <= before


def test_ranks_that_do_not_come_to_connect_are_named():
    names = ("rank 0 (a)", "rank 1 (b)", "rank 2 (c)")
    store = dist.HashStore()
    store.set("x/here/1", "1")
    ranks = ConnectingRanks(store, Signer(b"key"), 0, names, AtOnce(PATIENCE))
    with pytest.raises(CommunicationError, match=r"Missing: rank 2 \(c\)"):
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


def test_a_rank_that_is_lost_while_gloo_connects_is_a_communication_error(monkeypatch):
    def make(store: dist.Store, *_) -> None:
        # Its store does so once a rank is lost; a connection that ends raises a RuntimeError, too.
        raise dist.DistStoreError("get of 0/1: rank 1 was killed by SIGKILL")

    monkeypatch.setattr(torch_engine, "make_gloo", make)
    factory = TorchEngineFactory("gloo", ranks_of(dist.HashStore(), 0, 1))
    with pytest.raises(
        CommunicationError, match=r"^rank 0 \(node0\) could not connect .* rank 1 was killed by SIGKILL"
    ):
        factory.open()
