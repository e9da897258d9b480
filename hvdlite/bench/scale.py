"""
`scale`: predicts the speed of 2 to 4,096 ranks by a latency-bandwidth model, which is fitted to a run on a few ranks.

`FORMULA` is the model: α is the latency of one message in seconds, β the seconds per byte.

    Scale measures ── Calibration (saved in JSON) ── fit ── StepModel predicts ── Report
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ..buckets.plan import ParamSpec, plan_buckets
from ..comm.group import Group
from ..optim import autotune
from .allreduce import DTYPES, AllReduce, bus_factor, own_all_reduces
from .arguments import UsageError, count_flag, flag, one_of, read_share
from .plot import Chart, Line, Lines
from .ranks import Job, Ranks
from .report import Case, Columns, Command, Report, Row, table
from .step import Step
from .units import show_count, show_round_time, show_size, show_time
from .variants import Training
from .workloads import BATCH, MODEL, Batch, training_bytes, workload_of

# The variant and the dtype of the wire, by the value of --compression.
COMPRESSIONS = {
    "none": ("hvdlite", "float32"),
    "fp16": ("hvdlite-fp16", "float16"),
    "bf16": ("hvdlite-bf16", "bfloat16"),
}
FORMULA = (
    "all-reduce of S bytes on n ranks: T(n, S) = 2(n-1)·α + 2(n-1)/n·S·β\n"
    "bucket i is ready at r(i) = forward + backward × its share of the bytes so far, averaged at "
    "e(i) = max(r(i), e(i-1)) + T\n"
    "step = max(forward + backward, e(last)) + update; efficiency = step alone / step; a rank keeps its batch"
)
_COLUMNS: Columns = {
    "ranks": lambda row: str(row["ranks"]),
    "step": lambda row: show_time(row["step_s"]),
    "efficiency": lambda row: f"{row['efficiency']:.1%}",
    "throughput": lambda row: f"{row['throughput']:.1f}",
    "one more adds": lambda row: f"{row['added']:.2f}",
}
_FIT_COLUMNS: Columns = {
    "size": lambda row: show_size(row["bytes"]),
    "measured": lambda row: show_time(row["measured_s"]),
    "model": lambda row: show_time(row["modelled_s"]),
    "off by": lambda row: f"{row['measured_s'] / row['modelled_s'] - 1:+.0%}",
}
_MOST_RANKS = 4096
_COUNTS = tuple(2**power for power in range(1, 13))
_SWEEP_BYTES = tuple(2**10 * 4**power for power in range(9))  # 1 KB to 64 MB
_COMPRESSION = flag("NAME", one_of(COMPRESSIONS, "a compression"), f"one of {', '.join(COMPRESSIONS)} (none)")
_THRESHOLD = flag(
    "SHARE", read_share, "another rank is worth it if it adds this share of one rank's throughput (%(default)s)"
)
_CALIBRATION = flag("FILE.json", Path, "use the measurements of an earlier run's --json instead of new ones")


class Parts(NamedTuple):
    """Seconds of the parts of a step; ``update`` is everything after backward."""

    forward: float
    backward: float
    update: float


class Link(NamedTuple):
    """A link between ranks: ``alpha_s`` is seconds per message, ``beta_s`` seconds per byte."""

    alpha_s: float
    beta_s: float

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Returns the predicted seconds of an all-reduce of ``nbytes`` between ``ranks`` ranks."""
        return 2 * (ranks - 1) * self.alpha_s + bus_factor(ranks) * nbytes * self.beta_s


def fit(times_s: Mapping[int, float], ranks: int) -> Link:
    """Returns the link that best explains ``times_s``, seconds of all-reduces by bytes, between at least 2 ranks."""
    line = autotune.fit(times_s)
    return Link(line.alpha_s / (2 * (ranks - 1)), line.beta_s / bus_factor(ranks))


class StepModel(NamedTuple):
    """The model of a step: its parts on one rank, and the bytes of its buckets on the wire in the order they fill."""

    parts: Parts
    bucket_bytes: Sequence[int]
    link: Link

    def step_s(self, ranks: int) -> float:
        """Returns the predicted seconds of a step."""
        forward, backward, update = self.parts
        total, full, averaged_at = sum(self.bucket_bytes), 0, 0.0
        for nbytes in self.bucket_bytes:
            full += nbytes
            ready_at = forward + backward * full / total
            averaged_at = max(ready_at, averaged_at) + self.link.all_reduce_s(ranks, nbytes)
        return max(forward + backward, averaged_at) + update

    def throughput(self, ranks: int) -> float:
        """Returns the predicted samples per second of all ranks, relative to one rank alone."""
        return ranks * sum(self.parts) / self.step_s(ranks)

    def added(self, ranks: int) -> float:
        """Returns the throughput that one more rank would add."""
        return self.throughput(ranks + 1) - self.throughput(ranks)

    def predict(self, ranks: int) -> Row:
        """Returns the report's row for this number of ranks."""
        row = {"ranks": ranks, "step_s": self.step_s(ranks), "efficiency": self.throughput(ranks) / ranks}
        return {**row, "throughput": self.throughput(ranks), "added": self.added(ranks)}

    def stops_paying_at(self, least_added: float) -> int | None:
        """Returns the number of ranks from which one more always adds less than ``least_added``.

        Returns None if that does not happen up to 4,096 ranks.
        """
        last = next((ranks for ranks in range(_MOST_RANKS, 0, -1) if self.added(ranks) >= least_added), 0)
        return None if last == _MOST_RANKS else last + 1


