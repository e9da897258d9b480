"""
`memory`: the most memory that training takes above its model, in several ways that take turns.

On a GPU PyTorch's allocator counts it. On a CPU it is Linux's peak of resident memory, less libraries, and less the
part of shared memory that belongs to the other processes which have it too (as in a proportional set size).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from .arguments import BATCH, count_flag, variants_flag
from .plot import Bar, Bars, Chart
from .ranks import Ranks
from .report import Case, Columns, Command, Quartiles, Row, ratio_of
from .units import show_difference, show_ratio, show_size
from .variants import VARIANTS
from .workloads import MODEL, WORKLOADS, bytes_of

REFERENCE = "ddp-view"
_USUAL = ("none", "ddp", "ddp-view", "ddp-fp16", "hvdlite", "hvdlite-fp16", "hvdlite-bf16")
_STEPS = 4
# A parameter, its gradient, a bucket and a wire.
_COPIES = 4
_CLEAR_REFS, _STATUS, _ROLLUP = (Path("/proc/self", name) for name in ("clear_refs", "status", "smaps_rollup"))
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 2**10


def _problem(device: torch.device) -> str | None:
    """Why memory cannot be measured here, if it cannot."""
    if device.type == "cuda":
        return None
    if not sys.platform.startswith("linux") or not _ROLLUP.exists() or "Pss_Shmem:" not in _ROLLUP.read_text():
        return "the memory of a CPU's ranks is measured by Linux's /proc/self/smaps_rollup, which is not here"
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        return f"the memory of a CPU's ranks needs {_CLEAR_REFS}: {error.strerror}"
    return None


def reset_peak(device: torch.device) -> int:
    """Begin to count the most memory of this process anew; returns the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    return (_kilobytes(_STATUS, "RssAnon") + _kilobytes(_ROLLUP, "Pss_Shmem")) * 1024


def peak(device: torch.device) -> int:
    """The most bytes since `reset_peak`. Call it while all shared memory made since is still there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    # The share of libraries depends on what else the machine runs, so they are left out.
    of_others = _kilobytes(_STATUS, "RssShmem") - _kilobytes(_ROLLUP, "Pss_Shmem")
    return (_kilobytes(_STATUS, "VmHWM") - _kilobytes(_STATUS, "RssFile") - of_others) * 1024


def _kilobytes(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


class Memory(Command):
    """The command, of one case. Samples are bytes per rank, as the mean over ranks, by variant."""

    name = "memory"
    help = "the most memory that training takes above the model, beside DDP's"
    flags = (
        MODEL,
        variants_flag([name for name in VARIANTS if name != "horovod"], _USUAL),
        BATCH,
        count_flag("--rounds", 3, "turns of each"),
    )

    columns: ClassVar[Columns] = {
        "variant": lambda row: row["variant"],
        "above the model": lambda row: show_size(row["median_bytes"]),
        "quartiles": lambda row: f"{show_size(row['low_bytes'])} … {show_size(row['high_bytes'])}",
        "in models": lambda row: show_ratio(row["in_models"]),
        f"less {REFERENCE}": lambda row: show_difference(row["above_reference_bytes"]),
        f"× {REFERENCE}": lambda row: show_ratio(row["times_reference"]),
        "times": lambda row: str(row["count"]),
    }
    unit, words = "bytes", 1
    notes = ("Gradients, buckets, wires and activations; shared memory is counted once among the ranks of a host.",)

    def __init__(self, model: str | None, variants: Sequence[str] | None, batch: int | None, rounds: int) -> None:
        self._workload = WORKLOADS[model or "mlp"]
        self._rounds = rounds
        about = {"model": self._workload.name, "batch": batch or self._workload.rows, "model_bytes": 0}
        self._case = Case(self._workload.name, about, {name: [] for name in variants or _USUAL})
        self.cases = [self._case]
        self.turns = rounds * len(self._case.samples)

    def prepare(self, ranks: Ranks) -> None:
        ranks.require(_problem(ranks.device))
        if ranks.device.type == "cpu":
            # Large blocks go back to the system as soon as they are freed, so that what is resident is in use; but not
            # those that were allocated earlier than this.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        model_bytes = self._case.about["model_bytes"] = bytes_of(self._workload.make(ranks.device))
        self._case.skipped = ranks.why_too_large(_COPIES * model_bytes)
        if self._case.skipped is not None:
            return
        # What a process allocates once, however it trains, is allocated by then.
        for name in self._case.samples:
            ranks.progress(f"{name}, once before")
            self._peak_above_model(name, ranks)
        for _ in range(self._rounds):
            for name, samples in self._case.samples.items():
                ranks.progress(name)
                samples.append(ranks.mean(self._peak_above_model(name, ranks)))
                ranks.progress(name, 1)

    def _peak_above_model(self, name: str, ranks: Ranks) -> int:
        model = self._workload.make(ranks.device)
        batch = self._workload.batch(self._case.about["batch"], 1 + ranks.rank, ranks.device)
        before = reset_peak(ranks.device)
        ranks.barrier()
        training = VARIANTS[name](ranks, model)
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
        return f"peak memory of each of {self.job}, {model} of {show_size(nbytes)}, batch {batch}"

    def describe(self, case: Case, name: str, found: Mapping[str, Quartiles]) -> Row:
        most, reference, model_bytes = found[name], found.get(REFERENCE), case.about["model_bytes"]
        return {
            "variant": name,
            "in_models": most.median / model_bytes if model_bytes else None,
            "above_reference_bytes": None if reference is None else most.median - reference.median,
            "times_reference": ratio_of(most, reference),
        }

    def chart(self, rows: Sequence[Row]) -> Chart:
        bars = []
        for row in rows:
            median, low, high = (row[f"{key}_bytes"] / 2**20 for key in ("median", "low", "high"))
            bars.append(Bar(row["variant"], median, low, high, show_size(row["median_bytes"])))
        caption = f"{self.title()}. Medians; whiskers are quartiles."
        return Chart("The most memory that training takes above the model", caption, [Bars("", "MB", bars)])
