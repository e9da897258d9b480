"""
`scale`: what 2 to 4,096 ranks would bring, by the model of `prediction` and a run of some, and where it stops paying.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn

from ..optim.plan import ParamSpec, plan_buckets
from .allreduce import Case, block_of, hvdlite_actions
from .calibration import Calibration
from .errors import UsageError
from .memory_left import why_too_large
from .outlook import report_of
from .plot import Chart
from .progress import Progress
from .quantities import show_size, show_time
from .ranks import Ranks
from .report import Report
from .setting import Setting
from .step import WARM_UPS, bytes_of
from .table import Table
from .trainings import Parts
from .turns import Samples, take_turns, timed
from .variants import VARIANTS
from .workloads import Batch, Workload

COMPRESSIONS = {"none": ("hvdlite", torch.float32), "fp16": ("hvdlite-fp16", torch.float16)}
COMPRESSIONS["bf16"] = ("hvdlite-bf16", torch.bfloat16)
_SWEEP_BYTES = tuple(2**10 * 4**power for power in range(9))  # 1 KB to 64 MB


class Measured:
    """The command that measures first: all-reduces for α and β, and steps of a model with and without them."""

    name = "scale"

    def __init__(
        self, workload: Workload, rows: int | None, compression: str, *, rounds: int, steps: int, least_added: float
    ) -> None:
        """``least_added`` is what a rank more must add to pay, of what one does alone."""
        try:
            workload.require()
        except UsageError as error:
            raise UsageError(f"--model: {error}") from None
        self._workload = workload
        self._rows = rows or workload.rows
        self._compression = compression
        self._rounds, self._steps, self._least_added = rounds, steps, least_added
        self._setting = Setting()
        self._sweep: dict[int, list[float]] = {}
        self._parts: list[Parts] = []
        self._buckets: tuple[int, ...] = ()
        self._stepped: Samples = {"none": [], "hvdlite": []}

    @property
    def turns(self) -> int:
        """How many turns all of it takes."""
        return len(_SWEEP_BYTES) * self._rounds + self._steps

    def prepare(self, ranks: Ranks) -> None:
        """Raise a UsageError where there is nobody to communicate with, or no room; every rank must call it."""
        if ranks.size < 2:
            raise UsageError("1 rank has nobody to communicate with: start 2 at least, or pass --calibration FILE")
        why = why_too_large(ranks, 8 * bytes_of(self._workload.make(torch.device("meta"))))
        if why is not None:
            raise UsageError(f"--model: {self._workload.name} {why}")

    def run(self, ranks: Ranks, progress: Progress) -> None:
        """Measure; every rank must call it."""
        self._setting = ranks.setting
        _, dtype = COMPRESSIONS[self._compression]
        for nbytes in _SWEEP_BYTES:
            progress.begin(f"all-reduce of {show_size(nbytes)}")
            with ranks.channel() as group:
                # The first is what gradients do.
                name, action = next(iter(hvdlite_actions(ranks, group, Case(nbytes // dtype.itemsize, dtype)).items()))
                samples: Samples = {name: []}
                self._sweep[nbytes] = samples[name]
                take_turns(ranks, {name: block_of(ranks, action)}, self._rounds, samples, progress)
        progress.begin(self._workload.name)
        self._run_steps(ranks, progress)

    def _run_steps(self, ranks: Ranks, progress: Progress) -> None:
        variant, _ = COMPRESSIONS[self._compression]
        model = self._workload.make(ranks.device)
        self._buckets = _wire_bytes(model, self._compression, ranks.bucket_cap_bytes)
        batch = self._workload.batch(self._rows, 1 + ranks.rank, ranks.device)
        alone = VARIANTS["none"](ranks, copy.deepcopy(model))
        together = VARIANTS[variant](ranks, model)
        for _ in range(WARM_UPS):
            alone.step(batch)
            together.step(batch)

        def in_parts(batch: Batch) -> float:
            self._parts.append(alone.step_in_parts(batch, ranks))
            return sum(self._parts[-1])

        blocks: dict[str, Callable[[], float]] = {
            "none": partial(in_parts, batch),
            "hvdlite": partial(timed, ranks, partial(together.step, batch)),
        }
        take_turns(ranks, blocks, self._steps, self._stepped, progress)
        together.close()

    def calibration(self) -> Calibration | None:
        """What has been found out; None until the steps have been measured."""
        if not self._stepped["hvdlite"] or not self._parts:
            return None
        return Calibration(
            setting=self._setting,
            model=self._workload.name,
            batch=self._rows,
            compression=self._compression,
            points=tuple((nbytes, median(samples)) for nbytes, samples in self._sweep.items() if samples),
            parts=Parts(*(median(each) for each in zip(*self._parts, strict=True))),
            bucket_bytes=self._buckets,
            measured_step_s=median(self._stepped["hvdlite"]),
        )

    def report(self) -> Report:
        """What has been measured by now, and what follows from it."""
        calibration = self.calibration()
        if calibration is None:
            rows = [[show_size(nbytes), show_time(median(each))] for nbytes, each in self._sweep.items() if each]
            table = Table(["all-reduce", "measured"], rows, title=f"all-reduces between {self._setting}")
            return Report([table], {"rows": []}, Chart("No step was measured", "", []), ["no step was measured"])
        return report_of(calibration, self._least_added)


class Remembered:
    """The command that measures nothing: another run has."""

    name = "scale"
    turns = 0

    def __init__(self, calibration: Calibration, least_added: float) -> None:
        self._calibration = calibration
        self._least_added = least_added

    def prepare(self, ranks: Ranks) -> None:
        """Nothing."""

    def run(self, ranks: Ranks, progress: Progress) -> None:
        """Nothing."""

    def report(self) -> Report:
        """What follows from that run."""
        return report_of(self._calibration, self._least_added)


def _wire_bytes(model: nn.Module, compression: str, cap_bytes: int) -> tuple[int, ...]:
    specs = [ParamSpec.of(name, param) for name, param in model.named_parameters()]
    _, wire_dtype = COMPRESSIONS[compression]
    return tuple(bucket.numel * wire_dtype.itemsize for bucket in plan_buckets(specs, cap_bytes=cap_bytes))