@dataclass(frozen=True)
class Calibration:
    """The medians of a run: all-reduces as (bytes, seconds), and the steps of a model."""

    setting: Job
    model: str
    batch: int
    compression: str
    points: Sequence[tuple[int, float]]
    parts: Parts
    bucket_bytes: Sequence[int]
    measured_step_s: float

    def fitted(self) -> StepModel:
        """Returns the model of a step, with the link fitted to the all-reduces."""
        return StepModel(self.parts, self.bucket_bytes, fit(dict(self.points), self.setting.ranks))


def read_calibration(path: Path) -> Calibration:
    """Reads a file that ``scale --json`` has written. Raises UsageError for any other file."""
    try:
        found = json.loads(path.read_text())["calibration"]
        found |= {"setting": Job(**found["setting"]), "parts": Parts(**found["parts"])}
        calibration = Calibration(**found)
        calibration.fitted().step_s(2)
    except OSError as error:
        raise UsageError(f"--calibration: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UsageError(
            f"--calibration: {str(path)!r} is not the file of a complete run of `scale --json` ({error!r})"
        ) from None
    return calibration


class _OwnAllReduce(AllReduce):
    """Measures hvdlite's all-reduces only, of tensors in the kind of memory that gradients have."""

    def actions(self, ranks: Ranks, group: Group, case: Case) -> dict[str, Callable[[], object]]:
        return dict(list(own_all_reduces(ranks, group, case).items())[:1])


