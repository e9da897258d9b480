"""One world after another in the processes of hvdlite-run: the same optimizer goes on, and no memory accumulates."""

from __future__ import annotations

import json

import pytest
import torch
from long_run import trials
from torch import nn

pytestmark = pytest.mark.slow

WORLDS = trials(40, 100)

PROGRAM = f"""
import gc, json, os, time
import torch, hvdlite as hvd

def held():
    gc.collect()
    return dict(
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        shared=sum("/dev/shm" in line for line in open("/proc/self/maps")),
    )

hvd.init()
param = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.01, momentum=0.5), [("weight", param)])
seen = []
for world in range({WORLDS}):
    optimizer.zero_grad()
    ((param - hvd.rank() - world) ** 2).sum().backward()
    optimizer.step()
    if world in (20, {WORLDS - 1}):
        seen.append(held())
        # A connection of the world before may be about to be closed.
        give_up_at = time.monotonic() + 30
        while any(seen[-1][kind] > seen[0][kind] for kind in seen[0]) and time.monotonic() < give_up_at:
            seen[-1] = held()
    hvd.shutdown()
    hvd.init()
print(json.dumps(dict(rank=hvd.rank(), seen=seen, weight=param.tolist())), flush=True)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("env", [{}, {"HVDLITE_SHM": "0"}], ids=["shared memory", "gloo"])
def test_the_same_optimizer_goes_on_in_many_worlds_and_nothing_piles_up(launch, env):
    job = launch("-np", "2", "python", "-c", PROGRAM, env=env)
    code, out, err = job.ended(350)
    assert code == 0, err.decode()
    alone = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([alone], lr=0.01, momentum=0.5)
    for world in range(WORLDS):
        optimizer.zero_grad()
        torch.stack([((alone - rank - world) ** 2).sum() for rank in range(2)]).mean().backward()
        optimizer.step()
    for line in out.decode().splitlines():
        told = json.loads(line.partition("<stdout>:")[2])
        first, last = told["seen"]
        assert all(last[kind] <= first[kind] for kind in first), told
        torch.testing.assert_close(torch.tensor(told["weight"]), alone.detach())
    assert len(out.decode().splitlines()) == 2
    job.assert_gone()


SIZES = (3, 2, 3)

PROGRAM_OF_SIZES = f"""
import json, os, sys
import torch, torch.distributed as dist, hvdlite as hvd

own, directory = int(os.environ["RANK"]), sys.argv[1]
param, optimizer = torch.nn.Parameter(torch.zeros(3)), None
for world, size in enumerate({SIZES}):
    if own >= size:
        continue
    store = dist.FileStore(os.path.join(directory, str(world)), size)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size)
    hvd.init()
    assert hvd.size() == size
    hvd.broadcast_parameters({{"weight": param}}, root_rank=0)
    if optimizer is None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("weight", param)])
    for _ in range(3):
        optimizer.zero_grad()
        ((param - hvd.rank()) ** 2).sum().backward()
        optimizer.step()
    hvd.shutdown()
    dist.destroy_process_group()
print(json.dumps(param.tolist()), flush=True)
# PyTorch 2.13 now and then aborts where the interpreter goes before a thread of the program's own gloo group.
os._exit(0)
"""


@pytest.mark.night
def test_worlds_may_have_fewer_and_more_ranks(launch, tmp_path):
    job = launch("-np", "3", "-H", "localhost:3", "python", "-c", PROGRAM_OF_SIZES, str(tmp_path))
    code, out, err = job.ended(120)
    assert code == 0, err.decode()
    alone = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([alone], lr=0.1)
    for size in SIZES:
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([((alone - rank) ** 2).sum() for rank in range(size)]).mean().backward()
            optimizer.step()
    lines = out.decode().splitlines()
    assert len(lines) == 3
    for line in lines:
        torch.testing.assert_close(torch.tensor(json.loads(line.partition("<stdout>:")[2])), alone.detach())
    job.assert_gone()
