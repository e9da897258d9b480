"""
Those who measure together: what they tell each other meanwhile, and the process group of hvdlite's rival.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..comm.engine import HasMemory
from ..comm.group import Group
from ..comm.reduce_op import Max
from ..optim.optimizer import DEFAULT_BUCKET_CAP_BYTES
from ..runtime.bootstrap import World
from .errors import UsageError
from .setting import Setting


class Ranks:
    """All ranks of the job, each on its device. What they say goes over a group of their own."""

    def __init__(self, world: World, device_type: str) -> None:
        """``device_type`` is cpu or cuda; a UsageError where this rank has no GPU of its own."""
        self.topology = world.topology
        self.group = world.group
        self.rank, self.size = world.group.rank, world.group.size
        given = world.environment.fusion_threshold_bytes
        self.bucket_cap_bytes = DEFAULT_BUCKET_CAP_BYTES if given is None else given
        self._control = world.group.duplicate()
        self._rival: dist.ProcessGroup | None = None
        self._owns_default = False
        self.device = torch.device("cpu")
        if device_type == "cuda":
            local_rank, count = world.topology.local_rank, torch.cuda.device_count()
            if local_rank >= count:
                raise UsageError(
                    f"--device cuda: rank {self.rank} has no GPU of its own; {world.group.hosts[self.rank]} has "
                    f"{count}: start as many ranks there"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)

    @property
    def setting(self) -> Setting:
        """How many they are, where, and what carries tensors between them."""
        hosts = len(set(self.group.hosts))
        wire = "NCCL" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cpu" and isinstance(self.group.engine, HasMemory):
            wire = "shared memory" if hosts == 1 else "shared memory and gloo"
        return Setting(self.size, hosts, wire if self.size > 1 else "")

    def synchronize(self) -> None:
        """Wait until this rank's GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for the others, with nothing under way on any device."""
        self.synchronize()
        self._control.all_reduce(torch.zeros(1), "barrier of the benchmark").wait()

    def slowest(self, seconds: float) -> float:
        """The most that any rank says, to all."""
        value = torch.tensor([seconds], dtype=torch.float64)
        self._control.all_reduce(value, "times of the benchmark", Max).wait()
        return float(value.item())

    def gather(self, value: object) -> list[Any]:
        """What each says, by rank, to all."""
        return self._control.all_gather_json(value, "results of the benchmark")

    def first(self, value: object) -> Any:
        """What the first rank that says something other than None says, to all."""
        return next((each for each in self.gather(value) if each is not None), None)

    @contextmanager
    def channel(self) -> Iterator[Group]:
        """A group of hvdlite's between all ranks, to be measured; what its engine offers of memory ends with it."""
        group = self.group.duplicate()
        try:
            yield group
        finally:
            group.close()

    @property
    def rival_name(self) -> str:
        """What hvdlite is measured against."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def rival(self) -> dist.ProcessGroup:
        """The process group of torch's own between all ranks; the first call must be made by all."""
        if self._rival is None:
            if not dist.is_initialized():
                # One rank, for which hvdlite needs no group, and DDP does.
                store = HashStore()
                dist.init_process_group(self.rival_name, store=store, rank=0, world_size=1)
                self._owns_default = True
            group = dist.new_group(backend=self.rival_name)
            assert isinstance(group, dist.ProcessGroup), "every rank is a member of it"
            self._rival = group
        return self._rival

    def close(self) -> None:
        """Give back what is not hvdlite's."""
        self._rival = None
        if self._owns_default:
            dist.destroy_process_group()
