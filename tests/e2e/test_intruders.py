"""Strangers at a job's listening sockets: a user of the same machine who has no rights, and a third machine.

They know no secret. They may keep a job from starting, which then says that somebody who is none of its ranks was
there; they may not make it run anything, nor compute anything wrong, nor wait for ever. A few attacks are chosen by
seed; HVDLITE_LONG_TESTS=1 has all of them.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.conftest import Launch, wait_until
from e2e.hosts import Lan
from e2e.intruder import ATTACKS, Intruder
from e2e.listeners import Listener, Watcher
from e2e.machines import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IS_LONG = os.environ.get("HVDLITE_LONG_TESTS") == "1"
NOBODY = 65534
LIMIT_S = 120  # for a whole job
MORE_MEMORY_BYTES = 200 << 20

# Ranks named in the second argument wait for a file before they connect by gloo for the time that the third says, and
# all before they train. What is computed is checked.
TRAIN = """
import os, sys, time, torch, torch.distributed.distributed_c10d as c10d
import hvdlite as hvd
gate, held, held_at = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
rank, connected = int(os.environ["RANK"]), 0

def wait_for(name):
    print("at " + name, flush=True)
    while not os.path.exists(os.path.join(gate, name)): time.sleep(0.01)

class Held(c10d.ProcessGroupGloo):
    def __init__(self, *arguments, **named):
        global connected
        connected += 1
        if connected == held_at and str(rank) in held: wait_for("connect")
        super().__init__(*arguments, **named)

c10d.ProcessGroupGloo = torch.distributed.ProcessGroupGloo = Held
torch.set_num_threads(1)
torch.manual_seed(rank)
hvd.init(timeout_s=20)
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
print("right", flush=True)
"""

# That somebody who is none of the job's ranks was there.
STRANGER_TOLD = re.compile(
    r"has a connection in the place of (host of )?rank \d.* that does not lead there"
    r"|not signed with this job's key"
    r"|was not one of this job's ranks"
)


@dataclass
class Job:
    """A job of `TRAIN`, on machines of its own, with intruders at whatever listens."""

    lan: Lan
    launch: Launch
    gate: Path
    watcher: Watcher
    intruders: list[Intruder]
    said: list[str] = field(default_factory=list)

    @property
    def marker(self) -> Path:
        return self.gate / "MARKER"

    def open(self, name: str) -> None:
        (self.gate / name).touch()


@pytest.fixture
def start(launch, make_lan, tmp_path) -> Iterator[Callable[..., Job]]:
    """``start(hosts, held, held_at)``: a job with two ranks on each host, and `Intruder`\\ s on ``where``."""
    jobs: list[Job] = []
    gate = tmp_path / "gate"
    gate.mkdir(mode=0o777)
    gate.chmod(0o777)
    program = tmp_path / "train.py"
    program.write_text(TRAIN)

    def begin(
        hosts: int,
        held: str = "",
        held_at: int = 0,
        *,
        at: str = "user",
        on_new: Callable[[Job, Listener], None] = lambda *_: None,
        shell: str = "",
    ) -> Job:
        lan = make_lan("a", "b")
        # A rank that listens before the others come has the lower port, so that gloo has these connect to it.
        _choose_ports(lan, 0x10)
        job: Job
        watcher = Watcher(lan.machines, lambda listener: on_new(job, listener))
        where = lan.hosts[0] if at == "user" else lan.desk
        intruders = [Intruder(_network_of(where), NOBODY if at == "user" else 0)]
        words = [sys.executable, str(program), str(gate), held, str(held_at)]
        if shell:
            words = ["sh", "-c", f'{shell}; exec "$@"', "sh", *words]
        size = 2 * hosts
        names = "a:2" if hosts == 1 else "a:2,b:2"
        on = lan.hosts[0] if hosts == 1 else lan.desk
        job = Job(lan, None, gate, watcher, intruders)  # type: ignore[arg-type]  # it is there before anybody listens
        jobs.append(job)
        watcher.__enter__()
        job.launch = launch("-np", str(size), "-H", names, *words, on=on)
        return job

    yield begin
    for job in jobs:
        job.watcher.__exit__()
        for intruder in job.intruders:
            intruder.close()


def _network_of(machine: Machine) -> list[str]:
    return ["nsenter", f"--target={machine.init_pid}", "--net", "--"]


def _choose_ports(lan: Lan, low_byte: int) -> None:
    """The system gives out ports whose numbers end so, from now on: gloo compares these bytes first."""
    for host in lan.hosts:
        first = 0xA000 + low_byte
        set_range = f"echo {first} {first + 15} >/proc/sys/net/ipv4/ip_local_port_range"
        subprocess.run([*_network_of(host), "sh", "-ec", set_range], check=True)


def is_open_to_strangers(listener: Listener) -> bool:
    return listener.is_of_rank and listener.family.startswith("tcp")


def attack_with(*names: str, seed: int = 0) -> Callable[[Job, Listener], None]:
    """All of these attacks on each socket of a rank's that listens, as soon as it does."""

    def on_new(job: Job, listener: Listener) -> None:
        if is_open_to_strangers(listener):
            for name in names:
                for intruder in job.intruders:
                    intruder.attack(
                        name,
                        listener.family,
                        listener.address,
                        listener.port,
                        marker=str(job.marker),
                        seed=seed,
                        hold_s=90,
                        recorded=[],
                    )

    return on_new


