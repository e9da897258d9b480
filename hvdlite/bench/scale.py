"""
`scale`: predicts the speed of 2 to 4,096 ranks by a latency-bandwidth model, fitted to a run of a few.

`FORMULA` is the model: α is the latency of one message in seconds, β the seconds of a byte.

    Scale measures ── Calibration (kept in JSON) ── fit ── StepModel predicts ── Report
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ..optim.plan import ParamSpec, plan_buckets
from .allreduce import DTYPES, block_of, case_of, hvdlite_actions
from .arguments import BATCH, Flag, UsageError, count_flag, one_of, read_share
from .plot import Chart, Line, Lines
from .ranks import Job, Ranks, Samples
from .report import Columns, Command, Report, Row, Table
from .step import WARM_UPS
from .units import show_ranks, show_round_time, show_size, show_time
from .variants import VARIANTS, Training
from .workloads import MODEL, WORKLOADS, Batch, bytes_of

# The variant and the dtype of the wire.
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


class Parts(NamedTuple):
    """Seconds of the parts of a step; ``update`` is everything after backward."""

    forward: float
    backward: float
    update: float


class Link(NamedTuple):
    """``alpha_s`` seconds for a message, ``beta_s`` for each byte."""

    alpha_s: float
    beta_s: float

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Seconds of an all-reduce between so many ranks."""
        return 2 * (ranks - 1) * self.alpha_s + 2 * (ranks - 1) / ranks * nbytes * self.beta_s


def fit(points: Sequence[tuple[int, float]], ranks: int) -> Link:
    """The link that explains times (bytes, seconds) of all-reduces between 2 ranks or more.

    Least squares of relative errors; neither α nor β is negative.
    """
    sizes, times = torch.tensor(points, dtype=torch.float64).T
    # T = constant + slope × S, each point divided by its T.
    columns, ones = torch.stack([1 / times, sizes / times], dim=1), torch.ones(len(points), 1, dtype=torch.float64)
    constant, slope = torch.linalg.lstsq(columns, ones).solution.ravel().tolist() if len(points) > 1 else (0.0, -1.0)
    if slope < 0:
        constant, slope = float(torch.linalg.lstsq(columns[:, :1], ones).solution), 0.0
    elif constant < 0:
        constant, slope = 0.0, float(torch.linalg.lstsq(columns[:, 1:], ones).solution)
    return Link(constant / (2 * (ranks - 1)), slope / (2 * (ranks - 1) / ranks))


class StepModel(NamedTuple):
    """The model of a step: its parts on one rank, and the bytes of its buckets on the wire in the order they fill."""

    parts: Parts
    bucket_bytes: Sequence[int]
    link: Link

    def step_s(self, ranks: int) -> float:
        """Seconds of a step."""
        forward, backward, update = self.parts
        total, full, averaged_at = sum(self.bucket_bytes), 0, 0.0
        for nbytes in self.bucket_bytes:
            full += nbytes
            ready_at = forward + backward * full / total
            averaged_at = max(ready_at, averaged_at) + self.link.all_reduce_s(ranks, nbytes)
        return max(forward + backward, averaged_at) + update

    def throughput(self, ranks: int) -> float:
        """Samples per second, relative to one rank alone."""
        return ranks * sum(self.parts) / self.step_s(ranks)

    def predict(self, ranks: int) -> Row:
        """A row of the report; ``added`` is the throughput that one more rank would add."""
        here = self.throughput(ranks)
        added = self.throughput(ranks + 1) - here
        return {
            "ranks": ranks, "step_s": self.step_s(ranks), "efficiency": here / ranks, "throughput": here, "added": added
        }  # fmt: skip

    def stops_paying_at(self, least_added: float) -> int | None:
        """The number of ranks from which on one more always adds less; None if it adds more up to 4,096."""
        values = [self.throughput(ranks) for ranks in range(1, _MOST_RANKS + 2)]
        last = max(
            (ranks for ranks in range(1, len(values)) if values[ranks] - values[ranks - 1] >= least_added), default=0
        )
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
        """The model of a step, with the link that explains the all-reduces."""
        return StepModel(self.parts, self.bucket_bytes, fit(self.points, self.setting.ranks))


