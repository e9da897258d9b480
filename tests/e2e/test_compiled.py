"""Programs that compile their training functions, optimizer and collectives included."""

from __future__ import annotations

import sys
from pathlib import Path

import every_call
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import functools, itertools, sys, torch
import hvdlite as hvd, every_call
from every_call import batch, model_of, ones
hvd.init()
compiled = functools.partial(torch.compile, backend=sys.argv[1])
turns = itertools.count()

def compiled_by_turns(function):
    # Compiled on one rank, the next one on the other, with whose program as it is written it has to agree.
    return compiled(function) if next(turns) % 2 == hvd.rank() else function

# The functions compare what they compute with one process on the whole batch.
train = every_call.train
if sys.argv[1] == "eager":
    for each in (every_call.collectives, every_call.batch_norm, every_call.states):
        compiled_by_turns(each)()
    every_call.train = lambda kind, **options: compiled_by_turns(train)(kind, **options)
else:
    every_call.train = compiled(train)
every_call.optimizers()
every_call.train = compiled(train)
for option in ("compiled_autograd", "trace_autograd_ops"):
    torch.compiler.reset()
    with torch._dynamo.config.patch({option: True}):
        every_call.train("plain", bucket_cap_mb=1e-5)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 10

def scaled(compiled, **options):
    # The same bits, compiled or not, with an infinity on one rank in one step.
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    def train(x, factor):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    train = compiled(train)
    for step in range(5):
        train(batch("plain", step, hvd.rank(), 2), float("inf") if step == 2 and hvd.rank() else 1.0)
    optimizer.close()
    return [*(param.detach() for param in model.parameters()), torch.tensor(scaler.get_scale())]

for options in {}, {"op": hvd.Adasum}, {"compression": hvd.Compression.int8}:
    with every_call.on_hosts("a", "b"):
        assert all(map(torch.equal, scaled(lambda train: train, **options), scaled(compiled, **options))), options

model = model_of()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
compiled(lambda: (optimizer.step(), optimizer.param_groups[0]["lr"]))()
assert compiled(lambda x: x * hvd.size() + hvd.rank(), fullgraph=True)(ones(1)).item() == hvd.size() + hvd.rank()
for function in (optimizer.step, optimizer.synchronize, lambda: hvd.allreduce(ones(1)), hvd.barrier):
    try:
        compiled(lambda: function(), fullgraph=True)()
    except torch._dynamo.exc.Unsupported as error:
        assert "hvdlite communicates with other ranks there" in str(error), error
    else:
        raise AssertionError("it was compiled")
print("all done")
"""


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.night)])
def test_whole_training_functions_can_be_compiled(launch, tmp_path, backend):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(Path(every_call.__file__).parent)}
    job = launch("-np", "2", sys.executable, str(program), backend, env=environment)
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert out.count(b"all done") == 2
