"""
`Ranks`: the ranks that measure together, with their devices, barriers, timing, progress bar and free memory.

All commands use it. The things compared take turns, block by block in one process, so that other load on the machine
affects all of them alike.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
import torch.distributed as dist
from hvdlite_wire.job_contract import RANK
from torch._C._distributed_c10d import HashStore

from ..comm.engine import HasMemory
from ..comm.group import Group
from ..comm.reduce_op import Max
from ..runtime.make_world import World
from .arguments import OptionError, show_count, show_size

# Seconds, or bytes of memory, by name of the variant or action.
Samples = dict[str, list[float]]
_SHARED_MEMORY = "/dev/shm"
# The share of free memory that a benchmark may use. The rest is left to other programs.
_USABLE_SHARE = 0.9
# Under hvdlite-run each update of the progress bar prints a line.
_SECONDS_PER_LINE = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """The size of the job and the transport of its tensors, shown as ``4 ranks on 2 hosts, over gloo``."""

    ranks: int = 1
    hosts: int = 1
    wire: str = ""

    def __str__(self) -> str:
        ranks = show_count(self.ranks, "rank")
        return ranks if self.ranks == 1 else f"{ranks} on {show_count(self.hosts, 'host')}, over {self.wire}"


class Ranks:
    """All ranks of the job, each on its device. Barriers and results use a separate group."""

    def __init__(self, world: World, device_type: str) -> None:
        """``device_type`` is cpu or cuda. Every rank must call it.

        Raises OptionError on all ranks if one has no GPU of its own, or a different device type.
        """
        self.group = world.group
        self.rank, self.size = world.group.rank, world.group.size
        self._bar: Any = None
        self._local_size = world.topology.local_size
        self._control = world.group.duplicate()
        self._rival: dist.ProcessGroup | None = None
        self._owns_default = False
        host, local_rank, problem = self.group.hosts[self.rank], world.topology.local_rank, None
        first_type = self._control.all_gather_json(device_type, "devices of the benchmark")[0]
        if device_type != first_type:
            problem = f"rank 0 would measure on {first_type} and rank {self.rank} ({host}) on {device_type}: "
            problem += "pass --device cpu, or start ranks only on hosts with GPUs"
        elif device_type == "cuda" and local_rank >= torch.cuda.device_count():
            problem = f"--device cuda: rank {self.rank} has no GPU of its own; {host} has "
            problem += f"{torch.cuda.device_count()}: start at most as many ranks there"
        self.require(problem)
        self.device, self.rival_name = torch.device("cpu"), "gloo"
        if device_type == "cuda":
            torch.cuda.set_device(local_rank)
            self.device, self.rival_name = torch.device("cuda", local_rank), "nccl"

    @property
    def job(self) -> Job:
        hosts = len(set(self.group.hosts))
        wire = "NCCL" if self.device.type == "cuda" else "gloo"
        if self.shares_memory(self.group):
            wire = "shared memory" if hosts == 1 else "shared memory and gloo"
        return Job(self.size, hosts, wire if self.size > 1 else "")

    def shares_memory(self, group: Group) -> bool:
        """Whether the group's engine reduces CPU tensors in shared memory, as it does for gradients."""
        return self.device.type == "cpu" and isinstance(group.engine, HasMemory)

    def synchronize(self) -> None:
        """Waits until this rank's GPU is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits until all ranks call it and their GPUs are idle."""
        self.synchronize()
        self._control.all_reduce(torch.zeros(1), "barrier of the benchmark").wait()

    def slowest(self, seconds: float) -> float:
        """Returns the largest value of all ranks. Every rank must call it."""
        value = torch.tensor([seconds], dtype=torch.float64)
        self._control.all_reduce(value, "times of the benchmark", Max).wait()
        return float(value.item())

    def mean(self, value: float) -> float:
        """Returns the mean over all ranks. Every rank must call it."""
        return fmean(self._control.all_gather_json(value, "results of the benchmark"))

    def first(self, value: str | None) -> str | None:
        """Returns the first rank's value that is not None, or None. Every rank must call it."""
        values = self._control.all_gather_json(value, "results of the benchmark")
        return next((each for each in values if each is not None), None)

    def require(self, problem: str | None) -> None:
        """Raises OptionError on all ranks if one of them has a problem. Every rank must call it."""
        problem = self.first(problem)
        if problem is not None:
            raise OptionError(problem)

    def show_progress(self, turns: int) -> None:
        """Shows a progress bar on rank 0's stderr, if tqdm is installed, on a terminal or under a launcher."""
        is_terminal = sys.stderr.isatty()
        if self.rank > 0 or not (is_terminal or os.environ.get(RANK)):
            return
        with suppress(ImportError):
            tqdm = importlib.import_module("tqdm").tqdm
            style = {"leave": False} if is_terminal else {"mininterval": _SECONDS_PER_LINE, "ncols": 80, "ascii": True}
            self._bar = tqdm(total=turns, unit="turn", **style)

    def progress(self, what: str, turns: int = 0) -> None:
        """Updates the progress bar: ``what`` is measured now, and ``turns`` more are done."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update(turns)

    def hide_progress(self) -> None:
        """Removes the progress bar, or ends its line."""
        if self._bar is not None:
            self._bar.close()

    def timed(self, action: Callable[[], object], repeats: int = 1) -> float:
        """Returns the mean seconds of ``repeats`` runs of an action, until this rank's device is idle."""
        begun = time.perf_counter()
        for _ in range(repeats):
            action()
        self.synchronize()
        return (time.perf_counter() - begun) / repeats

    def take_turns(
        self,
        what: str,
        blocks: Mapping[str, Callable[[], float]],
        rounds: int,
        samples: Samples,
        after_round: Callable[[], object] = lambda: None,
    ) -> None:
        """Runs each block once per round, and appends its time on the slowest rank to ``samples``.

        All ranks must call it with the same blocks, and begin each block together. The order of blocks changes with
        each round. ``what`` is the label of the progress bar. ``after_round`` is called when all blocks had their turn.
        It may remove blocks, the same ones on all ranks; without any, no further round begins.
        """
        self.progress(what)
        for number in range(rounds):
            names = list(blocks)
            if not names:
                return
            start = number % len(names)
            order = names[start:] + names[:start]
            for name in order if number % 2 == 0 else reversed(order):
                self.barrier()
                samples[name].append(self.slowest(blocks[name]()))
            self.progress(what, 1)
            after_round()

    def rival(self) -> dist.ProcessGroup:
        """Returns torch's own gloo or NCCL process group of all ranks. The first call must be made on every rank."""
        if self._rival is None:
            if not dist.is_initialized():
                # On a single rank hvdlite creates no process group, but DDP needs one.
                dist.init_process_group(self.rival_name, store=HashStore(), rank=0, world_size=1)
                self._owns_default = True
            group = dist.new_group(backend=self.rival_name)
            assert isinstance(group, dist.ProcessGroup), "every rank is a member of it"
            self._rival = group
        return self._rival

    def close(self) -> None:
        """Drops the group of `rival`, and destroys the default process group if `rival` created it."""
        self._rival = None
        if self._owns_default:
            dist.destroy_process_group()

    def why_too_large(self, bytes_per_rank: int, shared_per_rank: int = 0) -> str | None:
        """Returns the first rank's reason why its host has too little free memory, or None. Every rank must call it.

        ``bytes_per_rank`` is memory of the device, ``shared_per_rank`` memory in /dev/shm.
        """
        needs: list[tuple[int, float, str]] = []
        if self.device.type == "cuda":
            needs.append((bytes_per_rank, torch.cuda.mem_get_info(self.device)[0], "the GPU's memory"))
        else:
            free = min(psutil.virtual_memory().available, free_in_cgroup())
            needs.append(((bytes_per_rank + shared_per_rank) * self._local_size, free, "memory"))
            if shared_per_rank and os.path.isdir(_SHARED_MEMORY):
                free = shutil.disk_usage(_SHARED_MEMORY).free
                needs.append((shared_per_rank * self._local_size, free, _SHARED_MEMORY))
        why = [
            f"needs {show_size(needed)}, and {show_size(free)} of {of_what} are free on {self.group.hosts[self.rank]}"
            for needed, free, of_what in needs
            if needed > free * _USABLE_SHARE
        ]
        # This waits for all ranks, so none of them allocates before all have read their free memory.
        return self.first(why[0] if why else None)


def free_in_cgroup(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the free bytes within this process's cgroup v2 limits (set by Slurm, a container or systemd), or inf."""
    free = math.inf
    with suppress(OSError, StopIteration):
        group = root / next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
        for each in [group, *group.parents]:
            with suppress(OSError, ValueError, StopIteration):
                limit, taken = (int((each / f"memory.{name}").read_text()) for name in ("max", "current"))
                # Linux frees cached files when memory is needed, so they count as free.
                cached = re.search(r"^inactive_file (\d+)", (each / "memory.stat").read_text(), re.MULTILINE)
                free = min(free, limit - taken + (int(cached[1]) if cached else 0))
    return free
