"""A job that goes on from a checkpoint ends with the bits of one that was never stopped, with random numbers too."""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import contextlib, hashlib, random, sys
import numpy, torch
from torch import nn
import hvdlite as hvd

hvd.init()
torch.manual_seed(hvd.rank()), random.seed(hvd.rank()), numpy.random.seed(hvd.rank())
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
hvd.broadcast_parameters(model.state_dict())
first = 0
with contextlib.suppress(FileNotFoundError):
    saved = hvd.load_checkpoint("checkpoint.pt", model=model, optimizer=optimizer, scheduler=schedule)
    first = saved["epoch"] + 1
for epoch in range(first, 6):
    x = torch.randn(8, 4) * random.gauss(1, 0.1) + numpy.random.normal()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    schedule.step()
    if epoch == 2 and first == 0:
        hvd.save_checkpoint("checkpoint.pt", model=model, optimizer=optimizer, scheduler=schedule, epoch=epoch)
parameters = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
print("from", first, hashlib.sha256(parameters).hexdigest(), random.random(), numpy.random.rand(), torch.rand(1).item())
"""


def test_a_resumed_job_has_the_bits_of_one_that_was_not_stopped_and_other_ranks_are_warned(launch, tmp_path):
    def ends(size: int) -> tuple[dict[str, str], str]:
        code, out, err = launch("-np", str(size), sys.executable, "-c", PROGRAM, cwd=tmp_path).ended()
        assert code == 0, err.decode()
        return dict(re.findall(r"\[(\d)\]<stdout>:(.*)", out.decode())), err.decode()

    whole, _ = ends(2)
    resumed, err = ends(2)
    assert sorted(whole) == ["0", "1"]
    assert {rank: line.replace("from 0", "from 3") for rank, line in whole.items()} == resumed
    assert len({line.split()[2] for line in resumed.values()}) == 1
    assert len(set(resumed.values())) == 2, "the ranks draw different numbers"
    assert "was saved by" not in err
    others, err = ends(3)
    assert all(line.startswith("from 3 ") for line in others.values())
    assert err.count("checkpoint.pt was saved by 2 ranks, and there are 3. ") == 1
    assert "scheduler: base_lrs [0.02], T_max 6, last_epoch 3" in err
