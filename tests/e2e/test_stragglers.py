"""Real jobs in which one rank is slow: who is named, in which phase, and the warning about it."""

from __future__ import annotations

import sys

import pytest
from long_run import IS_LONG, chosen
from slow_ranks import PHASE_OF, as_argument, seeded_trials
from slow_ranks import PROGRAM as SLOW_RANK_PROGRAM

pytestmark = pytest.mark.slow

PROGRAM = """
import logging, sys, time
import torch
import hvdlite as hvd
from hvdlite.coordinator import stragglers

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

def is_named():
    if not any(f"rank {slow} " in line and f"longest in {phase}:" in line for line in Warnings.lines):
        return False
    pace = hvd.stragglers()[0]
    return (pace.rank, pace.phase) == (slow, phase)

# On a busy machine the other rank may be named before, if it had no processor for seconds.
named = False
while not named:
    for step, x in enumerate(torch.utils.data.DataLoader(Images(), batch_size=1)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and (named := hvd.broadcast_object(hvd.rank() == 0 and is_named(), root_rank=0)):
            break
if hvd.rank() == 0:
    pace = hvd.stragglers()[0]
    print(pace.rank, pace.phase)
    print(*Warnings.lines, sep="\\n")
"""


@pytest.mark.night(but=1)
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


@pytest.mark.night
@pytest.mark.parametrize("seed", chosen(range(5), few=[0]))
def test_in_each_trial_the_slow_rank_and_its_phase_are_named(launch, seed):
    size = 2 + seed % 2
    plan = seeded_trials(seed, size, 10 if IS_LONG else len(PHASE_OF))
    words = ("-np", str(size), sys.executable, str(SLOW_RANK_PROGRAM), as_argument(plan))
    code, out, err = launch(*words, env={"OMP_NUM_THREADS": "1"}).ended()
    assert code == 0, err.decode()
    lines = [line.partition(">:")[2] for line in out.decode().splitlines()]
    assert len(lines) == len(plan)
    assert [line.partition(":")[0] for line in lines] == [trial.told for trial in plan], out.decode()


SLOW_LINK = """
import torch
import hvdlite as hvd
from hvdlite.coordinator import stragglers
from hvdlite.control import reports

stragglers.WINDOW_S = 1.0
reports._READING_S = 0.2
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(256, 1024)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
for step in range(12):
    model(torch.ones(1, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
hvd.barrier()
if hvd.rank() == 0:
    for pace in hvd.stragglers():
        print(pace.cost < 0.1, pace.wait_s > 2 * sum(pace.seconds.values()), pace)
"""


@pytest.mark.night
def test_a_slow_link_makes_all_ranks_wait_and_none_a_straggler(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    lan.shape("40mbit")  # 0.2 s for each megabyte of gradients
    (tmp_path / "train.py").write_text(SLOW_LINK)
    hosts = ",".join(f"{host.spec}:1" for host in lan.hosts)
    code, out, err = launch("-H", hosts, sys.executable, str(tmp_path / "train.py"), on=lan.desk).ended()
    assert code == 0, err.decode()
    lines = [line.partition(">:")[2] for line in out.decode().splitlines()]
    assert len(lines) == 2
    assert all(line.startswith("True True ") for line in lines), out.decode()
