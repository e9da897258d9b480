"""
`links`: measures training steps between hosts with slow links, with each of several techniques of sending gradients.

    SlowLinks ── namespaces.Hosts, limited to a rate ── links_worker on each ── lines of samples ── Case ── BenchReport
          └─ --rates as-is: links_worker.measure on the ranks of the user's own job

The hosts that it makes are network namespaces of this machine, with one rank and one core each.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..rendezvous.launchers import read_placement
from .arguments import OptionError, flag, read_count, show_count, show_ratio, show_size, show_time, some_of
from .links_worker import COUNTERS, DDP, DDP_FP16, TECHNIQUES, is_ddp, measure, missing_for
from .namespaces import Hosts, bits_per_s, why_no_hosts
from .ranks import Job, Ranks, Samples
from .report import Bars, BenchReport, Case, Chart, Columns, Comparison, Row, grouped, ratio_of, spread
from .training import BATCH, MODEL, training_bytes, workload_of

AS_IS = "as-is"
_OWN_HOSTS = f"hvdlite-run -H HOST1,HOST2 python -m hvdlite.bench links --rates {AS_IS}"
_POLL_S = 0.5
_END_S = 60.0


def read_rates(text: str) -> tuple[str, ...]:
    """Returns rates such as ``1gbit,100mbit``, without duplicates, or ``as-is`` alone."""
    rates = tuple(dict.fromkeys(item.strip() for item in text.lower().split(",")))
    if AS_IS in rates:
        if len(rates) > 1:
            raise OptionError(f"{AS_IS} stands alone: links cannot be limited and be left as they are")
        return rates
    for rate in rates:
        bits_per_s(rate)
    return rates


@dataclass
class LinkCase(Case):
    """The samples of one rate: seconds in ``samples``, and the bytes that a host has sent, of a step in both."""

    sent: Samples = field(default_factory=dict)


@dataclass
class SlowLinks(Comparison):
    """The command `links`. Each rate is a case."""

    name = "links"
    help = "a training step over slow links between hosts, with each technique of sending gradients, and with DDP's"
    rates: tuple[str, ...] = field(
        default=("1gbit", "100mbit"),
        metadata=flag(
            "RATE,…",
            read_rates,
            f"of links between hosts that it makes (1gbit,100mbit; needs root); {AS_IS}: of the job's own hosts",
        ),
    )
    hosts: int | None = field(default=None, metadata=flag("N", read_count, "that it makes, one core for each (2)"))
    techniques: Sequence[str] = field(
        default=tuple(TECHNIQUES),
        metadata=flag("NAME,…", some_of(TECHNIQUES, "a technique"), f"of {', '.join(TECHNIQUES)} (all)"),
    )
    model: str | None = field(default=None, metadata=MODEL)
    batch: int | None = field(default=None, metadata=BATCH)
    steps: int = field(
        default=10,
        metadata=flag("COUNT", read_count, "of each (%(default)s), of localsgd and diloco the intervals"),
    )

    columns: ClassVar[Columns] = {
        "link": lambda row: row["rate"],
        "technique": lambda row: row["technique"],
        "bytes": lambda row: show_size(row["median_bytes"]),
        "step": lambda row: show_time(row["median_s"]),
        "quartiles": lambda row: f"{show_time(row['low_s'])} … {show_time(row['high_s'])}",
        f"× {DDP}": lambda row: show_ratio(row["times_faster_than_ddp"]),
        f"× {DDP_FP16}": lambda row: show_ratio(row["times_faster_than_ddp_fp16"]),
        "steps": lambda row: str(row["count"] * row["interval"]),
    }
    text_columns = 2

    def __post_init__(self) -> None:
        self._makes_hosts = self.rates != (AS_IS,)
        if self.hosts is not None and not self._makes_hosts:
            raise OptionError(f"--hosts: with --rates {AS_IS} the hosts are those of the job: leave it out")
        self._count = 2 if self.hosts is None else self.hosts
        if self._count < 2:
            raise OptionError("--hosts: a host that is alone has no link: say at least 2")
        missing = [why for why in map(missing_for, self.techniques) if why is not None]
        if missing:
            raise OptionError(f"--techniques: {missing[0]}")
        self._workload = workload_of(self.model)
        self._rows = self.batch or self._workload.rows
        about: Row = {"model": self._workload.name, "batch": self._rows}
        self._links = [LinkCase(rate, {"rate": rate, **about}) for rate in self.rates]
        self.cases = self._links
        self.notes = [
            "bytes: what a host has sent in a step, counted by its network interface.",
            f"× {DDP}, × {DDP_FP16}: how many times as many steps in the same time; above 1 is faster.",
        ]
        averaged = [f"{name} {TECHNIQUES[name].interval}" for name in self.techniques if TECHNIQUES[name].interval > 1]
        if averaged:
            self.notes = [*self.notes, f"Averages over whole intervals, in steps: {', '.join(averaged)}."]
        self.turns = len(self.cases) * self.steps
        self._made: Hosts | None = None
        self._names: list[str] = []
        self._failed = False

    def prepare(self, ranks: Ranks) -> None:
        if self._makes_hosts:
            if ranks.size > 1 or read_placement(os.environ) is not None:
                raise OptionError(
                    f"it makes hosts of its own: start it outside of any job, or pass --rates {AS_IS} to measure "
                    "between the hosts of this one"
                )
            if ranks.device.type == "cuda":
                raise OptionError(f"the hosts that it makes train on the CPU: pass --device cpu, or --rates {AS_IS}")
            problem = why_no_hosts()
            if problem is not None:
                raise OptionError(f"{problem}; or measure between your own hosts: {_OWN_HOSTS}")
            try:
                self._made = Hosts(self._count)
            except OSError as error:
                raise OptionError(f"{error}; measure between your own hosts: {_OWN_HOSTS}") from None
        elif ranks.job.hosts < 2:
            raise OptionError(f"--rates {AS_IS}: there is no other host: {_OWN_HOSTS}")
        ranks.require(None if COUNTERS.exists() else f"bytes are counted by Linux's {COUNTERS}, which is not here")

    def run(self, ranks: Ranks) -> None:
        try:
            self._run(ranks)
        finally:
            left = [] if self._made is None else self._made.close()
            self.notes = [*self.notes, *(f"NOT REMOVED: {each}" for each in left)]
            self._failed |= bool(left)

    def _run(self, ranks: Ranks) -> None:
        self.job = Job(self._count, self._count, "gloo") if self._makes_hosts else ranks.job
        self._names = sorted(set(ranks.group.hosts))
        model = self._workload.make(ranks.device)
        of_rank = len(self.techniques) * training_bytes(model)
        too_large = ranks.why_too_large(of_rank * (1 if self._made is None else self._made.count))
        if too_large is not None:
            for case in self._links:
                case.skipped = f"{too_large}: fewer --techniques need less"
        elif self._made is not None:
            del model
            self._run_on(self._made, ranks)
        else:
            (case,) = self._links
            case.samples = {name: [] for name in self.techniques}
            case.sent = {name: [] for name in self.techniques}
            batch = self._workload.batch(self._rows, 1 + ranks.rank, ranks.device)
            measure(ranks, model, batch, self.steps, case.samples, case.sent)

    def _run_on(self, hosts: Hosts, ranks: Ranks) -> None:
        self._names = hosts.names
        has_own = hosts.cores == self._count
        shares = "Each host has a core of its own." if has_own else f"Hosts share {show_count(hosts.cores, 'core')}."
        self.notes = [*self.notes, shares]
        worker = [sys.executable, "-m", "hvdlite.bench.links_worker"]
        words = [",".join(self.techniques), f"{self.steps}", self._workload.name, f"{self._rows}"]
        for case in self._links:
            ranks.progress(case.label)
            hosts.limit(case.label)
            processes = hosts.start([*worker, *words], os.environ)
            for line in lines_of_first(processes):
                found = json.loads(line)
                case.samples, case.sent = found["times"], found["sent"]
                ranks.progress(case.label, 1)
            case.skipped = failure_of(processes)
            self._failed |= case.skipped is not None
            hosts.end_ranks()

    def title(self) -> str:
        made = " (network namespaces)" if self._makes_hosts else ""
        return f"a training step of {self._workload.name}, batch {self._rows}, on {self.job}{made}"

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        assert isinstance(case, LinkCase), "all cases are"
        row: Row = {"technique": name, "variant": name if is_ddp(name) else f"hvdlite {name}"}
        for key, rival in (("ddp", DDP), ("ddp_fp16", DDP_FP16)):
            row[f"times_faster_than_{key}"] = ratio_of(medians.get(rival), medians[name])
        bytes_sent = {key: value for key, value in spread(case.sent[name], "bytes").items() if key != "count"}
        return {**row, "interval": TECHNIQUES[name].interval, **bytes_sent}

    def chart(self, rows: Sequence[Row]) -> Chart:
        """Returns a chart of ratios to DDP, with a panel for each rate; of milliseconds if DDP was not measured."""
        in_ratios = all(row["times_faster_than_ddp"] for row in rows)
        panels = []
        for rate, of_rate in grouped(rows, "rate").items():
            if in_ratios:
                ddp_s = of_rate[0]["median_s"] * of_rate[0]["times_faster_than_ddp"]
                shown = [_speed(row, ddp_s) for row in of_rate]
                texts = [show_ratio(row["median_speed"]) for row in shown]
                panels.append(Bars(rate, "× the steps per second of DDP", shown, "speed", 1.0, texts))
            else:
                texts = [show_time(row["median_s"]) for row in of_rate]
                panels.append(Bars(rate, "ms of a step", of_rate, "s", 1e-3, texts))
        caption = f"{self.title()}. Medians, of the slowest rank; whiskers are quartiles."
        return Chart("Training steps over slow links", caption, panels)

    def report(self) -> BenchReport:
        report = super().report()
        data = {**report.data, "ranks": self.job.ranks, "hosts": self._names}
        if self._makes_hosts:
            data["threads_per_rank"] = 1
        return report._replace(data=data, code=int(self._failed))


def lines_of_first(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[bytes]:
    """Yields the lines of rank 0's stdout until it ends, or until another rank fails."""
    stdout = processes[0].stdout
    assert stdout is not None, "it is a pipe"
    begun = b""
    while not any(each.poll() for each in processes):
        if select.select([stdout], [], [], _POLL_S)[0]:
            text = os.read(stdout.fileno(), 2**20)
            if not text:
                return
            *lines, begun = (begun + text).split(b"\n")
            yield from lines


def failure_of(processes: Sequence[subprocess.Popen[bytes]]) -> str | None:
    """Returns which rank has failed, or does not end although rank 0 has finished; None if all have ended well."""
    for rank, each in enumerate(processes):
        if any(other.poll() for other in processes):
            break
        try:
            each.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} had finished, and did not end"
    codes = [each.poll() for each in processes]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    return None if failed is None else f"rank {failed} ended with exit code {codes[failed]}, after what stderr says"


def _speed(row: Row, ddp_s: float) -> Row:
    speeds = {"median_speed": "median_s", "low_speed": "high_s", "high_speed": "low_s"}
    return {"variant": row["variant"], **{speed: ddp_s / row[seconds] for speed, seconds in speeds.items()}}
