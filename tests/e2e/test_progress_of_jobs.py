"""Files in which machines see a job, written by real jobs."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, select, sys, torch
import hvdlite as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
first = os.pidfd_open(hvd.allgather_object(os.getpid())[0])

def train():
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(7):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

train()
if hvd.rank() == int(sys.argv[1]):
    # A rank that is ended before it has come to its own end leaves no count.
    select.select([first], [], [])
    sys.exit("no more")
"""


def test_the_steps_of_each_rank_are_known_at_the_end_of_a_job(launch, tmp_path):
    path, page = tmp_path / "job.prom", tmp_path / "job.html"
    (tmp_path / "program.py").write_text(PROGRAM)
    files = ("--metrics-textfile", str(path), "--summary", str(page))
    job = launch("-np", "2", *files, sys.executable, str(tmp_path / "program.py"), "1")
    code, _, err = job.ended()
    assert code == 1, err
    text = path.read_text()
    for rank in (0, 1):
        assert f'hvdlite_steps_total{{rank="{rank}",worker="{rank}",host="localhost",optimizer="1"}} 7\n' in text
    assert "hvdlite_up 0\n" in text
    assert "hvdlite_exit_code 1\n" in text
    shown = page.read_text()
    assert shown.startswith("<!DOCTYPE html>")
    assert '<span class="failed">failed</span>' in shown
    assert "no more" in shown, "the end of what the rank wrote"
    assert shown.count("<td>7</td>") == 2, "the steps of both ranks"
    job.assert_gone()


ELASTIC = """
import os
import hvdlite as hvd

@hvd.elastic.run
def train(state):
    while state.step < 4:
        if state.step == 2 and hvd.rank() == 1 and not os.path.exists("was-here"):
            open("was-here", "w").close()
            os._exit(9)
        state.step += 1
        state.commit()

hvd.init()
train(hvd.elastic.TorchState(step=0))
print("done \\N{CHECK MARK}")
"""


def test_an_elastic_job_tells_of_its_losses_in_the_summary_and_the_log(launch, tmp_path):
    (tmp_path / "program.py").write_text(ELASTIC)
    files = {name: tmp_path / f"{name}.json" for name in ("summary", "log-json")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    job = launch("-np", "2", "--min-np", "1", "--max-np", "2", *flags, sys.executable, "program.py", cwd=tmp_path)
    code, _, err = job.ended()
    assert code == 0, err
    summary = json.loads(files["summary"].read_text())
    assert (summary["verdict"], summary["exit_code"], summary["faults"]) == ("done", 0, 1)
    assert len(summary["generations"]) > 1
    assert [loss["exit_code"] for loss in summary["losses"]] == [9]
    assert summary["peak_memory_bytes"] > 1 << 20
    log = [json.loads(line) for line in files["log-json"].read_text().splitlines()]
    assert {"started", "rank", "connected", "output", "exited", "say", "ended"} <= {each["kind"] for each in log}
    assert any(each["kind"] == "output" and each["text"] == "done \N{CHECK MARK}" for each in log)
    job.assert_gone()
