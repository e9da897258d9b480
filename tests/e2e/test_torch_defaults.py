"""Programs that have set PyTorch's default device and dtype, in real jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import every_call
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import pathlib, sys, torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
import hvdlite as hvd
from every_call import run_all
hvd.init()
run_all(pathlib.Path(sys.argv[1]))

@hvd.elastic.run
def train(state):
    while state.step < 3:
        state.optimizer.zero_grad()
        state.model(torch.ones(2, 3, device="cpu", dtype=torch.float32)).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()

torch.set_default_dtype(torch.float32)
model = torch.nn.Linear(3, 1, device="cpu")
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
hvd.shutdown()
print("all done")
"""


@pytest.mark.parametrize(("flags", "environment"), [([], {}), (["--survive", "--min-np", "2"], {"HVDLITE_SHM": "0"})])
def test_jobs_work_with_the_meta_device_and_another_dtype_as_defaults(launch, tmp_path, flags, environment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    helpers = str(Path(every_call.__file__).parent)
    environment = {"PYTHONPATH": helpers, **environment}
    job = launch("-np", "2", *flags, sys.executable, str(program), str(tmp_path), env=environment)
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert out.count(b"all done") == 2
