"""
`step` and `memory`: measure training in several variants that take turns.

`step` measures the seconds of whole steps of some models. `memory` measures the peak memory of training above its
model: on a GPU, PyTorch's allocator counts it; on a CPU it is Linux's peak of resident memory, without libraries, and
with only this process's share of shared memory (as in a proportional set size).
"""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from .arguments import OptionError, count_flag, flag, show_ratio, show_size, show_time, some_of
from .ranks import Ranks
from .report import Case, Columns, Command, Row, quartiles_of, ratio_of
from .training import (
    BATCH,
    MODEL,
    OPTIMIZER,
    OPTIMIZERS,
    UNUSUAL,
    VARIANTS,
    WORKLOADS,
    bytes_of,
    horovod_problem,
    training_bytes,
    variants_flag,
    workload_of,
)

# Unmeasured steps, after which autograd and the allocators have settled, and DDP has rebuilt its buckets.
WARM_UPS = 3
_USUAL_OF_STEP = tuple(name for name in VARIANTS if name not in UNUSUAL)
_MODELS = flag("NAME,…", some_of(WORKLOADS, "a model"), f"of {', '.join(WORKLOADS)} (all)")


@dataclass
class StepComparison(Command):
    """The command `step`. Each model is a case. Models and variants not named by a flag are skipped if unavailable."""

    name = "step"
    help = "a training step with hvdlite, DDP, Horovod, and without any communication"
    models: Sequence[str] | None = field(default=None, metadata=_MODELS)
    variants: Sequence[str] | None = field(default=None, metadata=variants_flag(VARIANTS, _USUAL_OF_STEP))
    batch: int | None = field(default=None, metadata=BATCH)
    steps: int = field(default=20, metadata=count_flag("steps of each"))
    optimizer: str = field(default="sgd", metadata=OPTIMIZER)

    columns: ClassVar[Columns] = {
        "model": lambda row: row["model"],
        "variant": lambda row: row["variant"],
        "batch": lambda row: str(row["batch"]),
        "step": lambda row: show_time(row["median_s"]),
        "quartiles": quartiles_of,
        "× none": lambda row: show_ratio(row["times_none"]),
        "× ddp": lambda row: show_ratio(row["times_ddp"]),
        "steps": lambda row: str(row["count"]),
    }
    text_columns = 2
    chart_title, panel = "How long a training step takes", "model"

    def __post_init__(self) -> None:
        self._variants = list(self.variants or _USUAL_OF_STEP)
        self.notes = ["× none, × ddp: how many times as long as that variant's step; below 1 is faster."]
        self.cases = [
            Case(name, {"model": name, "batch": self.batch or WORKLOADS[name].rows}, skipped=WORKLOADS[name].missing())
            for name in (WORKLOADS if self.models is None else self.models)
        ]
        self.turns = len(self.cases) * self.steps
        missing = [case.skipped for case in self.cases if case.skipped]
        if self.models is not None and missing:
            raise OptionError(f"--models: {missing[0]}")

    def prepare(self, ranks: Ranks) -> None:
        problem = horovod_problem(ranks) if "horovod" in self._variants else None
        if problem is not None:
            if self.variants is not None:
                raise OptionError(f"--variants: {problem}")
            self._variants.remove("horovod")
            self.notes = [f"left out: {problem}", *self.notes]

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        for case in self.cases:
            # torchvision may be missing on only some hosts.
            case.skipped = ranks.first(case.skipped)
            if case.skipped is None:
                model = WORKLOADS[case.about["model"]].make(ranks.device, self.optimizer)
                case.skipped = ranks.why_too_large(len(self._variants) * training_bytes(model, self.optimizer))
            if case.skipped is None:
                self._measure(case, model, ranks)
            else:
                ranks.progress(case.about["model"], self.steps)
            gc.collect()

    def _measure(self, case: Case, model: nn.Module, ranks: Ranks) -> None:
        name = case.about["model"]
        ranks.progress(name)
        batch = WORKLOADS[name].batch(case.about["batch"], 1 + ranks.rank, ranks.device)
        with ExitStack() as stack:
            blocks = {}
            for variant in self._variants:
                training = VARIANTS[variant](ranks, copy.deepcopy(model), OPTIMIZERS[self.optimizer])
                stack.callback(training.close)
                for _ in range(WARM_UPS):
                    training.step(batch)
                blocks[variant] = partial(ranks.timed, partial(training.step, batch))
            case.samples = {variant: [] for variant in blocks}
            ranks.take_turns(name, blocks, self.steps, case.samples)

    def title(self) -> str:
        return f"a training step on {self.job}, of the slowest rank, with {self.optimizer}"

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        times = {f"times_{each}": ratio_of(medians[name], medians.get(each)) for each in ("none", "ddp")}
        return {"variant": name, **times}

    def text_of(self, row: Row) -> str:
        return f"{show_time(row['median_s'])}, {show_ratio(row['times_none'])} × none"


REFERENCE = "ddp-view"
_USUAL_OF_MEMORY = ("none", "ddp", "ddp-view", "ddp-fp16", "hvdlite", "hvdlite-fp16", "hvdlite-bf16")
_VARIANTS_OF_MEMORY = [name for name in VARIANTS if name != "horovod"]
_STEPS = 4
_CLEAR_REFS, _STATUS, _ROLLUP = (Path("/proc/self", name) for name in ("clear_refs", "status", "smaps_rollup"))
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 2**10


