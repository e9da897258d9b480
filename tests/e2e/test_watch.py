"""The live view of a job, on real terminals: its own, and that of another process that looks at it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios

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
REDRAWN = rb"\x1b\[[0-9]+A\x1b\[J"


class Terminal:
    """A terminal of some size, and all that was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._own, self.line = pty.openpty()
        self.written = b""
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.line, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: bytes) -> bytes:
        """Reads until this has been written since the last call, and returns what was written, as far as it."""
        while (match := re.search(pattern, self.written)) is None:
            assert select.select([self._own], [], [], PATIENCE_S)[0], self.written[-2000:]
            self.written += os.read(self._own, 65536)
        seen, self.written = self.written[: match.end()], self.written[match.end() :]
        return seen

    def rest(self) -> bytes:
        while select.select([self._own], [], [], 0)[0]:
            self.written += os.read(self._own, 65536)
        return self.written

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


@pytest.mark.smoke
def test_a_job_and_its_bar_are_shown_below_its_output_and_to_who_looks_at_it_and_leave_nothing_behind(
    launch, terminals, tmp_path
):
    (tmp_path / "train.py").write_text(TRAINING)
    own, other = terminals(100, 24), terminals(80, 12)
    env = {"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    job = launch(
        *("--watch", "-np", "2", sys.executable, "train.py"),
        stdin=own.line,
        stdout=own.line,
        stderr=own.line,
        cwd=tmp_path,
        env=env,
    )
    own.until(rb"line 3\r\n")
    own.until(rb"0:0\d:\d\d  2 ranks on 1 host  step \d+  [0-9.]+ steps/s")
    assert re.search(
        rb"rank 0 +\d+ .*\r\n.*rank 1 +\d+ .*\r\n\[0\]<stderr>:bar \d+\x1b\[\?7h", own.until(rb"bar \d+\x1b\[\?7h")
    )
    viewer = launch("--watch", str(job.process.pid), stdin=other.line, stdout=other.line, stderr=other.line, env=env)
    other.until(rb"2 ranks on 1 host  step \d+  [0-9.]+ steps/s")
    other.until(rb"rank 1 +\d+")
    own.resize(30, 10)
    narrow = own.until(rb"\r\n\xe2\x94\x94\xe2\x94\x80 rank 1 +\d+ *\r\n")
    drawn = re.split(REDRAWN, narrow)[-1]
    assert max(len(CONTROL.sub(b"", row).decode()) for row in drawn.split(b"\r\n")) <= 30
    (tmp_path / "stop").touch()
    assert job.process.wait(PATIENCE_S) == 0
    written = own.rest()
    # The bar ends as a line of the output. The view is erased, and the terminal wraps lines again.
    assert re.fullmatch(rb"\[0\]<stderr>:bar \d+\r\n", re.split(REDRAWN, written)[-1][-30:].rpartition(b"\x1b[J")[2])
    assert written.rfind(b"\x1b[?7l") < written.rfind(b"\x1b[?7h")
    assert b"\x1b[?25l" not in written  # the cursor is never hidden
    assert viewer.process.wait(PATIENCE_S) == 0
    assert f"hvdlite-run {job.process.pid} has ended" in other.rest().decode()
    job.assert_gone()


def test_ctrl_c_ends_a_job_that_writes_without_a_pause_and_erases_the_view(launch, terminals):
    terminal = terminals(80, 24)
    job = launch(
        *("--watch", "-np", "2", "yes", "a line"),
        stdin=terminal.line,
        stdout=terminal.line,
        stderr=terminal.line,
        env={"TERM": "xterm"},
    )
    terminal.until(rb"2 ranks on 1 host")
    job.process.send_signal(signal.SIGINT)
    while job.process.poll() is None:
        terminal.rest()
        terminal.written = terminal.written[-100_000:]
    assert job.process.returncode == 130
    last = terminal.rest().rpartition(b"2 ranks on 1 host")[2]
    assert re.search(REDRAWN, last)
    job.assert_gone()


@pytest.mark.parametrize("on_terminal", [True, False], ids=["dumb", "pipe"])
def test_where_nothing_can_be_drawn_in_place_there_are_plain_lines(launch, terminals, on_terminal):
    terminal = terminals(40, 24)
    streams = {"stdout": terminal.line, "stderr": terminal.line} if on_terminal else {}
    job = launch("--watch", "-np", "2", "sh", "-c", "read x", env={"TERM": "dumb"}, stdin=-1, **streams)
    if on_terminal:
        terminal.until(rb"hvdlite-run: 0:00:0\d: 2 ranks on 1 host\r\n")
    else:
        line = job.process.stderr.readline()
        assert re.fullmatch(rb"hvdlite-run: 0:00:0\d: 2 ranks on 1 host\n", line), line
    job.process.stdin.close()
    job.process.stdin = None
    assert job.process.wait(PATIENCE_S) == 1
    if on_terminal:
        assert b"\x1b" not in terminal.rest()
    job.assert_gone()
