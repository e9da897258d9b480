"""The live view of a job, on real terminals: its own, and that of another process that looks at it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest
from e2e.conftest import PATIENCE_S

pytestmark = pytest.mark.slow

# A program that trains until a file is there, and draws a progress bar.
TRAINING = """
import os, sys, time, torch
import hvdlite as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
stop, step = False, 0
while not stop:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    stop, step = hvd.broadcast_object(os.path.exists("stop")), step + 1
    if hvd.rank() == 0:
        sys.stderr.write(f"\\rbar {step}")
        print("line", step, flush=True)
    time.sleep(0.05)
"""
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
# What is drawn in place stands between these two; it is erased by the third.
DRAWN = re.compile(rb"\x1b\[\?7l((?:(?!\x1b\[\?7l).)*?)\x1b\[\?7h", re.DOTALL)
ERASE = b"\x1b[J"


class Terminal:
    """A terminal of some size, and the end of all that was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._own, self.line = pty.openpty()
        self.written = b""
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.line, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def drawn(self) -> str:
        """Returns what was drawn in place last."""
        drawn = DRAWN.findall(self.written)
        return CONTROL.sub(b"", drawn[-1]).decode().replace("\r\n", "\n") if drawn else ""

    def until(self, condition: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_at, self.written[-2000:]
            self.read(0.1)

    def read(self, wait_s: float = 0.0) -> None:
        while select.select([self._own], [], [], wait_s)[0]:
            self.written = self.written[-100_000:] + os.read(self._own, 65536)
            wait_s = 0.0

    def close(self) -> None:
        os.close(self._own)
        os.close(self.line)


@pytest.fixture
def terminals():
    """Provides ``terminals(columns, rows)``, which makes a terminal."""
    made = []

    def make(columns: int, rows: int) -> Terminal:
        made.append(Terminal(columns, rows))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_job_and_its_bar_are_shown_below_its_output_and_to_who_looks_at_it_and_leave_nothing_behind(
    launch, terminals, tmp_path
):
    (tmp_path / "train.py").write_text(TRAINING)
    own, other = terminals(100, 24), terminals(80, 12)
    env = {"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    words = ("--watch", "-np", "2", sys.executable, "train.py")
    job = launch(*words, stdin=own.line, stdout=own.line, stderr=own.line, cwd=tmp_path, env=env)
    own.until(lambda: re.search(r"2 ranks on 1 host  step \d+  [0-9.]+ steps/s", own.drawn()))
    own.until(lambda: re.search(r"rank 0 +\d+ .*\n└─ rank 1 +\d+ .*\n\[0\]<stderr>:bar \d+$", own.drawn()))
    viewer = launch("--watch", str(job.process.pid), stdin=other.line, stdout=other.line, stderr=other.line, env=env)
    other.until(lambda: own.read() or re.search(r"step \d+  [0-9.]+ steps/s(.*\n)+└─ rank 1 +\d+ ", other.drawn()))
    own.resize(30, 16)
    own.until(lambda: "rank 1" in own.drawn() and max(map(len, own.drawn().splitlines())) <= 30)
    (tmp_path / "stop").touch()
    own.until(lambda: job.process.poll() is not None)
    own.read()
    other.until(lambda: viewer.process.poll() is not None)
    other.read()
    assert (job.process.returncode, viewer.process.returncode) == (0, 0)
    # The bar ends as a line of the output, the view is erased, and the terminal wraps lines again.
    assert re.search(rb"\[0\]<stderr>:bar \d+\r\n", own.written)
    assert ERASE in own.written.rpartition(b"\x1b[?7h")[2]
    assert b"\x1b[?25l" not in own.written  # the cursor is never hidden
    assert f"hvdlite-run {job.process.pid} has ended" in other.written.decode()
    job.assert_gone()


def test_several_may_look_at_a_job_and_ctrl_c_ends_a_look_and_not_the_job(launch, terminals, tmp_path):
    job = launch("-np", "1", "sh", "-c", "echo begins; read x", stdin=subprocess.PIPE)
    assert b"begins" in job.process.stdout.readline()
    drawn, plain, last = terminals(80, 12), terminals(80, 12), terminals(80, 12)
    looks = [
        launch("--watch", str(job.process.pid), stdin=own.line, stdout=own.line, stderr=own.line, env={"TERM": term})
        for own, term in ((drawn, "xterm"), (plain, "dumb"), (last, "xterm"))
    ]
    drawn.until(lambda: "1 rank on 1 host" in drawn.drawn())
    last.until(lambda: "1 rank on 1 host" in last.drawn())
    plain.until(lambda: b"1 rank on 1 host" in plain.written)
    for look, own in zip(looks[:2], (drawn, plain), strict=True):
        look.process.send_signal(signal.SIGINT)
        own.until(lambda look=look: look.process.poll() is not None)
        own.read()
        assert look.process.returncode == 0
        assert f"no longer watched: the job of hvdlite-run {job.process.pid} goes on\r\n" in own.written.decode()
    assert job.process.poll() is None
    assert job.ended()[0] == 1  # the end of the input ends `read`
    last.until(lambda: looks[2].process.poll() is not None)
    last.read()
    assert f"hvdlite-run {job.process.pid} has ended" in last.written.decode()
    job.assert_gone()


@pytest.mark.night
def test_ctrl_c_ends_a_job_that_writes_without_a_pause_and_erases_the_view(launch, terminals):
    own = terminals(80, 24)
    words = ("--watch", "-np", "2", "yes", "a line")
    job = launch(*words, stdin=own.line, stdout=own.line, stderr=own.line, env={"TERM": "xterm"})
    own.until(lambda: "2 ranks on 1 host" in own.drawn())
    job.process.send_signal(signal.SIGINT)
    own.until(lambda: job.process.poll() is not None)
    own.read()
    assert job.process.returncode == 130
    assert ERASE in own.written.rpartition(b"\x1b[?7h")[2]
    job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("on_terminal", [True, False], ids=["dumb", "pipe"])
def test_where_nothing_can_be_drawn_in_place_there_are_plain_lines(launch, terminals, on_terminal):
    own = terminals(40, 24)
    streams = {"stdout": own.line, "stderr": own.line} if on_terminal else {}
    job = launch("--watch", "-np", "1", "sh", "-c", "read x", env={"TERM": "dumb"}, stdin=subprocess.PIPE, **streams)
    if on_terminal:
        own.until(lambda: re.search(rb"hvdlite-run: 0:00:\d\d: 1 rank on 1 host\r\n", own.written))
    else:
        assert re.fullmatch(rb"hvdlite-run: 0:00:\d\d: 1 rank on 1 host\n", job.process.stderr.readline())
    assert job.ended()[0] == 1  # the end of the input ends `read`
    own.read()
    assert b"\x1b" not in own.written
    job.assert_gone()
