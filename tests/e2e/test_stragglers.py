"""Real jobs in which one rank is slow: who is named, in which phase, and the warning about it."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import logging, sys, time
import torch
import hvdlite as hvd
from hvdlite.control import stragglers

stragglers.WINDOW_S = 2.0  # a minute would be long
phase, slow = sys.argv[1], int(sys.argv[2])

def delay(here):
    if here == phase and hvd.rank() == slow:
        time.sleep(0.05)

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        delay("data")
        return torch.ones(8)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        delay("forward")
        return self.layer(x)

class Warnings(logging.Handler):
    lines = []

    def emit(self, record):
        if "straggler" in record.getMessage():
            self.lines.append(record.getMessage())

hvd.init(timeout_s=60)
logging.getLogger("hvdlite").addHandler(Warnings())
torch.manual_seed(0)
model = Model()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
warned = False
while not warned:
    for step, x in enumerate(torch.utils.data.DataLoader(Images(), batch_size=1)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and (warned := hvd.broadcast_object(bool(Warnings.lines), root_rank=0)):
            break
if hvd.rank() == 0:
    pace = hvd.stragglers()[0]
    print(pace.rank, pace.phase)
    print(Warnings.lines[0])
"""


@pytest.mark.parametrize(("phase", "slow"), [("data", 1), ("forward", 0)])
def test_a_slow_rank_is_named_with_its_phase(launch, tmp_path, phase, slow):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, out, err = launch("-np", "2", sys.executable, str(program), phase, str(slow)).ended()
    assert code == 0, err.decode()
    shown = out.decode()
    assert f"{slow} {phase}\n" in shown
    assert f"straggler: rank {slow} (localhost) holds up the other ranks" in shown
    assert f"It takes longest in {phase}:" in shown
