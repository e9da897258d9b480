"""Strangers at a job's listening sockets: a user of the same machine who has no rights, and a third machine.

They know no secret. They may keep a job from starting, which then says that somebody who is none of its ranks was
there; they may not make it run anything, nor compute anything wrong, nor wait for ever. A few attacks are chosen by
seed; TEST_HVDLITE_LONG=1 has all of them.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e import forger as forger_module
from e2e import listeners
from e2e.conftest import Launch, wait_until
from e2e.forger import INTRODUCTIONS, SHARED_MEMORY
from e2e.intruder import ATTACKS, Intruder
from e2e.listeners import CLOSED_AT_ONCE, Listener, Recorder, Watcher
from e2e.machines import Machine
from e2e.ssh_hosts import Host, Lan
from long_run import IS_LONG

pytestmark = pytest.mark.slow

NOBODY = 65534
LIMIT_S = 240  # the limit for a whole job
MORE_MEMORY_BYTES = 200 << 20
TRAINING_BYTES = 200 << 20

# Ranks named in the second argument wait for a file before they do what the third names: "exchange_rank_info";
# "exchange_control_blocks" in shared memory; "_reach" for rank 0's port; or "connect" by gloo, after as many such
# groups as it says; or "listening", right after the first such group. All wait before they train, and before they end.
# What is computed is checked.
TRAIN = """
import os, resource, sys, time, torch, torch.distributed.distributed_c10d as c10d
import hvdlite as hvd
from hvdlite.runtime import make_world
from hvdlite.control import control_client
from hvdlite.shm import setup
gate, held, (held_at, _, earlier) = sys.argv[1], sys.argv[2].split(","), sys.argv[3].partition(" ")
rank, connected = int(os.environ["RANK"]), 0
with open(os.path.join(gate, f"memory.{rank}"), "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))

def wait_for(name):
    print("at " + name, flush=True)
    while not os.path.exists(os.path.join(gate, name)): time.sleep(0.01)

def hold(module, name):
    true = getattr(module, name)
    def hold_and_do(*arguments):
        if held_at == name and str(rank) in held: wait_for(name)
        try:
            return true(*arguments)
        finally:
            print("after " + name, flush=True)
    setattr(module, name, hold_and_do)

class Held(c10d.ProcessGroupGloo):
    def __init__(self, *arguments, **named):
        global connected
        if held_at == "connect" and connected == int(earlier) and str(rank) in held: wait_for("connect")
        connected += 1
        super().__init__(*arguments, **named)
        if held_at == "listening" and connected == 1 and str(rank) in held: wait_for("listening")

c10d.ProcessGroupGloo = torch.distributed.ProcessGroupGloo = Held
hold(make_world, "exchange_rank_info")
hold(setup, "exchange_control_blocks")
hold(control_client, "_reach")
torch.set_num_threads(1)
torch.manual_seed(rank)
hvd.init(timeout_s=150)
wait_for("train")
model = torch.nn.Linear(4, 2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(rank))).square().mean().backward()
    optimizer.step()
assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).item() == sum(range(hvd.size()))
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
assert hvd.allgather_object((bits, hvd.rank())) == [(bits, other) for other in range(hvd.size())]
wait_for("end")
print("right", flush=True)
"""

# gloo ends a process that is sent data for a buffer that is not there, by a thread of its own, before anything that has
# come could be checked: the one way in which strangers kill a rank, in the moment in which it connects.
GLOO_ABORTS_AT = ("place-data", "place-replay")

# The words of the message that a connection came from no rank of the job.
STRANGER_TOLD = re.compile(
    r"the connection to (host of )?rank \d.* does not lead there"
    r"|not signed with this job's key"
    r"|refused a connection that is not from a rank of this job"
)


OnNew = Callable[["Job", Listener], None]


@dataclass
class Job:
    """A job that runs `TRAIN` on machines of its own, with intruders at every socket that listens."""

    lan: Lan
    hosts: int
    launch: Launch
    gate: Path
    watcher: Watcher
    intruders: list[Intruder]

    @property
    def marker(self) -> Path:
        return self.gate / "MARKER"

    def open(self, *names: str) -> None:
        for name in names:
            (self.gate / name).touch()

    def all_come_to(self, gate: str, size: int) -> bool:
        """Whether this many ranks wait there, now or later; False if the job ends before."""
        assert self.launch.process.stdout is not None
        said: set[bytes] = set()
        while len(said) < size:
            line = self.launch.process.stdout.readline()
            if not line:
                return False
            said |= {line} if line.endswith(b">:at %b\n" % gate.encode()) else set()
        return True

    def let_the_held_come(self, held_at: str = "connect", size: int = 1) -> None:
        """Lets the waiting ranks go on, once everything for rank 0 is sent or the job has ended."""
        if self.all_come_to(held_at, size):
            wait_until(lambda: self.launch.process.poll() is not None or self._is_attacked())
        if self.hosts == 1:
            _choose_ports(self.lan, 0x80)
        self.open(held_at, "train", "end")

    def _is_attacked(self) -> bool:
        """Whether rank 0's newest socket has accepted an intruder that has sent everything."""
        ports = [each for each in self.watcher.recorded if each.owner == "rank 0" and is_open_to_strangers(each)]
        return bool(ports) and all(
            each.has_begun() and each.let_in.get((ports[-1].address, ports[-1].port), 0) > 0 for each in self.intruders
        )

    def close_intruders(self) -> None:
        for intruder in self.intruders:
            intruder.close()

    def wait_until_attacked(self) -> None:
        wait_until(lambda: all(each.orders and each.has_begun() for each in self.intruders))


