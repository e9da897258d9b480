"""Elastic programs in the form in which Horovod's documentation has them: they run unchanged, and survive a kill -9."""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = pytest.mark.slow

PATIENCE_S = 300

# The fault of both: worker 1 is killed once, at a batch that the program has counted.
FAULT = """
import os, signal

def lose(batch):
    if os.environ["HVDLITE_WORKER"] == "1" and batch == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""

# A loader over an ElasticSampler, loop variables that are attributes of the state, a metric averaged over all ranks,
# and a learning rate that follows the number of ranks.
CLASSIFIER = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd

hvd.init()
torch.manual_seed(42)
images = torch.randn(160, 1, 6, 6)
labels = (images.mean(dim=(1, 2, 3)) > 0).long()
train_dataset = torch.utils.data.TensorDataset(images, labels)
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=8, sampler=train_sampler)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.out = nn.Linear(64, 2)

    def forward(self, x):
        return F.log_softmax(self.out(F.relu(self.conv(x)).flatten(1)), dim=1)

model = Net()
base_lr = 0.05
optimizer = optim.SGD(model.parameters(), lr=base_lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
)

def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()

def test(state):
    state.model.eval()
    with torch.no_grad():
        output = state.model(images)
    loss = metric_average(F.nll_loss(output, labels).item(), "avg_loss")
    accuracy = metric_average((output.argmax(1) == labels).float().mean().item(), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: epoch {state.epoch}: loss {loss:.4f}, accuracy {100 * accuracy:.1f} %", flush=True)
    return accuracy

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 9):
        state.model.train()
        for state.batch, (data, target) in enumerate(train_loader, state.batch):
            lose(10 * (state.epoch - 1) + state.batch)
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.train_sampler.record_batch(state.batch, 8)
            if state.batch % 4 == 3:
                state.commit()
        state.train_sampler.set_epoch(state.epoch)
        state.batch = 0
        state.accuracy = test(state)
        state.commit()

def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = base_lr * hvd.size()

state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, accuracy=0.0, train_sampler=train_sampler)
state.register_reset_callbacks([on_state_reset])
train(state)
print("end", hvd.rank(), hvd.size(), state.epoch, state.accuracy > 0.9, optimizer.param_groups[0]["lr"], flush=True)
"""

# `TorchState` from its own module, a list that is appended to, and no epochs.
BENCHMARK = """
import timeit
import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd
from horovod.torch.elastic import TorchState

hvd.init()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 1000))
lr = 0.01
optimizer = optim.SGD(model.parameters(), lr=lr * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)
data = torch.randn(4, 3, 8, 8)
target = torch.LongTensor(4).random_() % 1000

def benchmark_step(state):
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()

def log(s, nl=True):
    if hvd.rank() == 0:
        print(s, end="\\n" if nl else "", flush=True)

log("Number of CPUs: %d" % hvd.size())

@hvd.elastic.run
def run_benchmark(state):
    if not state.warm:
        log("Running warmup...")
        timeit.timeit(lambda: benchmark_step(state), number=3)
        state.warm = True
        state.commit()
    if state.iter == 0:
        log("Running benchmark...")
    for x in range(state.iter, 10):
        lose(x)
        time = timeit.timeit(lambda: benchmark_step(state), number=2)
        img_sec = 4 * 2 / time
        log("Iter #%d: %.1f img/sec per CPU" % (x, img_sec))
        state.img_secs.append(img_sec)
        state.iter = x + 1
        state.commit()

def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * hvd.size()

state = TorchState(model=model, optimizer=optimizer, img_secs=[], iter=0, warm=False)
state.register_reset_callbacks([on_state_reset])
run_benchmark(state)
log("Img/sec per CPU: %.1f" % (sum(state.img_secs) / len(state.img_secs)))
print("end", hvd.rank(), hvd.size(), state.iter, len(state.img_secs), optimizer.param_groups[0]["lr"], flush=True)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("program", "end"), [(CLASSIFIER, "8 True 0.1"), (BENCHMARK, "10 10 0.02")], ids=["classifier", "benchmark"]
)
def test_a_worker_of_a_horovod_program_is_replaced_and_all_go_on_from_the_last_commit(launch, program, end):
    # With --min-np 2, so that the survivor waits for the one that takes the place.
    flags = ["--horovod", "-np", "2", "--min-np", "2", "--max-np", "2", "--on-failure", "replace"]
    job = launch(*flags, sys.executable, "-c", FAULT + program)
    code, out, err = job.ended(PATIENCE_S)
    told = err.decode()
    assert code == 0, told
    ends = sorted(line.partition(":")[2] for line in out.decode().splitlines() if ":end " in line)
    assert ends == [f"end {rank} 2 {end}" for rank in range(2)], out.decode()
    assert "worker 1 (rank 1 on localhost) was killed by SIGKILL; worker 2 joins as rank 1 on localhost" in told
    assert not re.search("Traceback|was set and was not given", told)
    job.assert_gone()
