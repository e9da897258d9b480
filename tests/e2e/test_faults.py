"""Jobs over two real hosts, each broken at a random moment: soon nothing of it is left anywhere, and the cause that is
told is the true one. A trial's number is its seed. There are sixty with TEST_HVDLITE_LONG=1; else one of each kind for
each program that it breaks.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from e2e.conftest import Launch, ready, wait_until
from e2e.machines import Machine
from e2e.ssh_hosts import Lan
from long_run import trials

pytestmark = pytest.mark.slow

# The launcher's own limits are 5 s, and 15 s where a link is cut; trials run beside each other, on a busy machine.
LIMIT_S = 25.0
CUT_LIMIT_S = 60.0

NAME = "the-worker"  # the last word of each command, by which its processes are found
# A child in the worker's group, one in a session of its own, and a daemon, which has lost its parent.
CHILDREN = "sleep 1000 & setsid sleep 1001 & (setsid sleep 1002 <&- >&- 2>&- &); echo ready"
# Trains for ever; the rank in its arguments exits with 0 at the step in its arguments.
TRAIN = """
import sys, time, torch, hvdlite as hvd
hvd.init(timeout_s=60)
leaver, last = map(int, sys.argv[1:3])
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
step = 0
try:
    while (hvd.rank(), step) != (leaver, last):
        optimizer.zero_grad()
        model(torch.ones(8, 256)).mean().backward()
        optimizer.step()
        step += 1
        if step == 3: print("ready", flush=True)
except hvd.CommunicationError:
    time.sleep(5)  # the end that is the cause comes to hvdlite-run before this one, however busy the machine
    raise
"""
SHELL = {
    "sleeps": "echo ready; sleep 1000; exit 3",
    "forks": f"{CHILDREN}; wait",
    "forks, exits 0": f"{CHILDREN}; exit 0",
    "deaf": "trap '' TERM INT HUP; echo ready; while :; do sleep 1000; done",
    "deaf, forks": f"trap '' TERM INT HUP; {CHILDREN}; while :; do sleep 1000; done",
}

Found = tuple[Machine, psutil.Process]


@dataclass(frozen=True)
class Right:
    """How a job must end: its exit code, and what a line of its stderr must match, if it must say anything."""

    exit_code: int
    cause: str | None = None


class Trial:
    """A job on hosts ``a`` and ``b``, started on ``a`` or on the desk."""

    def __init__(self, number: int, lan: Lan, tmp: Path) -> None:
        self.lan = lan
        self.dice = random.Random(number)
        self.on = self.dice.choice([lan.desk, lan.hosts[0]])
        self.leaver = self.dice.randrange(2)
        self._tmp = tmp

    def start(self, command: Sequence[str]) -> None:
        # As long as after a failure, if the launcher is told to end.
        self.job = Launch(self._tmp, ("--grace", "3", "-H", "a,b", *command, NAME), {}, self.on)

    def wait_for_a_moment(self, *, running: bool) -> str:
        """Waits until some moment after the start, or after all workers run; returns which, in words."""
        if running:
            ready(self.job, 2)
        delay_s = self.dice.uniform(0, 0.8)
        time.sleep(delay_s)
        return f"{'ready' if running else 'start'} + {delay_s:.2f} s"

    def kill_one(self, find: Callable[[], list[Found]]) -> Machine:
        """Kills one of the processes that ``find`` returns with SIGKILL, once there are any; returns its host."""
        while True:
            wait_until(find)
            for machine, victim in self.dice.sample(found := find(), len(found)):
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
                return machine

    def workers(self) -> list[Found]:
        """Returns one worker on each host: the oldest, since processes that it forked are younger."""
        oldest = {machine.name: (machine, process) for machine, process in reversed(self._processes(f" {NAME}$"))}
        return [found for found in oldest.values() if _is_worker(found[1])]

    def agents(self) -> list[Found]:
        """Returns the processes that start the workers, and their parents on other hosts."""
        return self._processes(r"-m hvdlite_launcher\.host\.(agent|remote_parent)$")

    def ssh_clients(self) -> list[Found]:
        return self._processes("^ssh .*hvdlite_launcher")

    def _processes(self, pattern: str) -> list[Found]:
        """Returns the job's processes whose command lines match, by age."""
        found = []
        for machine in self.lan.machines:
            for process in machine.processes():
                try:
                    if re.search(pattern, " ".join(process.cmdline())):
                        found.append((process.create_time(), process.pid, machine, process))
                except psutil.Error:
                    continue
        return [(machine, process) for _, _, machine, process in sorted(found, key=lambda each: each[:2])]

    def assert_clean(self, limit_s: float, *, but: str) -> None:
        """Asserts that nothing is left on any machine within the limit from now; ``but`` names processes of no job."""

        def left() -> list[str]:
            return [thing for thing in self.lan.left() if f"name='{but}'" not in thing]

        wait_until(lambda: self.job.process.poll() is not None and not left(), limit_s, lambda: f"left: {left()}")


# ------------------------------------------------------------ what goes wrong


def kill_a_worker(trial: Trial) -> Right:
    host = trial.kill_one(trial.workers)
    return Right(137, rf"hvdlite-run: rank [01] on {host.name} \(pid \d+\) was the first to fail, killed by SIGKILL")