def read_calibration(path: Path) -> Calibration:
    """Read what ``scale --json`` has written; a UsageError if it is something else."""
    try:
        found = json.loads(path.read_text())["calibration"]
        found |= {"setting": Job(**found["setting"]), "parts": Parts(**found["parts"])}
        calibration = Calibration(**found)
        calibration.fitted().step_s(2)
    except OSError as error:
        raise UsageError(f"--calibration: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RuntimeError, ArithmeticError) as error:
        raise UsageError(
            f"--calibration: {str(path)!r} is not what a whole run of `scale --json` has written ({error!r})"
        ) from None
    return calibration


class Scale(Command):
    """The command: all-reduces for α and β, and steps of a model with and without communication."""

    name = "scale"
    help = "expected step time and efficiency of 2 to 4096 ranks, from a run of some"
    flags = (
        MODEL,
        BATCH,
        Flag(
            "--compression", one_of(COMPRESSIONS, "a compression"), "NAME", f"one of {', '.join(COMPRESSIONS)} (none)"
        ),
        count_flag("--rounds", 15, "turns of each all-reduce"),
        count_flag("--steps", 20, "steps"),
        Flag(
            "--threshold",
            read_share,
            "SHARE",
            "a rank more pays if it adds this much of what one does alone (0.5)",
            0.5,
        ),
        Flag("--calibration", Path, "FILE.json", "measure nothing: that run's --json says what there was"),
    )

    def __init__(
        self, model: str | None, batch: int | None, compression: str | None, rounds: int, steps: int, threshold: float,
        calibration: Path | None,
    ) -> None:  # fmt: skip
        self._threshold = threshold
        self._calibration: Calibration | None = None
        if calibration is not None:
            for flag, value in (("model", model), ("batch", batch), ("compression", compression)):
                if value is not None:
                    raise UsageError(f"--calibration has a {flag} of its own: leave out --{flag}")
            self._calibration = read_calibration(calibration)
        self._workload = WORKLOADS[model or "mlp"]
        missing = self._workload.missing()
        if missing is not None:
            raise UsageError(f"--model: {missing}")
        self._batch = batch or self._workload.rows
        self._compression = compression or "none"
        self._rounds, self._steps = rounds, steps
        self._sweep: dict[int, list[float]] = {}
        self._parts: list[Parts] = []
        self._step_samples: Samples = {"none": [], "hvdlite": []}
        self.turns = len(_SWEEP_BYTES) * rounds + steps

    def prepare(self, ranks: Ranks) -> None:
        if self._calibration is not None:
            return
        if ranks.size < 2:
            raise UsageError("1 rank has nobody to communicate with: start 2 at least, or pass --calibration FILE")
        why = ranks.why_too_large(8 * bytes_of(self._workload.make(torch.device("meta"))))
        if why is not None:
            raise UsageError(f"--model: {self._workload.name} {why}")

    def run(self, ranks: Ranks) -> None:
        if self._calibration is not None:
            return
        self.job = ranks.job
        variant, dtype = COMPRESSIONS[self._compression]
        for nbytes in _SWEEP_BYTES:
            self._sweep[nbytes] = []
            with closing(ranks.group.duplicate()) as group:
                # The first is of a tensor such as gradients are.
                name, action = next(iter(hvdlite_actions(ranks, group, case_of(nbytes, dtype)).items()))
                what, blocks = f"all-reduce of {show_size(nbytes)}", {name: block_of(ranks, action)}
                ranks.take_turns(what, blocks, self._rounds, {name: self._sweep[nbytes]})
        model = self._workload.make(ranks.device)
        specs = [ParamSpec.of(name, param) for name, param in model.named_parameters()]
        buckets = plan_buckets(specs, cap_bytes=ranks.bucket_cap_bytes)
        self._bucket_bytes = tuple(bucket.numel * DTYPES[dtype].itemsize for bucket in buckets)
        batch = self._workload.batch(self._batch, 1 + ranks.rank, ranks.device)
        alone = VARIANTS["none"](ranks, copy.deepcopy(model))
        together = VARIANTS[variant](ranks, model)
        for _ in range(WARM_UPS):
            alone.step(batch)
            together.step(batch)
        blocks = {
            "none": partial(self._step_in_parts, alone, batch, ranks),
            "hvdlite": partial(ranks.timed, partial(together.step, batch)),
        }
        ranks.take_turns(self._workload.name, blocks, self._steps, self._step_samples)
        together.close()

    def _step_in_parts(self, training: Training, batch: Batch, ranks: Ranks) -> float:
        times: list[float] = []

        def on_part() -> None:
            ranks.synchronize()
            times.append(time.perf_counter())

        training.step(batch, on_part)
        self._parts.append(Parts(*(later - earlier for earlier, later in pairwise(times))))
        return sum(self._parts[-1])

    def report(self) -> Report:
        if self._calibration is not None:
            return report_of(self._calibration, self._threshold)
        points = [(nbytes, median(samples)) for nbytes, samples in self._sweep.items() if samples]
        if not self._step_samples["hvdlite"] or not self._parts:
            rows = [{"bytes": nbytes, "measured_s": seconds} for nbytes, seconds in points]
            columns = {name: _FIT_COLUMNS[name] for name in ("size", "measured")}
            table = Table(rows, columns, 0, f"all-reduces between {self.job}")
            return Report([table], {"rows": []}, Chart("No step was measured", "", []), ["no step was measured"])
        parts = Parts(*(median(each) for each in zip(*self._parts, strict=True)))
        step_s = median(self._step_samples["hvdlite"])
        name = self._workload.name
        run = Calibration(self.job, name, self._batch, self._compression, points, parts, self._bucket_bytes, step_s)
        return report_of(run, self._threshold)


def report_of(run: Calibration, least_added: float) -> Report:
    """The report of what follows from a run, with where the run leaves the model."""
    model, ranks, job = run.fitted(), run.setting.ranks, run.setting
    link, rows = model.link, [model.predict(count) for count in _COUNTS]
    fitted: list[Row] = [
        {"bytes": nbytes, "measured_s": seconds, "modelled_s": link.all_reduce_s(ranks, nbytes)}
        for nbytes, seconds in run.points
    ]
    stops_at, modelled_s = model.stops_paying_at(least_added), model.step_s(ranks)
    bandwidth = "beyond measure" if link.beta_s == 0 else f"{1e-9 / link.beta_s:.3g} GB/s"
    verdict = f"Up to {_MOST_RANKS} ranks one more adds {least_added:.0%} at least of what one does alone."
    if stops_at is not None:
        start = "Even a second rank" if stops_at == 1 else f"From {show_ranks(stops_at)} on, one more"
        verdict = f"{start} adds less than {least_added:.0%} of what one does alone."
    opening = f"The ranks of this run were {job}: what follows is about more ranks with such links between them."
    if job.hosts == 1:
        opening = (
            f"All {ranks} ranks of this run shared one host ({job.wire}): what follows is about more ranks "
            "on a\nhost like it, with a core or a GPU for each, and says nothing of a network. For that, run it with "
            "one\nrank on each of two hosts or more: hvdlite-run -H node1,node2 python -m hvdlite.bench scale"
        )
    what = f"{run.model}, batch {run.batch} a rank, wire {run.compression}"
    return Report(
        [
            Table(rows, _COLUMNS, 0, f"expected of {what}; {show_time(sum(run.parts))} alone"),
            Table(fitted, _FIT_COLUMNS, 0, f"where the run leaves the model: all-reduces between {ranks} ranks"),
        ],
        {
            "calibration": {**asdict(run), "parts": run.parts._asdict()},
            "alpha_s": link.alpha_s,
            "beta_s_per_byte": link.beta_s,
            "modelled_step_s": modelled_s,
            "least_added": least_added,
            "stops_paying_at": stops_at,
            "rows": rows,
        },
        _chart_of(run, model, fitted, f"{what}; measured with {job}"),
        [
            FORMULA,
            f"α = {show_time(link.alpha_s)} a message, 1/β = {bandwidth}, as between the {ranks} ranks of this "
            "run: run it across the links that more ranks would use.",
            f"The step of this run, on {ranks} ranks: {show_time(run.measured_step_s)} measured, "
            f"{show_time(modelled_s)} by the model, {run.measured_step_s / modelled_s - 1:+.0%}.",
            verdict,
        ],
        opening,
    )


def _chart_of(run: Calibration, model: StepModel, fitted: Sequence[Row], caption: str) -> Chart:
    here = run.setting.ranks
    within = [1, *(ranks for ranks in _COUNTS if ranks < here), here]
    beyond = [here, *(ranks for ranks in _COUNTS if ranks > here)]
    measured = [(1, 1.0), (here, here * sum(run.parts) / run.measured_step_s)]
    steps = [
        Line("measured", measured, True, "o"),
        Line("predicted", [(ranks, model.throughput(ranks)) for ranks in within], True, "-"),
        Line("predicted beyond what was measured", [(ranks, model.throughput(ranks)) for ranks in beyond], True, ":"),
        Line("if communication took no time", [(ranks, ranks) for ranks in (1, *beyond)], False, "-"),
    ]
    modelled = [(row["bytes"], row["modelled_s"]) for row in fitted]
    reduces = [Line("measured", run.points, True, "o"), Line("by the model, fitted to these", modelled, True, "-")]
    number, throughput = "{:g}".format, "throughput, in what one rank does alone"
    panels = [
        Lines("a training step", "ranks", throughput, number, number, steps),
        Lines(f"an all-reduce between {here} ranks", "size", "time", show_size, show_round_time, reduces),
    ]
    return Chart("What more ranks would bring", caption, panels)
