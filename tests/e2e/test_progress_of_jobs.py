"""Files in which machines see a job, written by real jobs."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch
import hvdlite as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)

def train():
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(7):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

train()
if hvd.rank() == int(sys.argv[1]):
    sys.exit("no more")
"""


def test_the_steps_of_each_rank_are_known_at_the_end_of_a_job(launch, tmp_path):
    path = tmp_path / "job.prom"
    (tmp_path / "program.py").write_text(PROGRAM)
    job = launch("-np", "2", "--metrics-textfile", str(path), sys.executable, str(tmp_path / "program.py"), "1")
    code, _, err = job.ended()
    assert code == 1, err
    text = path.read_text()
    for rank in (0, 1):
        assert f'hvdlite_steps_total{{rank="{rank}",worker="{rank}",host="localhost",optimizer="1"}} 7\n' in text
    assert "hvdlite_up 0\n" in text
    assert "hvdlite_exit_code 1\n" in text
    job.assert_gone()