def _problem(device: torch.device) -> str | None:
    """Returns why memory cannot be measured here, or None if it can."""
    if device.type == "cuda":
        return None
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        _kilobytes(_ROLLUP, "Pss_Shmem")
    except (OSError, StopIteration) as error:
        return f"the memory of a CPU's ranks is measured by Linux's {_ROLLUP} and {_CLEAR_REFS}: {error}"
    return None


def reset_peak(device: torch.device) -> int:
    """Resets the peak memory of this process, and returns the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    return (_kilobytes(_STATUS, "RssAnon") + _kilobytes(_ROLLUP, "Pss_Shmem")) * 1024


def peak(device: torch.device) -> int:
    """Returns the peak bytes since `reset_peak`. Call it before any shared memory created since then is freed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    # Libraries (RssFile) are left out, since their resident part depends on what else the machine runs.
    of_others = _kilobytes(_STATUS, "RssShmem") - _kilobytes(_ROLLUP, "Pss_Shmem")
    return (_kilobytes(_STATUS, "VmHWM") - _kilobytes(_STATUS, "RssFile") - of_others) * 1024


def _kilobytes(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


def _show_difference(nbytes: float | None) -> str:
    return "–" if nbytes is None else ("-" if nbytes < 0 else "+") + show_size(abs(nbytes))


@dataclass
class Memory(Command):
    """The command `memory`, with one case. Samples are bytes per rank, the mean over ranks, by variant."""

    name = "memory"
    help = "peak memory of training beyond the model's own, compared with DDP"
    model: str = field(default="mlp", metadata=MODEL)
    variants: Sequence[str] | None = field(default=None, metadata=variants_flag(_VARIANTS_OF_MEMORY, _USUAL_OF_MEMORY))
    batch: int | None = field(default=None, metadata=BATCH)
    rounds: int = field(default=3, metadata=count_flag("repetitions of each"))
    optimizer: str = field(default="sgd", metadata=OPTIMIZER)

    columns: ClassVar[Columns] = {
        "variant": lambda row: row["variant"],
        "above the model": lambda row: show_size(row["median_bytes"]),
        "quartiles": lambda row: f"{show_size(row['low_bytes'])} … {show_size(row['high_bytes'])}",
        "in models": lambda row: show_ratio(row["in_models"]),
        f"less {REFERENCE}": lambda row: _show_difference(row["above_reference_bytes"]),
        f"× {REFERENCE}": lambda row: show_ratio(row["times_reference"]),
        "times": lambda row: str(row["count"]),
    }
    unit, text_columns = "bytes", 1
    chart_title, panel = "The most memory that training takes above the model", "model"
    notes = (
        "Gradients, buckets, wires, activations, optimizer state; "
        "shared memory is counted once among the ranks of a host.",
    )

    def __post_init__(self) -> None:
        self._workload = workload_of(self.model)
        about = {"model": self._workload.name, "batch": self.batch or self._workload.rows, "model_bytes": 0}
        self._case = Case(self._workload.name, about, {name: [] for name in self.variants or _USUAL_OF_MEMORY})
        self.cases = [self._case]
        self.turns = self.rounds * len(self._case.samples)

    def prepare(self, ranks: Ranks) -> None:
        ranks.require(_problem(ranks.device))
        if ranks.device.type == "cpu":
            # malloc returns large blocks to the system as soon as they are freed, so that resident memory is memory in
            # use. Blocks that were allocated before this call are not affected.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        model = self._workload.make(ranks.device, self.optimizer)
        self._case.about["model_bytes"] = bytes_of(model)
        self._case.skipped = ranks.why_too_large(training_bytes(model, self.optimizer))
        del model
        if self._case.skipped is not None:
            return
        # Run each variant once unmeasured, so that one-time allocations of the process are not counted.
        for name in self._case.samples:
            ranks.progress(f"{name}, once before")
            self._peak_above_model(name, ranks)
        for _ in range(self.rounds):
            for name, samples in self._case.samples.items():
                ranks.progress(name)
                samples.append(ranks.mean(self._peak_above_model(name, ranks)))
                ranks.progress(name, 1)

    def _peak_above_model(self, name: str, ranks: Ranks) -> int:
        model = self._workload.make(ranks.device, self.optimizer)
        batch = self._workload.batch(self._case.about["batch"], 1 + ranks.rank, ranks.device)
        before = reset_peak(ranks.device)
        ranks.barrier()
        training = VARIANTS[name](ranks, model, OPTIMIZERS[self.optimizer])
        for _ in range(_STEPS):
            training.step(batch)
        ranks.barrier()
        above = peak(ranks.device) - before
        # Shared memory must not be freed before every rank has counted it.
        ranks.barrier()
        training.close()
        del training, model
        gc.collect()
        return above

    def title(self) -> str:
        model, batch, nbytes = (self._case.about[key] for key in ("model", "batch", "model_bytes"))
        return (
            f"peak memory of each of {self.job}, {model} of {show_size(nbytes)}, batch {batch}, with {self.optimizer}"
        )

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        most, reference = medians[name], medians.get(REFERENCE)
        return {
            "variant": name,
            "in_models": ratio_of(most, case.about["model_bytes"]),
            "above_reference_bytes": None if reference is None else most - reference,
            "times_reference": ratio_of(most, reference),
        }

    def text_of(self, row: Row) -> str:
        return show_size(row["median_bytes"])
