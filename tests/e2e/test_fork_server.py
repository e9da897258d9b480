"""Replaced workers that are copies of a process that has imported torch: what programs and operators see of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.conftest import PATIENCE_S, Launch

pytestmark = [pytest.mark.slow, pytest.mark.new_processes("how workers start is what these tests are about")]

# Trains nothing until a file DIR/over is there. Each rank says how it was started, and that it is in a generation.
PROGRAM = """
import sys
how = "forked" if "torch" in sys.modules else "new"
import os, time
import torch
import hvdlite as hvd

hvd.init()
state = hvd.elastic.TorchState(steps=0)

@hvd.elastic.run
def train(state):
    print(f"worker {os.environ['HVDLITE_WORKER']} {os.getpid()} {how} of {hvd.size()} {sys.argv[1:]}", flush=True)
    while not hvd.allreduce(torch.tensor(float(os.path.exists(sys.argv[1]))), op=hvd.Max).item():
        state.steps += 1
        state.commit()
        time.sleep(0.02)

train(state)
print("done", how, sys.argv[1:], flush=True)
"""


class Ranks:
    """Two ranks of a job that runs `PROGRAM`, of which this kills the replaceable one."""

    def __init__(self, job: Launch) -> None:
        assert job.process.stdout is not None
        self._lines = job.process.stdout
        self.seen: dict[int, str] = {}  # how each worker was started
        self.arguments = ""  # the newer worker's

    def next_pair(self) -> tuple[int, int, str]:
        """Waits until a newer worker is one of two ranks; returns its number and pid, and how it was started."""
        while line := self._lines.readline():
            if found := re.search(rb"worker (\d+) (\d+) (new|forked) of 2 (.*)", line):
                number, pid, how = int(found[1]), int(found[2]), found[3].decode()
                if number > max(self.seen, default=0):
                    self.seen[number] = how
                    self.arguments = found[4].decode()
                    return number, pid, how
        raise AssertionError("the job ended")

    def until_forked(self) -> int:
        """Kills the newer worker until one is there that was forked, and returns its pid."""
        while True:
            _, pid, how = self.next_pair()
            if how == "forked":
                return pid
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(launch, tmp_path):
    """Provides ``start(command, *flags)``: a job of two ranks with that command; tells it where the file is."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def begin(*flags: str, command: tuple[str, ...] = ("python", "train.py")) -> Launch:
        elastic = ("-np", "2", "--min-np", "1", "--max-restarts", "9999", "--verbose")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return launch(*elastic, *flags, *command, str(tmp_path / "over"), cwd=tmp_path, env={"PATH": path}, stderr=None)

    return begin


def servers(job: Launch) -> list[psutil.Process]:
    return [each for each in job.processes() if "hvdlite.worker.fork_server" in " ".join(each.cmdline())]


def test_a_worker_that_replaces_another_has_torch_imported_and_the_fork_server_may_be_killed(start, tmp_path):
    job = start()
    ranks = Ranks(job)
    pid = ranks.until_forked()
    worker = psutil.Process(pid)
    assert worker.cmdline()[:2] == ["python", "train.py"]
    assert worker.parent() == job.agent()
    assert os.getsid(pid) == pid
    assert ranks.arguments == str([str(tmp_path / "over")])
    (server,) = servers(job)
    server.kill()
    server.wait()
    worker.kill()
    ranks.next_pair()
    (tmp_path / "over").touch()
    code, out, _ = job.ended()
    assert code == 0
    assert out.count(b"done ") == 2
    job.assert_gone()


@pytest.mark.night
@pytest.mark.parametrize("which", ["launcher", "agent"])
def test_nothing_is_left_where_the_launcher_or_the_agent_is_killed(start, which):
    job = start()
    Ranks(job).until_forked()
    assert servers(job)
    (job.launcher() if which == "launcher" else job.agent()).kill()
    job.ended()
    job.assert_gone()


@pytest.mark.night
@pytest.mark.parametrize(
    ("flags", "command"),
    [(["--no-fork-server"], ["python", "train.py"]), ([], ["sh", "-c", 'exec python train.py "$@"', "sh"])],
    ids=["--no-fork-server", "a shell's command"],
)
def test_where_no_server_can_be_used_each_worker_is_a_new_process(start, tmp_path, flags, command):
    job = start(*flags, command=tuple(command))
    ranks = Ranks(job)
    for _ in range(3):
        _, pid, how = ranks.next_pair()
        assert how == "new"
        assert not servers(job)
        os.kill(pid, signal.SIGKILL)
    ranks.next_pair()
    (tmp_path / "over").touch()
    assert job.ended()[0] == 0
    job.assert_gone()