def kill_an_agent(trial: Trial) -> Right:
    host = trial.kill_one(trial.agents)
    return Right(1, rf"hvdlite-run: (lost )?{host.name}: its hvdlite agent (was killed by SIGKILL|ended unexpectedly)")


def kill_an_ssh_client(trial: Trial) -> Right:
    trial.kill_one(trial.ssh_clients)
    return Right(1, r"hvdlite-run: (lost )?[ab]: the ssh client was killed by SIGKILL")


def kill_the_launcher(trial: Trial) -> Right:
    trial.job.launcher().kill()
    return Right(-9)


def end_the_launcher(trial: Trial) -> Right:
    trial.job.launcher().terminate()
    return Right(143)


def cut_a_link(trial: Trial) -> Right:
    a, b = trial.lan.hosts
    cut, lost = trial.dice.choice([(a, "b"), (b, "b")] if trial.on is a else [(trial.on, "[ab]"), (a, "a"), (b, "b")])
    trial.lan.cut(cut)
    return Right(1, rf"hvdlite-run: lost {lost}: no message from it for 10 s")


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "HVDLITE_RANK" in process.environ()
    except psutil.Error:  # the process has just ended
        return False


def let_one_leave(trial: Trial) -> Right:
    leaver, other = trial.lan.hosts if trial.leaver == 0 else reversed(trial.lan.hosts)
    wait_until(lambda: leaver not in [machine for machine, _ in trial.workers()])
    return Right(
        1,
        rf"hvdlite-run: rank {trial.leaver} had ended with exit code 0 before the others; "
        rf"of these, rank {1 - trial.leaver} on {other.name} ",
    )


def let_all_leave(_: Trial) -> Right:
    return Right(0)


@dataclass(frozen=True)
class Kind:
    """``what`` is done to jobs that run the ``programs`` in turn; ``early``: also while they start."""

    harm: Callable[[Trial], Right]
    trials: int
    programs: tuple[str, ...]
    early: bool = False
    limit_s: float = LIMIT_S
    at_once: int = 2  # as many as run well on two cores


KINDS = {
    "worker killed": Kind(kill_a_worker, 9, ("sleeps", "forks", "trains")),
    "agent killed": Kind(kill_an_agent, 9, ("sleeps", "forks", "trains"), early=True),
    "ssh client killed": Kind(kill_an_ssh_client, 9, ("sleeps", "forks", "trains"), early=True),
    "launcher killed": Kind(kill_the_launcher, 9, ("sleeps", "forks", "trains"), early=True),
    # They mostly wait.
    "link cut": Kind(cut_a_link, 8, ("trains", "deaf, forks", "trains", "forks"), limit_s=CUT_LIMIT_S, at_once=4),
    "deaf, worker killed": Kind(kill_a_worker, 3, ("deaf", "deaf, forks")),
    "deaf, launcher told to end": Kind(end_the_launcher, 3, ("deaf, forks", "deaf")),
    "children left behind": Kind(let_all_leave, 4, ("forks, exits 0",)),
    "exit 0 too early": Kind(let_one_leave, 6, ("trains",)),
}


def test_there_are_sixty_trials():
    assert sum(kind.trials for kind in KINDS.values()) == 60


@pytest.mark.night(but=2)
@pytest.mark.parametrize("name", KINDS)
def test_whatever_breaks_nothing_is_left_and_the_cause_is_named(name, make_lan, tmp_path, table):
    kind = KINDS[name]
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    first = sum(other.trials for other in list(KINDS.values())[: list(KINDS).index(name)])

    def run(index: int) -> str:
        number = first + index
        tmp = tmp_path / f"tmp{number}"
        tmp.mkdir()
        trial = Trial(number, make_lan("a", "b"), tmp)
        what = kind.programs[index % len(kind.programs)]
        last = trial.dice.randrange(3, 60) if kind.harm is let_one_leave else -1
        if what == "trains":
            trial.start([sys.executable, str(program), str(trial.leaver), str(last)])
        else:
            trial.start(["sh", "-c", SHELL[what]])
        try:
            row = f"{number:2} {name:26} {what:14} on {trial.on.name:4}"
            moment = trial.wait_for_a_moment(running=not kind.early or trial.dice.random() < 0.6)
            right = kind.harm(trial)
            began = time.monotonic()
            # The sshd of a client that is cut off waits for it as long as configured; it runs nothing.
            trial.assert_clean(kind.limit_s, but="sshd" if kind.harm is cut_a_link else "")
            seconds = time.monotonic() - began
            code, _, err = trial.job.ended()
        finally:
            trial.lan.kill_jobs()
        assert code == right.exit_code, f"{row} {moment}: {err.decode()}"
        said = [line for line in err.decode().splitlines() if right.cause and re.match(right.cause, line)]
        assert said or right.cause is None, f"{row} {moment}: {err.decode()}"
        assert "Traceback" not in err.decode() or what == "trains", err.decode()
        table.append(f"{row} {moment:15} code {code:3} clean in {seconds:5.2f} s  {(said or [''])[0]:.100}")
        return row

    count = trials(len(kind.programs), kind.trials)
    with ThreadPoolExecutor(kind.at_once) as pool:
        assert len(list(pool.map(run, range(count)))) == count


@pytest.fixture(scope="module")
def table(pytestconfig) -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *sorted(rows), sep="\n", flush=True)
