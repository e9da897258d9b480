"""A training in which one rank is slow, as the first argument says for each trial; rank 0 prints who is named."""

import json
import os
import subprocess
import sys
import time

import torch

import hvdlite as hvd
from hvdlite.control import reports
from hvdlite.coordinator import stragglers

reports._READING_S, reports._READINGS_PER_S = 0.0, 10**9  # a reading of each step
STEPS = 30
# In the first steps of a trial those of the one before are forgotten. The others count together: where a rank is
# stopped again and again it depends on chance in which phase of a single step it is stopped.
FORGETTING = 5
EXTRA_S = 0.06

# What cpulimit does: the process $1 runs for a tenth of the time, until standard input ends.
LIMIT = """
import os, select, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.09)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    if select.select([0], [], [], 0.01)[0]:
        break
"""


def delay(here):
    if here == kind and hvd.rank() == slow:
        time.sleep(EXTRA_S)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        delay("sleeping data set")
        return torch.ones(8)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        # Not computing, so that it takes as long on a busy machine. Where the rank is stopped again and again, most of
        # these times must fall into forward: there it has to be running many times.
        for _ in range(6 if kind == "little processor time" else 2):
            time.sleep(0.005)
        if kind == "spinning forward" and hvd.rank() == slow:
            until = time.perf_counter() + EXTRA_S
            while time.perf_counter() < until:
                pass
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: delay("backward hook"))
        return self.second(hidden)


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        delay("optimizer")
        return super().step(closure)


kind, slow = "", -1
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = Model()
optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01), model.named_parameters())
for trial in json.loads(sys.argv[1]):
    kind, slow = trial["kind"], trial["rank"]
    limiter = None
    if kind == "little processor time" and hvd.rank() == slow:
        limiter = subprocess.Popen([sys.executable, "-ISc", LIMIT, str(os.getpid())], stdin=subprocess.PIPE)
    for step, x in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=1)):
        stragglers.WINDOW_S = 0.0 if step < FORGETTING else float("inf")  # not a minute, which would be long
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.barrier()
    if limiter is not None:
        limiter.communicate()
    if hvd.rank() == 0:
        worst = hvd.stragglers()[0]
        print(f"rank {worst.rank} in {worst.phase}: {worst}", flush=True)
    hvd.barrier()
