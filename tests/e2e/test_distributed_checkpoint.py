"""`torch.distributed.checkpoint` saves a job, and a job of another number of ranks goes on from it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# All ranks have the same batches, so that their average is exact for 1, 2 and 4 ranks.
PROGRAM = """
import sys, zlib, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
import hvdlite as hvd

hvd.init()
command, folder, shard = sys.argv[1:]
torch.manual_seed(2 if command != "load" else hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if command != "whole":
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard or None)

def train(steps):
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()

if command == "load":
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
else:
    train(range(3))
if command in ("save", "async_save"):
    if shard:
        optimizer.consolidate_state_dict(to=None)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    saving = getattr(dcp, command)(state, checkpoint_id=folder)
    if command == "async_save":
        saving.result()
else:
    train(range(3, 6))
    print("bits", zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters())), flush=True)
"""


@pytest.fixture
def run(launch, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def bits(ranks: int, command: str, folder: Path, shard: str) -> set[str]:
        words = ("-np", str(ranks), sys.executable, "program.py", command, str(folder), shard)
        code, out, err = launch(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}).ended()
        assert code == 0, (out + err).decode()
        found = re.findall(r"\[\d\]<stdout>:bits (\d+)\n", out.decode())
        assert len(found) == (0 if "save" in command else ranks)
        return set(found)

    return bits


@pytest.mark.night(but=1)
@pytest.mark.parametrize("saving", ["save", "async_save"])
@pytest.mark.parametrize("shards", [("", "world"), ("world", "")], ids=str)
def test_a_job_of_any_number_of_ranks_goes_on_with_the_bits_of_one_process(run, tmp_path, saving, shards):
    saves, loads = shards
    whole = run(1, "whole", tmp_path, "")
    run(2, saving, tmp_path / "checkpoint", saves)
    for ranks in (1, 4):
        assert run(ranks, "load", tmp_path / "checkpoint", loads) == whole