class _StepInParts(Step):
    """Measures steps, and times those without communication part by part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts: list[Parts] = []

    def block(self, ranks: Ranks, variant: str, training: Training, batch: Batch) -> Callable[[], float]:
        def step_in_parts() -> float:
            times: list[float] = []

            def on_part() -> None:
                ranks.synchronize()
                times.append(time.perf_counter())

            training.step(batch, on_part)
            self.parts.append(Parts(*(later - earlier for earlier, later in pairwise(times))))
            return sum(self.parts[-1])

        return step_in_parts if variant == "none" else super().block(ranks, variant, training, batch)


@dataclass
class Scale(Command):
    """The command `scale`: measures all-reduces for α and β, and steps of a model with and without communication."""

    name = "scale"
    help = "predicts step time and efficiency of 2 to 4096 ranks from a run on a few"
    model: str | None = field(default=None, metadata=MODEL)
    batch: int | None = field(default=None, metadata=BATCH)
    compression: str | None = field(default=None, metadata=_COMPRESSION)
    rounds: int = field(default=15, metadata=count_flag("repetitions of each all-reduce"))
    steps: int = field(default=20, metadata=count_flag("steps"))
    threshold: float = field(default=0.5, metadata=_THRESHOLD)
    calibration: Path | None = field(default=None, metadata=_CALIBRATION)

    def __post_init__(self) -> None:
        self._run: Calibration | None = None
        if self.calibration is not None:
            for each in ("model", "batch", "compression"):
                if getattr(self, each) is not None:
                    raise UsageError(f"--calibration sets the {each}: leave out --{each}")
            self._run = read_calibration(self.calibration)
        self._workload = workload_of(self.model)
        self._variant, self._dtype = COMPRESSIONS[self.compression or "none"]
        self._all_reduces = _OwnAllReduce(_SWEEP_BYTES, [self._dtype], self.rounds)
        self._steps = _StepInParts([self._workload.name], ["none", self._variant], self.batch, self.steps)
        self.turns = self._all_reduces.turns + self._steps.turns

    def prepare(self, ranks: Ranks) -> None:
        if self._run is not None:
            return
        if ranks.size < 2:
            raise UsageError("1 rank has no other to communicate with: start at least 2, or pass --calibration FILE")
        model = self._workload.make(torch.device("meta"))
        why = ranks.why_too_large(2 * training_bytes(model))
        if why is not None:
            raise UsageError(f"--model: {self._workload.name} {why}")
        specs = [ParamSpec.of(name, param) for name, param in model.named_parameters()]
        buckets = plan_buckets(specs, cap_bytes=ranks.bucket_cap_bytes)
        self._bucket_bytes = [bucket.numel * DTYPES[self._dtype].itemsize for bucket in buckets]

    def run(self, ranks: Ranks) -> None:
        if self._run is None:
            self._all_reduces.run(ranks)
            self._steps.run(ranks)

    def report(self) -> Report:
        run = self._run or self._measured()
        if run is not None:
            return report_of(run, self.threshold)
        by_now = self._all_reduces.report()
        return by_now._replace(text=f"{by_now.text}\nno step was measured")

    def _measured(self) -> Calibration | None:
        """Returns the calibration of this run, or None if no step was measured yet."""
        (steps,), parts = self._steps.cases, self._steps.parts
        if not steps.samples.get(self._variant) or not parts:
            return None
        cases = self._all_reduces.cases
        return Calibration(
            **steps.about,
            setting=self._steps.job,
            compression=self.compression or "none",
            points=[(case.about["bytes"], median(samples)) for case in cases for samples in case.samples.values()],
            parts=Parts(*map(median, zip(*parts, strict=True))),
            bucket_bytes=self._bucket_bytes,
            measured_step_s=median(steps.samples[self._variant]),
        )


def report_of(run: Calibration, least_added: float) -> Report:
    """Returns the report of the predictions from a run, and of the deviations of the run from the model."""
    model, ranks = run.fitted(), run.setting.ranks
    link, stops_at, modelled_s = model.link, model.stops_paying_at(least_added), model.step_s(ranks)
    rows = [model.predict(count) for count in _COUNTS]
    fitted: list[Row] = [
        {"bytes": nbytes, "measured_s": seconds, "modelled_s": link.all_reduce_s(ranks, nbytes)}
        for nbytes, seconds in run.points
    ]
    bandwidth = "beyond measure" if link.beta_s == 0 else f"{1e-9 / link.beta_s:.3g} GB/s"
    what = f"{run.model}, batch {run.batch} a rank, wire {run.compression}"
    notes = [
        FORMULA,
        f"α = {show_time(link.alpha_s)} a message, 1/β = {bandwidth}, as between the {ranks} ranks of this "
        "run: run it across the links that more ranks would use.",
        f"The step of this run, on {ranks} ranks: {show_time(run.measured_step_s)} measured, "
        f"{show_time(modelled_s)} by the model, {run.measured_step_s / modelled_s - 1:+.0%}.",
        _verdict(stops_at, least_added),
    ]
    text = [
        _opening(run.setting),
        table(f"expected of {what}; {show_time(sum(run.parts))} alone", rows, _COLUMNS),
        table(f"all-reduces between {ranks} ranks, measured and by the model", fitted, _FIT_COLUMNS),
        "\n".join(notes),
    ]
    data = {
        "calibration": {**asdict(run), "parts": run.parts._asdict()},
        "alpha_s": link.alpha_s,
        "beta_s_per_byte": link.beta_s,
        "modelled_step_s": modelled_s,
        "least_added": least_added,
        "stops_paying_at": stops_at,
        "rows": rows,
    }
    return Report("\n\n".join(text), data, _chart_of(run, model, f"{what}; measured with {run.setting}"))


def _opening(job: Job) -> str:
    if job.hosts > 1:
        return f"The ranks of this run were {job}: what follows is about more ranks with such links between them."
    return (
        f"All {job.ranks} ranks of this run shared one host ({job.wire}): what follows is about more ranks on a\n"
        "host like it, with a core or a GPU for each, and says nothing of a network. For that, run it with one\n"
        "rank on each of two hosts or more: hvdlite-run -H node1,node2 python -m hvdlite.bench scale"
    )


def _verdict(stops_at: int | None, least_added: float) -> str:
    if stops_at is None:
        return f"Up to {_MOST_RANKS} ranks, one more adds at least {least_added:.0%} of one rank's throughput."
    start = "Even a second rank" if stops_at == 1 else f"From {show_count(stops_at, 'rank')} on, one more"
    return f"{start} adds less than {least_added:.0%} of one rank's throughput."


def _chart_of(run: Calibration, model: StepModel, caption: str) -> Chart:
    here = run.setting.ranks
    within = [1, *(ranks for ranks in _COUNTS if ranks < here), here]
    beyond = [here, *(ranks for ranks in _COUNTS if ranks > here)]
    steps = [
        Line("measured", [(1, 1.0), (here, here * sum(run.parts) / run.measured_step_s)], True, "o"),
        Line("predicted", [(ranks, model.throughput(ranks)) for ranks in within], True, "-"),
        Line("predicted beyond what was measured", [(ranks, model.throughput(ranks)) for ranks in beyond], True, ":"),
        Line("if communication took no time", [(ranks, ranks) for ranks in (1, *beyond)], False, "-"),
    ]
    modelled = [(nbytes, model.link.all_reduce_s(here, nbytes)) for nbytes, _ in run.points]
    reduces = [Line("measured", run.points, True, "o"), Line("model, fitted to these", modelled, True, "-")]
    number, throughput = "{:g}".format, "throughput, relative to one rank"
    panels = [
        Lines("a training step", "ranks", throughput, number, number, steps),
        Lines(f"an all-reduce between {here} ranks", "size", "time", show_size, show_round_time, reduces),
    ]
    return Chart("What more ranks would bring", caption, panels)
