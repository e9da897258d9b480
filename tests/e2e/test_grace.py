"""Workers have time to write a checkpoint when the launcher, or all of the job at once, is signalled.

How long that is, and that a second signal cuts it short, is tested with a clock of its own in `test_supervise`: here
workers go on as soon as the test has seen what it waits for.
"""

import contextlib
import os
import re
import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from e2e.conftest import assert_clean, is_called, ready, wait_until
from hvdlite_launcher.workers.ending import SAME_SIGNAL_S

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
# The code around the recipe: training that never ends, and a checkpoint that takes until the test lets it go on.
PROGRAM = """
import itertools, os, signal, time, torch
import hvdlite as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
loader = itertools.count()
replace = os.replace

def train(batch):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    if batch == 3:
        print("ready", flush=True)

def replace_slowly(written, path):
    while not os.path.exists("go on"):
        time.sleep(0.02)
    replace(written, path)

os.replace = replace_slowly

"""
# Rank 0 writes its checkpoint when the test tells it to, rank 1 ends without an error.
SAVES = """
import os, pathlib, signal, sys, time
def save(signum, frame):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    pathlib.Path(sys.argv[2]).write_text("whole")
    os._exit(0)
if os.environ["HVDLITE_RANK"] == "0":
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, save)
print("ready", flush=True)
while True:
    signal.pause()
"""


def told(job, words: str) -> str:
    """Reads the launcher's messages until a line contains these words."""
    while line := job.process.stderr.readline().decode():
        if line.startswith("hvdlite-run: ") and words in line:
            return line.rstrip("\n")
    raise AssertionError(f"it ended without {words!r}")


@pytest.fixture
def saving(launch, tmp_path):
    """Starts two workers; rank 0, when it is signalled, writes its checkpoint once ``go_on`` exists."""
    go_on, saved = tmp_path / "go on", tmp_path / "saved"

    def start(*flags, **options):
        return launch(*flags, "python", "-c", SAVES, str(go_on), str(saved), **options), go_on, saved

    return start


def test_the_recipe_of_the_manual_writes_its_checkpoint_however_long_that_takes(launch, tmp_path):
    (recipe,) = re.findall(r"## Write a checkpoint on SIGTERM.*?```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM + textwrap.dedent(recipe))
    job = ready(launch("--grace", "600", "-np", "2", "python", str(program), cwd=tmp_path))
    job.process.send_signal(signal.SIGTERM)
    line = told(job, "SIGTERM")
    assert line == (
        "hvdlite-run: SIGTERM passed on to 2 workers: what still runs in 600 s is killed "
        "(a second signal: at once; --grace sets the time)"
    )
    assert not (tmp_path / "checkpoint.pt").exists()
    (tmp_path / "go on").touch()
    code, _, err = job.ended()
    assert code == 143
    assert b"Traceback" not in err
    assert b"hvdlite-run:" not in err  # no rank is named as the cause
    assert (tmp_path / "checkpoint.pt").exists()
    job.assert_gone()


@pytest.mark.new_processes("it counts processes")
def test_a_scheduler_that_signals_every_process_of_the_job_at_once_cuts_nothing_off(saving):
    job, go_on, saved = saving("--grace", "600", "-np", "2")
    ready(job)
    job.signal_all(signal.SIGTERM)
    assert "SIGTERM passed on" in told(job, "SIGTERM")
    wait_until(lambda: len(job.processes()) == 4)  # all but rank 1: launcher, remote parent, agent, rank 0
    go_on.touch()
    code, _, err = job.ended()
    assert (code, err) == (143, b"")
    assert saved.read_text() == "whole"
    job.assert_gone()


def test_so_it_is_on_several_hosts(saving, make_lan, tmp_path):
    lan = make_lan("a", "b")
    job, go_on, saved = saving("--grace", "600", "-H", "a,b", on=lan.desk)
    ready(job)
    assert lan.desk.runs("ssh")
    for process in lan.desk.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended because of the others
            process.send_signal(signal.SIGTERM)
    assert "SIGTERM passed on to 2 workers" in told(job, "SIGTERM")
    wait_until(lambda: not any(is_called(process, "-c") for process in lan.hosts[1].processes()))
    go_on.touch()
    code, _, err = job.ended()
    assert (code, err) == (143, b"")
    assert saved.read_text() == "whole"
    assert_clean(lan)


@pytest.mark.night
def test_a_host_that_is_lost_meanwhile_does_not_cut_off_the_others(saving, make_lan):
    lan = make_lan("a", "b")
    job, go_on, saved = saving("--grace", "600", "-H", "a,b", on=lan.desk)
    ready(job)
    job.launcher().send_signal(signal.SIGTERM)
    told(job, "SIGTERM passed on")
    lan.hosts[1].close()
    wait_until(lambda: not any(is_called(process, "ssh", "b") for process in job.processes()))
    go_on.touch()
    assert job.ended()[0] == 143
    assert saved.read_text() == "whole"


@pytest.mark.night
def test_two_signals_that_are_sent_at_once_as_systemd_does_are_one(saving):
    job, go_on, saved = saving("--grace", "600", "-np", "2")
    ready(job)
    # It is stopped, so that both are there before it can do anything.
    for signum in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
        job.process.send_signal(signum)
    first = told(job, "passed on").split()[1]
    go_on.touch()
    code, _, err = job.ended()
    assert (code, err) == ({"SIGHUP": 129, "SIGTERM": 143}[first], b"")
    assert saved.read_text() == "whole"


@pytest.mark.new_processes("it counts processes")
@pytest.mark.night
def test_a_terminal_that_is_gone_leaves_the_workers_their_time(saving, tmp_path):
    master, terminal = os.openpty()
    job, go_on, saved = saving("--grace", "600", "-np", "2", stderr=terminal, stdin=terminal)
    os.close(terminal)
    ready(job)
    os.close(master)
    job.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(job.processes()) == 4)  # this ends rank 1
    go_on.touch()
    assert job.ended()[0] == 129
    assert saved.read_text() == "whole"
    job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_at_once_and_says_so(saving, signum):
    job, _, saved = saving("--grace", "86400", "-np", "1")
    ready(job, 1)
    job.process.send_signal(signal.SIGTERM)
    assert "in 86400 s" in told(job, "SIGTERM passed on to 1 worker")
    time.sleep(2 * SAME_SIGNAL_S)  # a signal that comes sooner counts as the same
    job.process.send_signal(signum)
    code, _, err = job.ended()
    assert (code, err.decode()) == (143, f"hvdlite-run: {signum.name}: 1 worker killed at once\n")
    assert not saved.exists()
    job.assert_gone()


@pytest.mark.night
def test_without_grace_the_first_signal_kills(saving):
    job, _, saved = saving("--grace", "0", "-np", "2")
    ready(job)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.ended()
    assert (code, err) == (143, b"hvdlite-run: SIGTERM: 2 workers killed at once (--grace 0)\n")
    assert not saved.exists()
    job.assert_gone()


@pytest.mark.night
def test_workers_that_never_end_are_killed_after_the_grace(saving):
    job, _, saved = saving("--grace", "1", "-np", "2")
    ready(job)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.ended()
    assert code == 143
    assert b"what still runs in 1 s is killed" in err
    assert not saved.exists()
    job.assert_gone()