def let_in(job: Job) -> int:
    return sum(result["connected"] for intruder in job.intruders for result in intruder.results)


def assert_withstood(job: Job, size: int) -> str:
    """It ends in time, well or with a word of the stranger; nothing has been run, and no memory wasted. Its stderr."""
    code, out, err = job.launch.ended(LIMIT_S)
    text = err.decode(errors="replace")
    for intruder in job.intruders:
        intruder.close()
    assert not job.marker.exists(), f"a stranger's command was run: {text}"
    assert "killed by SIG" not in text, text
    usual = 400 << 20
    assert max(job.watcher.peak_bytes.values(), default=0) < usual + MORE_MEMORY_BYTES
    if code == 0:
        assert out.count(b":right\n") == size, out
    else:
        assert STRANGER_TOLD.search(text), text
    job.launch.assert_gone() if size == 2 else wait_until(lambda: not job.lan.left())
    return text


@dataclass(frozen=True)
class Trial:
    """``attack`` on the sockets of a job over so many ``hosts``, by a ``user`` there or from another ``machine``, while
    ``held`` ranks are kept from connecting by gloo for the ``held_at``-th time."""

    attack: str
    hosts: int
    at: str
    held: str
    held_at: int

    def __str__(self) -> str:
        return f"{self.attack}-{self.hosts}-{self.at}-{self.held}-{self.held_at}"


def _all_trials() -> list[Trial]:
    # On one host, gloo connects once, for what shared memory does not carry; hosts are connected several times.
    one = [Trial(attack, 1, "user", held, 1) for attack in ATTACKS for held in "01"]
    two = [Trial(attack, 2, *how) for attack in ATTACKS for how in (("machine", "2,3", 1), ("user", "2,3", 3))]
    return one + two


def _chosen_trials() -> list[Trial]:
    if IS_LONG:
        return _all_trials()
    dice = random.Random(20)
    one, two = ([trial for trial in _all_trials() if trial.hosts == hosts] for hosts in (1, 2))
    return [*dice.sample(one, 2), *dice.sample(two, 2)]


@pytest.mark.parametrize("trial", _chosen_trials(), ids=str)
def test_a_stranger_at_the_sockets_of_ranks_is_told_of_and_gets_nothing(trial, start):
    """While some ranks have not connected yet, the sockets of the others are attacked, each as soon as it listens."""
    job = start(
        trial.hosts, trial.held, trial.held_at, at=trial.at, on_new=attack_with(trial.attack, seed=trial.held_at)
    )
    job.watcher.wait_for(is_open_to_strangers)
    wait_until(lambda: all(intruder.orders and intruder.has_begun() for intruder in job.intruders))
    _choose_ports(job.lan, 0x80)
    job.open("train")
    job.open("connect")
    assert_withstood(job, 2 * trial.hosts)
    assert let_in(job) > 0, "nobody was attacked"