@pytest.fixture
def start(launch, make_lan, tmp_path) -> Iterator[Callable[..., Job]]:
    """``start(hosts, held, held_at)``: a job with two ranks on each host, and `Intruder`\\ s on ``where``."""
    jobs: list[Job] = []
    program = tmp_path / "train.py"
    program.write_text(TRAIN)

    def begin(
        hosts: int,
        held: str = "",
        held_at: str = "",
        *,
        at: str = "user",
        on_new: OnNew = lambda *_: None,
        uid: int = NOBODY,
        shell: str = "",
    ) -> Job:
        gate = tmp_path / f"gate{len(jobs)}"
        gate.mkdir()
        lan = make_lan("a", "b")
        # Between two ranks, gloo lets the one with the lower address listen; then the port counts, its last byte first.
        if hosts == 1:
            _choose_ports(lan, 0x10)
        job: Job
        watcher = Watcher(lan.machines, lambda listener: on_new(job, listener))
        where = lan.hosts[0] if at == "user" else lan.desk
        intruders = [Intruder(_network_of(where), uid)]
        words = [sys.executable, str(program), str(gate), held, held_at]
        if shell:
            words = ["sh", "-c", f'{shell}; exec "$@"', "sh", *words]
        size = 2 * hosts
        names = "a:2" if hosts == 1 else "a:2,b:2"
        on = lan.hosts[0] if hosts == 1 else lan.desk
        job = Job(lan, hosts, None, gate, watcher, intruders)  # type: ignore[arg-type]  # it is there before anybody listens
        jobs.append(job)
        watcher.__enter__()
        job.launch = launch("-np", str(size), "--start-timeout", "150", "-H", names, *words, on=on)
        return job

    yield begin
    for job in jobs:
        job.watcher.__exit__()
        job.close_intruders()


def _network_of(machine: Machine) -> list[str]:
    return ["nsenter", f"--target={machine.init_pid}", "--net", "--"]


def _choose_ports(lan: Lan, low_byte: int) -> None:
    """Makes the system on host a choose only ports whose numbers end so, from now on."""
    first = 0xA000 + low_byte
    set_range = f"echo {first} {first + 63} >/proc/sys/net/ipv4/ip_local_port_range"
    subprocess.run([*_network_of(lan.hosts[0]), "sh", "-ec", set_range], check=True)


def is_open_to_strangers(listener: Listener) -> bool:
    return listener.is_of_rank and listener.family.startswith("tcp")


def has_file(listener: Listener) -> bool:
    return listener.family == "unix" and not listener.address.startswith("@")


def attack_with(*names: str, of: Callable[[Listener], bool] = is_open_to_strangers, **more: object) -> OnNew:
    """Makes all of these attacks on each socket as soon as it listens."""

    def on_new(job: Job, listener: Listener) -> None:
        if of(listener):
            for name in names:
                attack(job, listener, name, **more)

    return on_new


def attack(job: Job, listener: Listener, name: str, **more: object) -> None:
    for intruder in job.intruders:
        at = listener.family, listener.address, listener.port
        intruder.attack(name, *at, marker=str(job.marker), hold_s=90, **more)


def let_in(job: Job) -> int:
    """Returns how many connections of the intruders that have ended were accepted."""
    return sum(result["connected"] for intruder in job.intruders for result in intruder.results)


