"""A program that trains and communicates with Ignite's `idist` on its Horovod backend, as any Ignite program does.

    hvdlite-run --horovod -np 2 python ignite_program.py own RESULTS
    python -m hvdlite.horovod ignite_program.py parallel RESULTS

Each rank writes what it got to RESULTS.RANK.
"""

from __future__ import annotations

import sys
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WHOLE_BATCH = 8


def trained() -> tuple[list[int], list[Tensor]]:
    """Returns the samples that this rank has drawn, and the weights."""
    made = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(32, 4, generator=made), torch.randn(32, 2, generator=made), torch.arange(32))
    torch.manual_seed(7 + idist.get_rank())  # rank 0's weights must become all ranks'
    model = idist.auto_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.02))
    loader = idist.auto_dataloader(samples, batch_size=WHOLE_BATCH, shuffle=False)
    drawn: list[int] = []

    def update(_: Engine, batch: list[Tensor]) -> float:
        drawn.extend(batch[2].tolist())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    Engine(update).run(loader, max_epochs=2)
    return drawn, [param.detach() for param in model.parameters()]


def collectives() -> dict[str, Any]:
    rank = idist.get_rank()
    group = idist.new_group([1])
    idist.barrier()
    return {
        "sum": idist.all_reduce(rank + 1),
        "average": idist.all_reduce(torch.tensor([rank + 1.0]), op="AVERAGE").tolist(),
        "max": idist.all_reduce(torch.tensor([rank, 5 - rank]), op="MAX").tolist(),
        "gathered": idist.all_gather(torch.tensor([rank, 7])).tolist(),
        "gathered in a group": idist.all_gather(torch.tensor([rank]), group=group).tolist(),
        "strings": idist.all_gather("x" * rank),
        "objects": idist.all_gather({"rank": rank}),
        "broadcast": idist.broadcast(torch.tensor([rank]), src=1).tolist(),
        "text": idist.broadcast(f"from {rank}", src=1),
    }


def place() -> dict[str, Any]:
    return {
        "backend": idist.backend(),
        "model": idist.model_name(),
        "size": idist.get_world_size(),
        "rank": idist.get_rank(),
        "local_rank": idist.get_local_rank(),
        "per node": idist.get_nproc_per_node(),
        "nodes": idist.get_nnodes(),
        "node": idist.get_node_rank(),
    }


def within(local_rank: int, results: str, *, word: str) -> None:
    found = {"local_rank": local_rank, "word": word, "place": place(), "sum": idist.all_reduce(1)}
    torch.save(found, f"{results}.{idist.get_rank()}")


if __name__ == "__main__":
    kind, results_path = sys.argv[1:]
    if kind == "own":
        idist.initialize("horovod")
        drawn, weights = trained()
        found = {"place": place(), "drawn": drawn, "weights": weights, "collectives": collectives()}
        torch.save(found, f"{results_path}.{idist.get_rank()}")
        idist.finalize()
        assert idist.get_world_size() == 1
    elif kind == "alone":
        drawn, weights = trained()
        torch.save({"drawn": drawn, "weights": weights}, f"{results_path}.0")
    else:
        started = {"nproc_per_node": 2} if kind == "parallel that starts" else {}
        with idist.Parallel(backend="horovod", **started) as parallel:
            parallel.run(within, results_path, word="given")