# Prints what a program can see of its process, and ends as its first argument says.
PROBE = """
import sys
was_imported = "torch" in sys.modules
import atexit, inspect, os, pickle, signal, threading
import multiprocessing
import __main__

class Own:
    pass

def show(what, value):
    print(what, value, flush=True)

def main():
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    show("words", (sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, sys.executable))
    show("main", {name: repr(value).split(" at 0x")[0] for name, value in vars(__main__).items() if name[:2] == "__"})
    show("environment", sorted(os.environ.items()))
    with open("/proc/self/cmdline") as file:
        show("shown", file.read().split("\\0"))
    with open("/proc/self/status") as file:
        names = ("Name", "Umask", "SigP", "SigB", "SigI", "SigC", "Shd")
        show("status", [line for line in file if line.startswith(names)])
    show("signals", {each.name: str(signal.getsignal(each)) for each in signal.Signals})
    show("files", [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in range(3)])
    show("open", len(os.listdir("/proc/self/fd")))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        show("stream", (stream.name, stream.mode, stream.encoding, stream.errors, stream.seekable()))
        show("buffering", (stream.line_buffering, stream.write_through))
    show("input", repr(sys.stdin.read()))
    show("session", os.getsid(0) == os.getpid() == os.getpgid(0) == threading.get_native_id())
    show("threads", (threading.current_thread() is threading.main_thread(), threading.active_count()))
    show("pickled", type(pickle.loads(pickle.dumps(Own()))))
    import torch
    show("torch", (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()))
    import hvdlite as hvd
    show("hvdlite", hvd.is_initialized())
    atexit.register(lambda: show("at exit", ("__file__" in globals(), hasattr(sys, "last_value"))))
    if how == "raise":
        raise ValueError("no")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit("bye")
    if how == "thread":
        threading.Thread(target=show, args=("late", 1)).start()
    if how == "loader":
        from torch.utils.data import DataLoader
        for context in ("fork", "spawn"):
            show(context, list(DataLoader([1, 2], num_workers=1, multiprocessing_context=context)))

if __name__ == "__main__":
    main()
"""


def both(cwd: Path, *command: str) -> tuple[dict[str, object], dict[str, object] | None]:
    """Returns the outcomes of a worker that is started anew, and of one that is forked."""
    program = Path(__file__).parents[1] / "helpers" / "both_starts.py"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, program, cwd, *command],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    outcomes = json.loads(done.stdout)
    return outcomes["new"], outcomes["forked"]


@pytest.fixture
def probe(tmp_path) -> Path:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    for name in ("probe.py", "pack/probe.py", "pack/__main__.py"):
        (tmp_path / name).write_text(PROBE)
    (tmp_path / "wrong.py").write_text("x = (\n")
    return tmp_path


@pytest.mark.night(but=2)
@pytest.mark.parametrize(
    "command",
    [
        "pack/../probe.py",
        "-uX dev -W error::SyntaxWarning ./probe.py raise",
        "probe.py interrupt",
        "probe.py kill",
        "-E probe.py raise",
        "-B probe.py exit",
        "probe.py thread",
        "-O probe.py loader",
        "-m pack.probe raise",
        "-m pack loader",
        "-c from\tprobe\timport\tmain;main() raise",
        "wrong.py",
    ],
)
def test_a_program_sees_no_difference_and_ends_in_the_same_way(probe, command):
    new, forked = both(probe, "python", *command.split(" "))
    assert forked == new


@pytest.mark.night
def test_random_numbers_are_as_fresh_as_in_a_new_process(probe):
    (probe / "draw.py").write_text(
        "import random, numpy, torch, multiprocessing\n"
        "print(random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed())\n"
        "print(multiprocessing.current_process().authkey.hex())"
    )
    drawn = [both(probe, "python", "draw.py")[1]["stdout"].split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("command", "imported"),
    [
        ("python -S plain.py", ""),  # finds no torch
        ("python sets.py", ""),
        ("python gone.py", ""),
        ("python -m gone", ""),
        ("python plain.py", "print('hello')"),
        ("python plain.py", "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"),
    ],
)
def test_a_program_that_could_tell_is_started_anew(tmp_path, command, imported):
    """``imported`` is what a module does that lies beside the program, and that torch imports."""
    (tmp_path / "plain.py").write_text("print(1)")
    (tmp_path / "sets.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch")
    if imported:
        (tmp_path / "getpass.py").write_text(f"getuser = str\n{imported}")
    assert both(tmp_path, *command.split())[1] is None