def assert_withstood(job: Job, size: int, *, but_gloo_may_abort: bool = False) -> str:
    """Asserts that the job ends in time, well or with a word of the intruder, and ran nothing of it; its stderr."""
    code, out, err = job.launch.ended(LIMIT_S)
    text = err.decode(errors="replace")
    job.close_intruders()
    assert not job.marker.exists(), f"a stranger's command was run: {text}"
    aborted = "killed by SIGABRT" in text and "gloo::EnforceNotMet" in text
    assert "killed by SIG" not in text or (aborted and but_gloo_may_abort), text
    # The memory of PyTorch when it is imported differs by build; training takes about as much as without CUDA.
    imported = max((int(file.read_text()) << 10 for file in job.gate.glob("memory.*")), default=0)
    assert max(job.watcher.peak_bytes.values(), default=0) < imported + TRAINING_BYTES + MORE_MEMORY_BYTES
    if code == 0:
        assert out.count(b":right\n") == size, out
    elif not aborted:
        assert STRANGER_TOLD.search(text), text
    job.launch.assert_gone() if size == 2 else wait_until(lambda: not job.lan.left())
    return text


@dataclass(frozen=True)
class Trial:
    """``attack`` on the sockets of a job over this many ``hosts``, by a ``user`` there or from another ``machine``.

    Meanwhile all ranks but those of the first host, or but rank 0, are ``held_at`` some point.
    """

    attack: str
    hosts: int
    at: str
    held_at: str

    def __str__(self) -> str:
        return f"{self.attack}, {self.hosts} hosts, {self.at}, {self.held_at}"

    @property
    def held(self) -> str:
        return "1" if self.hosts == 1 else "1,2,3" if self.held_at == "_reach" else "2,3"


def _all_trials() -> list[Trial]:
    trials = []
    for attack in ATTACKS:
        # On one host gloo connects once, for what shared memory does not carry; over several hosts, several times.
        trials.append(Trial(attack, 1, "user", "connect 0"))
        trials.append(Trial(attack, 2, "machine", "connect 0"))
        trials.append(Trial(attack, 2, "user", "connect 2"))
        trials.append(Trial(attack, 2, "machine", "_reach"))
    return trials


def _chosen_trials() -> list[Trial]:
    if IS_LONG:
        return _all_trials()
    # Another seed chooses others; these take little time.
    dice = random.Random(4117)
    hows = [(1, "user", "connect 0"), (2, "user", "connect 2"), (2, "machine", "_reach")]
    return [Trial(dice.choice(ATTACKS), *how) for how in hows]


# ------------------------------------------------------------- who listens


@pytest.mark.new_processes("copies have for a moment the sockets of the process that they are forked from")
@pytest.mark.night(but=1)
@pytest.mark.parametrize("hosts", [1, 2])
def test_nobody_listens_but_where_the_table_says(start, hosts):
    """All that has ever listened: whose socket, and for whom; and that no stranger gets in once `hvd.init` is over."""
    size = 2 * hosts
    ranks = [str(rank) for rank in range(size)]
    job = start(hosts, ",".join(ranks), "listening")
    # The sockets by which ranks connect stay open until they have been seen.
    assert job.all_come_to("listening", size), job.launch.ended()
    wait_until(lambda: {f"rank {rank}" for rank in ranks} <= {listener.owner for listener in job.watcher.recorded})
    job.open("listening")
    for gate in ("train", "end"):
        assert job.all_come_to(gate, size), job.launch.ended()
        for listener in filter(is_open_to_strangers, job.watcher.now()):
            attack(job, listener, "knock")
        wait_until(lambda: all(each.has_begun() for each in job.intruders))
        job.open(gate)
    assert_withstood(job, size)
    assert let_in(job) == 0, "a rank takes connections after hvd.init()"
    assert [listener for listener in job.watcher.recorded if not _is_allowed(listener, job, hosts)] == []


