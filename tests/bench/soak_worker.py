"""
The program of each worker of a soak: a small model in `hvd.elastic.run`, which writes down every step that it finishes.

`soak.py` starts it under hvdlite-run. Its arguments are the seconds of training and the directory of all files.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from soak import BATCH, Line
from torch import nn

import hvdlite.torch as hvd

_WIDTH = 256
_COMMIT_EVERY = _HASH_EVERY = 10


class _Model(nn.Sequential):
    """Three layers. The gradient of ``is_over`` is not 0 on a rank for which the time is over."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 8))
        super().__init__(*layers)
        self.is_over = nn.Parameter(torch.zeros(1))

    def hash(self) -> str:
        """Returns 64 bits of a hash of all parameters."""
        found = hashlib.blake2b(digest_size=8)
        for param in self.parameters():
            found.update(param.detach().numpy().tobytes())
        return found.hexdigest()


def main(seconds: float, directory: Path) -> None:
    """Trains until the time is over on any rank. Every worker of the job must call it."""
    hvd.init()
    worker = int(os.environ["HVDLITE_WORKER"])
    generator = torch.Generator().manual_seed(worker)
    file = os.open(directory / f"{worker}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model = _Model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    # All clocks are of one host: a worker that joins gets the end from the others.
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, round=0, ends_at=None)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.round += 1
        state.ends_at = state.ends_at or time.monotonic() + seconds
        state.commit()
        ranks_before = 0
        while True:
            optimizer.zero_grad()
            loss = model(torch.randn(BATCH, _WIDTH, generator=generator)).square().mean()
            (loss + model.is_over.sum() * float(time.monotonic() >= state.ends_at)).backward()
            optimizer.step()
            # No collective of this program's own decides when to end: a fault within it would lead to the last commit.
            # The average is the same on all ranks.
            assert model.is_over.grad is not None, "it has a gradient in each step"
            ends = bool(model.is_over.grad.item())
            hashed = model.hash() if ends or state.step % _HASH_EVERY == 0 or hvd.size() != ranks_before else None
            ranks_before = hvd.size()
            os.write(file, Line(state.round, state.step, time.monotonic(), BATCH, hashed).text().encode())
            state.step += 1
            if ends:
                return
            if state.step % _COMMIT_EVERY == 0:
                state.commit()

    train(state)


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
