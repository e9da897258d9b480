"""Jobs of programs that take a step before their first broadcast, under Horovod's name and under hvdlite's."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
import {name} as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[1])
print("trained")
"""


@pytest.mark.parametrize(("name", "is_right"), [("horovod.torch", True), ("hvdlite.torch", False)])
def test_a_program_that_steps_before_its_first_broadcast_goes_on_under_horovods_name(launch, tmp_path, name, is_right):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(name=name))
    code, out, err = launch("-np", "2", "--horovod", sys.executable, str(program)).ended()
    assert (code == 0) == is_right, err.decode()
    assert out.count(b"trained") == (2 if is_right else 0)
    assert err.count(b"Training goes on") == is_right
    assert (b"MismatchError: parameter 'weight'" in err) == (not is_right)