@pytest.mark.night
def test_a_listener_that_closed_before_its_owner_was_found_is_judged_by_its_address():
    job = SimpleNamespace(lan=SimpleNamespace(hosts=[SimpleNamespace(name="a", address="10.77.0.2")]))

    def allowed(family: str, address: str, owner: str = CLOSED_AT_ONCE) -> bool:
        return _is_allowed(Listener("a", family, address, 40000, 1, 0, owner), job, 2)

    assert allowed("tcp", "10.77.0.2")
    assert allowed("unix", "/tmp/hvdlite-12ab-0/34cd")
    assert not allowed("tcp", "0.0.0.0")
    assert not allowed("unix", "/tmp/34cd")
    assert allowed("unix", "/tmp/hvdlite-12ab-0/r77", "rank 1")
    assert not allowed("unix", "/tmp/hvdlite-12ab-0/store", "rank 1")
    assert not allowed("unix", "@hvdlite-run-12", "another program")
    assert not allowed("tcp", "10.77.0.2", "another program")


@pytest.mark.night
def test_a_process_that_has_just_been_forked_is_not_taken_for_the_owner_of_its_parents_socket(monkeypatch):
    """It has the socket until it runs its own program, and for a moment before that it has no command line."""
    pids, names = iter([2, 1]), {2: "", 1: "hvdlite_launcher.host.agent"}
    monkeypatch.setattr(listeners, "_pid_of", lambda _: next(pids))
    monkeypatch.setattr(listeners, "_name_of", names.__getitem__)
    found = listeners._owned(Listener("a", "unix", "/tmp/hvdlite-12ab-0/store", 0, 1, 0, ""))
    assert (found.pid, found.owner) == (1, "hvdlite_launcher.host.agent")


def _is_allowed(listener: Listener, job: Any, hosts: int) -> bool:
    # On a busy machine, a socket that is open for a moment may be closed before its owner is found: then its address
    # has to do. The others show whose these are.
    unknown = listener.owner == CLOSED_AT_ONCE
    if listener.family == "unix":
        if re.fullmatch(r"@hvdlite-run-\d+", listener.address):
            return "hvdlite_launcher" in listener.owner or "hvdlite-run" in listener.owner or unknown
        # Of the agent, of rank 0, or of a rank for reports; other users cannot enter the directory.
        private = re.search(r"/hvdlite-\w+-\d+/(?:(r\d+)|\w+)$", listener.address)
        known = "hvdlite_launcher" in listener.owner or listener.owner == "rank 0"
        return private is not None and (known or unknown or (private[1] is not None and listener.is_of_rank))
    (host,) = [each for each in job.lan.hosts if each.name == listener.machine]
    own = "127.0.0.1" if hosts == 1 else host.address
    return (listener.is_of_rank or unknown) and listener.family == "tcp" and listener.address == own


def test_a_user_of_the_same_machine_cannot_connect_to_the_sockets_of_the_job_directory(start):
    """Unix sockets are files: the mode of their directory keeps other users out, from the moment they exist."""
    # The agent's, each rank's for reports, and rank 0's, which is closed when rank 1 has connected.
    job = start(1, "1", "_reach", on_new=attack_with("knock", of=has_file))
    assert job.all_come_to("_reach", 1), job.launch.ended()
    wait_until(lambda: len(list(filter(has_file, job.watcher.recorded))) == 4)
    job.wait_until_attacked()
    job.open("_reach", "train", "end")
    assert assert_withstood(job, 2) == ""
    assert len([listener for listener in job.watcher.recorded if has_file(listener)]) == 4
    assert [result["connected"] for result in job.intruders[0].results] == [0] * 4


@pytest.mark.night
def test_garbage_of_the_same_user_on_the_sockets_of_the_job_directory_disturbs_nobody(start):
    """The job's own user could end the job in other ways, but another program's mistake must not."""
    harmless = "garbage", "truncated", "lengths", "nesting", "stolen-rank", "slow-bytes", "half-open"
    job = start(1, on_new=attack_with(*harmless, of=has_file), uid=0)
    assert job.all_come_to("train", 2), job.launch.ended()
    job.wait_until_attacked()
    job.open("train", "end")
    code, out, err = job.launch.ended(LIMIT_S)
    assert (code, out.count(b":right\n")) == (0, 2), err.decode()
    job.close_intruders()
    assert let_in(job) > 0


# ---------------------------------------------------------- while ranks connect


@pytest.mark.night(but=1)
@pytest.mark.parametrize("trial", _chosen_trials(), ids=str)
def test_a_stranger_at_the_sockets_of_ranks_is_told_of_and_gets_nothing(trial, start):
    """While some ranks have not connected yet, the sockets of the others are attacked, each as soon as it listens."""
    on_new = attack_with(trial.attack, seed=trial.attack)
    job = start(trial.hosts, trial.held, trial.held_at, at=trial.at, on_new=on_new)
    job.let_the_held_come(trial.held_at.partition(" ")[0], len(trial.held.split(",")))
    assert_withstood(job, 2 * trial.hosts, but_gloo_may_abort=trial.attack in GLOO_ABORTS_AT)
    assert let_in(job) > 0, "nobody was attacked"


