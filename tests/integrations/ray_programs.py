"""Trains on Ray's workers: with `RayExecutor`, as a program written for Horovod's, and in Ray Train.

    python ray_programs.py RESULTS

It writes what it got in each of these ways to RESULTS.0. One program has all of them, since starting Ray takes long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn

import hvdlite.horovod

WHOLE_BATCH, STEPS = 8, 3
IS_LONG = os.environ.get("TEST_HVDLITE_LONG") == "1"


def trained(name: str, rank: int, size: int) -> list[Tensor]:
    """Trains on this rank's part of each batch; returns the weights."""
    hvd: Any = __import__(name, fromlist=["init"])
    made = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(WHOLE_BATCH, 4, generator=made), torch.randn(WHOLE_BATCH, 2, generator=made)
    torch.manual_seed(7 + rank)  # rank 0's weights must become all ranks'
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if size > 1:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size]).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def in_a_rank(name: str, word: str = "") -> dict[str, Any]:
    hvd: Any = __import__(name, fromlist=["init"])
    hvd.init()
    found = {"rank": hvd.rank(), "size": hvd.size(), "local": (hvd.local_rank(), hvd.local_size()), "word": word}
    variables = {each: os.environ.get(each) for each in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOROVOD_SIZE", "WORD")}
    return found | {"weights": trained(name, hvd.rank(), hvd.size()), "variables": variables}


def fails(name: str) -> None:
    hvd: Any = __import__(name, fromlist=["init"])
    hvd.init()
    if hvd.rank() == 1:
        raise ZeroDivisionError("of rank 1")
    hvd.allreduce(torch.ones(1), name="never")


def dies(name: str) -> None:
    hvd: Any = __import__(name, fromlist=["init"])
    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1), name="never")


class Counter:
    def __init__(self, start: int, *, step: int) -> None:
        self.value, self.step = start, step

    def count(self) -> int:
        self.value += self.step
        return self.value


def failure_of(run: Any) -> str:
    with contextlib.suppress(AssertionError):
        try:
            run()
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            return f"{type(error).__mro__} {error}"
    return "none"


def with_executor() -> dict[str, Any]:
    from hvdlite.ray import RayExecutor  # noqa: PLC0415

    name = "hvdlite"
    # The machine that runs the tests may be busy.
    settings = RayExecutor.create_settings(timeout_s=200)
    executor = RayExecutor(settings, num_workers=2)
    executor.start(Counter, [10], {"step": 2}, extra_env_vars={"WORD": "set"})
    found = {
        "ranks": executor.run(in_a_rank, [name], {"word": "given"}),
        "later": ray.get(executor.run_remote(in_a_rank, (name,))),
        "counts": executor.execute(lambda counter: counter.count()),
        "of rank 0": executor.execute_single(lambda counter: counter.count()),
        "after": executor.execute(lambda counter: counter.value),
        "twice": failure_of(executor.start),
        "failure": failure_of(lambda: executor.run(fails, (name,))),
        "death": failure_of(lambda: executor.run(dies, (name,))),
    }
    executor.shutdown()
    found["not started"] = failure_of(lambda: executor.run(fails, (name,)))
    too_large = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_hosts=2)
    found["too large"] = failure_of(too_large.start)
    return found


def as_written_for_horovod() -> list[dict[str, Any]]:
    # Ray runs already: so its workers do not have the variables by which child processes find the shim.
    hvdlite.horovod.install()
    from horovod.ray.runner import RayExecutor  # noqa: PLC0415

    settings = RayExecutor.create_settings(timeout_s=200)
    executor = RayExecutor(settings, num_workers=2, use_gpu=False)
    executor.start()
    found = executor.run(in_a_rank, kwargs={"name": "horovod.torch"})
    executor.shutdown()
    return found


def with_ray_train(results: str) -> dict[str, list[dict[str, Any]]]:
    from ray.train import RunConfig, ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    from hvdlite.ray import HvdliteConfig  # noqa: PLC0415

    def train(config: dict[str, Any]) -> None:
        import ray.train  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        was_initialized = dist.is_initialized()
        found = in_a_rank("hvdlite")
        found |= {"initialized": was_initialized, "world_rank": ray.train.get_context().get_world_rank()}
        torch.save(found, f"{results}.{config['kind']}.{found['rank']}")

    backends = {"hvdlite": {"torch_config": HvdliteConfig()}, **({"torch": {}} if IS_LONG else {})}
    for kind, backend in backends.items():
        TorchTrainer(
            train,
            train_loop_config={"kind": kind},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=kind, storage_path=str(Path(results).parent / "ray")),
            **backend,
        ).fit()
    return {kind: [torch.load(f"{results}.{kind}.{rank}", weights_only=True) for rank in range(2)] for kind in backends}


def start_ray() -> None:
    for attempt in range(5):
        try:
            ray.init(num_cpus=4, include_dashboard=False)
        except Exception:  # Ray's own, raised if its processes have not started within 30 s, on a machine that is busy
            ray.shutdown()
            if attempt == 4:
                raise
        else:
            return


if __name__ == "__main__":
    (results_path,) = sys.argv[1:]
    start_ray()
    results = {
        "executor": with_executor(),
        "horovod": as_written_for_horovod() if IS_LONG else None,
        "train": with_ray_train(results_path),
        "alone": trained("hvdlite", 0, 1),
    }
    torch.save(results, f"{results_path}.0")
    ray.shutdown()
