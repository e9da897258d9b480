"""What ranks print as they end of another's end, or of Ctrl-C, with real processes."""

from __future__ import annotations

import re
import signal
import sys

import pytest
from e2e.victims import run_plainly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
def test_the_rank_that_failed_prints_its_traceback_and_the_others_one_line_each(tmp_path, check):
    (tmp_path / "train.py").write_text(ONE_FAILS)
    first, second = run_plainly(2, [str(tmp_path / "train.py")], tmp_path, timeout_s=100, HVDLITE_CHECK=check)
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert first.output.endswith("[rank0]: ValueError: bad data\n")
    assert re.fullmatch(
        r"\[rank1\]: hvdlite\.errors\.PeerLostError: .*rank 0 \(.*\) has gone.* " + PLACE, second.output
    )


def test_the_whole_traceback_is_in_the_log_of_level_debug(tmp_path):
    (tmp_path / "train.py").write_text(ONE_FAILS)
    _, second = run_plainly(2, [str(tmp_path / "train.py")], tmp_path, timeout_s=100, HVDLITE_LOG_LEVEL="debug")
    assert second.exit_code == 1
    assert "Traceback (most recent call last):" in second.output
    assert "handle.py" in second.output


def test_ctrl_c_in_a_wait_ends_in_one_line_that_says_what_was_waited_for(launch, tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    # That it waits rank 0 tells after a second.
    env = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}
    job = launch("-np", "2", sys.executable, "train.py", cwd=tmp_path, env=env, stderr=-1)
    line = b""
    while b"allreduce of 'loss'" not in line:
        line = job.process.stderr.readline()
        assert line, "the job ended before the rank was seen to wait"
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.ended()
    assert code == 130
    of_rank_1 = [line for line in err.decode().splitlines() if line.startswith("[1]")]
    told = "[1]<stderr>:[rank1]: KeyboardInterrupt: interrupted while waiting in allreduce of 'loss' (at train.py:8)"
    assert of_rank_1 == [told]
