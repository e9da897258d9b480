"""What real ranks print when they end because another rank ended, or by Ctrl-C."""

from __future__ import annotations

import re
import signal
import sys

import pytest
from e2e.victims import run_plainly

pytestmark = pytest.mark.slow

ONE_FAILS = """
import torch
import hvdlite as hvd

def train():
    for step in range(10):
        if step == 3 and hvd.rank() == 0:
            raise ValueError("bad data")
        hvd.allreduce(torch.ones(3), name="loss")

hvd.init()
train()
"""
PLACE = r"\(at \S*train\.py:9\)\n"

WAITS = """
import time
import torch
import hvdlite as hvd

hvd.init()
if hvd.rank() == 1:
    hvd.allreduce(torch.ones(3), name="loss")
while True:
    time.sleep(1000)
"""


@pytest.mark.parametrize("check", ["1", "0"])
def test_the_rank_that_failed_prints_its_traceback_and_the_others_one_line_each(tmp_path, check, rank_server):
    (tmp_path / "train.py").write_text(ONE_FAILS)
    first, second = run_plainly(
        rank_server.python(), 2, [str(tmp_path / "train.py")], tmp_path, timeout_s=200, HVDLITE_CHECK=check
    )
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert first.output.endswith("[rank0]: ValueError: bad data\n")
    assert re.fullmatch(
        r"\[rank1\]: hvdlite\.errors\.PeerLostError: .*rank 0 \(.*\) has crashed or was killed.* " + PLACE,
        second.output,
    )


@pytest.mark.night
def test_the_whole_traceback_is_in_the_log_of_level_debug(tmp_path, rank_server):
    (tmp_path / "train.py").write_text(ONE_FAILS)
    _, second = run_plainly(
        rank_server.python(), 2, [str(tmp_path / "train.py")], tmp_path, timeout_s=200, HVDLITE_LOG_LEVEL="debug"
    )
    assert second.exit_code == 1
    assert "Traceback (most recent call last):" in second.output
    assert "handle.py" in second.output


def test_ctrl_c_in_a_wait_ends_in_one_line_that_says_what_was_waited_for(launch, tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    # Rank 0 reports after a second that rank 1 waits.
    env = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}
    job = launch("-np", "2", sys.executable, "train.py", cwd=tmp_path, env=env, stderr=-1)
    line = b""
    while b"allreduce of 'loss'" not in line:
        line = job.process.stderr.readline()
        assert line, "the job ended before the rank was seen to wait"
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.ended()
    assert code == 130
    # On a busy machine rank 1 may have been told late that rank 0 is there.
    of_rank_1 = [line for line in err.decode().splitlines() if line.startswith("[1]") and "stalled: " not in line]
    assert len(of_rank_1) == 1
    # Rank 0 may have reported by then which rank it waits for.
    told = (
        r"interrupted while waiting in allreduce of 'loss'(, which waits for rank 0 \(localhost\))? \(at train\.py:8\)"
    )
    assert re.fullmatch(rf"\[1\]<stderr>:\[rank1\]: KeyboardInterrupt: {told}", of_rank_1[0])


# Rank 1 is interrupted when its main thread is in these calls and knows for which rank it waits; rank 0 never comes.
INTERRUPTED = """
import os, signal, sys, threading, time
import torch
import hvdlite as hvd

def calls_of_main_thread():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back

def interrupt_in(*calls, is_known=lambda: True):
    def run():
        while True:
            found = list(calls_of_main_thread())
            if is_known() and all(found.count(call) >= calls.count(call) for call in calls):
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=run, daemon=True).start()

hvd.init()
{before}
if hvd.rank() == 1:
    {wait}
while True:
    time.sleep(1000)
"""
STEP = """
param = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("fc.weight", param)])
param.sum().backward(); optimizer.step(); optimizer.zero_grad()
if hvd.rank() == 1:
    param.sum().backward()
    interrupt_in("wait", "sleep_while")
"""
SYNCHRONIZE = """
if hvd.rank() == 1:
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    # Of the handle, its event, and that one's condition.
    interrupt_in("synchronize", "wait", "wait", "wait", is_known=handle.waits_for)
"""
UNCHECKED = """
if hvd.rank() == 1:
    interrupt_in("allreduce", "wait", "sleep_while")
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("before", "wait", "check", "what"),
    [
        (STEP, "optimizer.step()", "1", r"the all-reduce of the gradients of fc\.weight \(bucket 0 of optimizer 1\)"),
        (SYNCHRONIZE, "hvd.synchronize(handle)", "1", "allreduce of 'loss'"),
        (UNCHECKED, "hvd.allreduce(torch.ones(3), name='loss')", "0", "allreduce of 'loss'"),
    ],
    ids=["step", "synchronize", "unchecked"],
)
def test_ctrl_c_in_a_collective_names_the_rank_that_it_waits_for(launch, tmp_path, before, wait, check, what):
    line = interrupted(launch, tmp_path, before, wait, HVDLITE_CHECK=check)
    assert re.fullmatch(
        rf"interrupted while waiting in {what}, which waits for rank 0 \(localhost\) \(at train\.py:\d+\)", line
    )


def test_ctrl_c_in_a_wait_claims_nothing_where_it_is_not_known_for_whom(launch, tmp_path):
    before, wait = UNCHECKED.replace("sleep_while", "_wait_on_cpu"), "hvd.allreduce(torch.ones(3), name='loss')"
    line = interrupted(launch, tmp_path, before, wait, HVDLITE_CHECK="0", HVDLITE_SHM="0")
    assert re.fullmatch(r"interrupted while waiting in allreduce of 'loss' \(at train\.py:\d+\)", line)


def interrupted(launch, tmp_path, before: str, wait: str, **env: str) -> str:
    """Returns what rank 1 prints when it is interrupted in ``wait``."""
    (tmp_path / "train.py").write_text(INTERRUPTED.format(before=before, wait=wait))
    _, _, err = launch("-np", "2", sys.executable, "train.py", cwd=tmp_path, env=env, stderr=-1).ended(200)
    (line,) = [line for line in err.decode().splitlines() if line.startswith("[1]")]
    return line.removeprefix("[1]<stderr>:[rank1]: KeyboardInterrupt: ")