@pytest.mark.night
def test_what_true_ranks_have_sent_is_of_no_use_in_another_job(start):
    """The attacker has recorded all bytes of an earlier job and sends them again in the place of a rank."""
    earlier = start(1)
    with Recorder(earlier.lan.hosts[0], "lo") as heard:
        earlier.open("train", "end")
        assert_withstood(earlier, 2)
        ports = {listener.port for listener in earlier.watcher.recorded if is_open_to_strangers(listener)}
        streams = [stream.hex() for port in ports for stream in heard.sent_to(port) if len(stream) > 8]
    assert streams, "nothing was recorded"
    job = start(1, "1", "connect 0", on_new=attack_with("place-replay", recorded=streams))
    job.let_the_held_come()
    assert_withstood(job, 2, but_gloo_may_abort="place-replay" in GLOO_ABORTS_AT)
    assert let_in(job) > 0, "nobody was attacked"


@pytest.mark.night
@pytest.mark.parametrize("limit", ["ulimit -S -n 1024", "ulimit -n 1024"] if IS_LONG else ["ulimit -S -n 1024"])
def test_more_connections_than_a_rank_may_have_files_do_not_end_it(start, limit):
    """1,300 connections to a socket of a process that may have 1,024 files open, before the others connect.

    Where the system allows it no more than these, gloo aborts it.
    """
    job = start(1, "1", "connect 0", on_new=attack_with("flood"), shell=limit)
    job.let_the_held_come()
    assert_withstood(job, 2, but_gloo_may_abort="-S" not in limit)
    assert let_in(job) >= 1000


# ------------------------------------------------- where anybody may write

PORT = 29511


def _by_hand(launch, host: Host, program: Path, gate: Path, held_at: str) -> list[Launch]:
    """Starts two ranks on one host without a launcher; the second one waits."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "HVDLITE_SECRET": "s" * 32}
    return [
        launch(
            *(str(gate), "1", held_at),
            program=(str(program),),
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            on=host,
        )
        for rank in range(2)
    ]


@pytest.fixture
def forge(launch, make_lan, tmp_path) -> Callable[[str, str], tuple[list[Launch], Path]]:
    """Provides ``forge(kind, held_at)``: ranks that meet in a TCPStore in which an attacker wrote in rank 1's name."""
    gate, program = tmp_path / "gate", tmp_path / "train.py"
    gate.mkdir()
    program.write_text(TRAIN)

    def begin(kind: str, held_at: str) -> tuple[list[Launch], Path]:
        host = make_lan("a").hosts[0]
        ranks = _by_hand(launch, host, program, gate, held_at)
        forger = launch(
            *("127.0.0.1", str(PORT), kind, str(gate / "MARKER")),
            program=(forger_module.__file__,),
            env={"PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=subprocess.PIPE,
            on=host,
        )
        assert forger.process.stdout.readline() == b"forged\n", forger.ended()
        return ranks, gate

    return begin


@pytest.mark.parametrize("kind", INTRODUCTIONS if IS_LONG else random.Random(2).sample(INTRODUCTIONS, 1))
def test_a_forged_introduction_in_an_open_store_is_refused(forge, kind):
    (rank, _), gate = forge(kind, "exchange_rank_info")
    code, _, err = rank.ended(LIMIT_S)
    assert code == 1, err.decode()
    assert b"the data received from rank 1 are not signed with this rank's secret" in err
    assert not (gate / "MARKER").exists()


def test_forged_shared_memory_in_an_open_store_kills_nobody(forge):
    """The forged file of the same user, in place of rank 1's, is too short: reading it would end the process."""
    ranks, gate = forge(SHARED_MEMORY, "exchange_control_blocks")
    while ranks[0].process.stdout.readline() not in (b"after exchange_control_blocks\n", b""):
        pass
    for name in ("exchange_control_blocks", "train", "end"):
        (gate / name).touch()
    for rank in ranks:
        code, _, err = rank.ended(LIMIT_S)
        assert code >= 0, f"signal {-code}: {err.decode()}"
        if rank is ranks[0]:
            assert b"received from rank 1 are not signed with the key of these ranks" in err, err.decode()
