"""
The ranks that measure together: their devices, barriers, timing, progress bar and free memory.

What is compared runs in turns, block by block in one process, so that other load on the machine hits all of it alike.
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
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..comm.engine import HasMemory
from ..comm.group import Group
from ..comm.reduce_op import Max
from ..environment import told_by_launcher
from ..optim.optimizer import DEFAULT_BUCKET_CAP_BYTES
from ..runtime.bootstrap import World
from .arguments import UsageError
from .units import show_ranks, show_size

# Seconds, or bytes of memory, by the name of what was measured.
Samples = dict[str, list[float]]
_SHARED_MEMORY = "/dev/shm"
# The rest of what is free is left to other programs.
_USABLE_SHARE = 0.9
# Under hvdlite-run each redrawing of the progress bar is a line.
_SECONDS_PER_LINE = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """The size of the job and what carries its tensors, shown as ``4 ranks on 2 hosts, over gloo``."""

    ranks: int = 1
    hosts: int = 1
    wire: str = ""

    def __str__(self) -> str:
        if self.ranks == 1:
            return show_ranks(1)
        return f"{show_ranks(self.ranks)} on {self.hosts} host{'s'[: self.hosts - 1]}, over {self.wire}"


class Ranks:
    """All ranks of the job, each on its device. Barriers and results travel over a group of their own."""

    def __init__(self, world: World, device_type: str) -> None:
        """``device_type`` is cpu or cuda. Raises UsageError where a rank has no GPU of its own, or another device."""
        self.group = world.group
        self.rank, self.size = world.group.rank, world.group.size
        self._bar: Any = None
        given = world.environment.fusion_threshold_bytes
        self.bucket_cap_bytes = DEFAULT_BUCKET_CAP_BYTES if given is None else given
        self._local_size = world.topology.local_size
        self._control = world.group.duplicate()
        self._rival: dist.ProcessGroup | None = None
        self._owns_default = False
        self.device, self.rival_name = self._choose_device(device_type, world.topology.local_rank)

    def _choose_device(self, device_type: str, local_rank: int) -> tuple[torch.device, str]:
        host, problem = self.group.hosts[self.rank], None
        first_type = self._control.all_gather_json(device_type, "devices of the benchmark")[0]
        if device_type != first_type:
            problem = f"rank 0 would measure on {first_type} and rank {self.rank} ({host}) on {device_type}: "
            problem += "pass --device cpu, or start ranks where there are GPUs alone"
        elif device_type == "cuda" and local_rank >= torch.cuda.device_count():
            problem = f"--device cuda: rank {self.rank} has no GPU of its own; {host} has "
            problem += f"{torch.cuda.device_count()}: start as many ranks there"
        self.require(problem)
        if device_type == "cpu":
            return torch.device("cpu"), "gloo"
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), "nccl"

    @property
    def job(self) -> Job:
        """The size of the job, and what carries its tensors."""
        hosts = len(set(self.group.hosts))
        wire = "NCCL" if self.device.type == "cuda" else "gloo"
        if self.shares_memory(self.group):
            wire = "shared memory" if hosts == 1 else "shared memory and gloo"
        return Job(self.size, hosts, wire if self.size > 1 else "")

    def shares_memory(self, group: Group) -> bool:
        """Whether the group's engine reduces tensors of the CPU in shared memory, as it does with gradients."""
        return self.device.type == "cpu" and isinstance(group.engine, HasMemory)

    def synchronize(self) -> None:
        """Wait until this rank's GPU is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until all ranks are here and their GPUs are idle."""
        self.synchronize()
        self._control.all_reduce(torch.zeros(1), "barrier of the benchmark").wait()

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64)
        self._control.all_reduce(value, "times of the benchmark", Max).wait()
        return float(value.item())

    def mean(self, value: float) -> float:
        """The mean over ranks."""
        values = self._control.all_gather_json(value, "results of the benchmark")
        return float(sum(values) / len(values))

    def first(self, value: str | None) -> str | None:
        """The value of the first rank that has one other than None."""
        values = self._control.all_gather_json(value, "results of the benchmark")
        return next((each for each in values if each is not None), None)

    def require(self, problem: str | None) -> None:
        """Raise a UsageError on all ranks where one of them has a problem. Every rank must call it."""
        problem = self.first(problem)
        if problem is not None:
            raise UsageError(problem)

    def show_progress(self, turns: int) -> None:
        """Have rank 0 draw a progress bar on stderr, where tqdm is installed and somebody would see it."""
        is_terminal = sys.stderr.isatty()
        if self.rank > 0 or not (is_terminal or told_by_launcher("RANK", os.environ)):
            return
        with suppress(ImportError):
            tqdm = importlib.import_module("tqdm").tqdm
            style = {"leave": False} if is_terminal else {"mininterval": _SECONDS_PER_LINE, "ncols": 80, "ascii": True}
            self._bar = tqdm(total=turns, unit="turn", **style)

    def progress(self, what: str, turns: int = 0) -> None:
        """Tell the progress bar what is measured now, and how many turns more are done."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update(turns)

    def hide_progress(self) -> None:
        """Remove the progress bar, or end its line."""
        if self._bar is not None:
            self._bar.close()

    def timed(self, action: Callable[[], object], repeats: int = 1) -> float:
        """The seconds that an action takes on this rank and its device, as the mean of ``repeats``."""
        begun = time.perf_counter()
        for _ in range(repeats):
            action()
        self.synchronize()
        return (time.perf_counter() - begun) / repeats

    def take_turns(self, what: str, blocks: Mapping[str, Callable[[], float]], rounds: int, samples: Samples) -> None:
        """Run each block once a round, and append its time on the slowest rank to ``samples``.

        All ranks must call it with the same blocks; they begin each block together. The order changes with each round.
        ``what`` is shown at the progress bar.
        """
        self.progress(what)
        names = list(blocks)
        for number in range(rounds):
            start = number % len(names)
            order = names[start:] + names[:start]
            for name in order if number % 2 == 0 else reversed(order):
                self.barrier()
                samples[name].append(self.slowest(blocks[name]()))
            self.progress(what, 1)

    def rival(self) -> dist.ProcessGroup:
        """A gloo or NCCL process group of torch's between all ranks. Every rank must make the first call."""
        if self._rival is None:
            if not dist.is_initialized():
                # A single rank: hvdlite needs no process group there, and DDP does.
                dist.init_process_group(self.rival_name, store=HashStore(), rank=0, world_size=1)
                self._owns_default = True
            group = dist.new_group(backend=self.rival_name)
            assert isinstance(group, dist.ProcessGroup), "every rank is a member of it"
            self._rival = group
        return self._rival

    def close(self) -> None:
        """Destroy the process groups that were made here."""
        self._rival = None
        if self._owns_default:
            dist.destroy_process_group()

    def why_too_large(self, bytes_per_rank: int, shared_per_rank: int = 0) -> str | None:
        """Why so much memory is not free on some host, in the words of the first such rank; None where it is.

        ``bytes_per_rank`` are of the device's memory, ``shared_per_rank`` of /dev/shm. All ranks must call it.
        """
        if self.device.type == "cuda":
            why = _shortage(bytes_per_rank, torch.cuda.mem_get_info(self.device)[0], "of the GPU's memory are free")
        else:
            free = min(psutil.virtual_memory().available, free_in_cgroup())
            why = _shortage((bytes_per_rank + shared_per_rank) * self._local_size, free, "of memory are free")
            if why is None and shared_per_rank and os.path.isdir(_SHARED_MEMORY):
                free = shutil.disk_usage(_SHARED_MEMORY).free
                why = _shortage(shared_per_rank * self._local_size, free, f"of {_SHARED_MEMORY} are free")
        # All ranks ask at once: none of them counts what another has taken since.
        return self.first(why and f"{why} on {self.group.hosts[self.rank]}")


def _shortage(needed: int, free: float, where: str) -> str | None:
    if needed <= free * _USABLE_SHARE:
        return None
    return f"needs {show_size(needed)}, and {show_size(free)} {where}"


def free_in_cgroup(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """The memory that Slurm, a container or systemd leaves to this process; infinite where none sets a limit."""
    free = math.inf
    with suppress(OSError, StopIteration):
        group = root / next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
        for each in [group, *group.parents]:
            with suppress(OSError, ValueError, StopIteration):
                limit, taken = (int((each / f"memory.{name}").read_text()) for name in ("max", "current"))
                # Cached files are dropped when memory is needed.
                cached = re.search(r"^inactive_file (\d+)", (each / "memory.stat").read_text(), re.MULTILINE)
                free = min(free, limit - taken + (int(cached[1]) if cached else 0))
    return free
