"""
`links`: measures training steps between hosts with slow links, with each of several techniques of sending gradients.

    SlowLinks ── namespaces.Hosts, limited to a rate ── this command with `--rates as-is` on each ── its JSON ── Case
          └─ --rates as-is: `measure` on the ranks of the user's own job

The hosts that it makes are network namespaces of this machine, with one rank and one core each. A `Technique` is a way
of sending gradients, of hvdlite's or of DDP's. docs/measuring.md has a table of them; a new one is an entry of
`TECHNIQUES`.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..buckets.settings import DiLoCo, LocalSGD
from ..compression.casts import Compression
from ..rendezvous.launchers import read_placement
from .arguments import OptionError, flag, read_count, show_count, show_ratio, show_size, show_time, some_of
from .namespaces import Hosts, bits_per_s
from .ranks import Job, Ranks, Samples
from .report import BenchReport, Case, Columns, Command, Row, quartiles_of, ratio_of, spread
from .training import (
    BATCH,
    MODEL,
    Batch,
    Inner,
    Make,
    Training,
    bytes_of,
    ddp,
    in_fp16,
    own,
    sgd,
    training_bytes,
    workload_of,
)

DDP, DDP_FP16 = "ddp", "ddp-fp16"
_RANK = 4  # of the thin matrices of both PowerSGDs
# Unmeasured steps. In the third one DDP's PowerSGD compresses for the first time; it allows no earlier start.
_WARM_UPS, _DDP_START_STEP = 3, 2


@dataclass(frozen=True)
class Technique:
    """How gradients are sent. All blocks take ``interval`` steps, since only the last of them may send anything."""

    make: Make
    interval: int = 1

    @property
    def warm_ups(self) -> int:
        """The number of unmeasured steps: whole intervals, so that each block is one."""
        return _WARM_UPS if self.interval == 1 else self.interval


def _ddp_powersgd(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    # Over gloo in a single bucket. The hook starts its second and third all-reduce in callbacks, whose order between
    # buckets may differ between ranks, and which then wait for each other: ranks end with an error, or hang.
    cap_mb = None if ranks.device.type == "cuda" else bytes_of(model) // 2**20 + 1
    return ddp(ranks, model, inner, bucket_cap_mb=cap_mb, hook=_powersgd_hook)


def _powersgd_hook(group: dist.ProcessGroup, wrapped: DistributedDataParallel) -> None:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    state = hooks.PowerSGDState(group, matrix_approximation_rank=_RANK, start_powerSGD_iter=_DDP_START_STEP)
    wrapped.register_comm_hook(state, hooks.powerSGD_hook)


def _compressed(compression: object) -> Technique:
    return Technique(partial(own, compression=compression))


def _outer(outer: LocalSGD | DiLoCo) -> Technique:
    return Technique(partial(own, outer=outer), outer.sync_every)


TECHNIQUES = {
    DDP: Technique(ddp),
    DDP_FP16: Technique(partial(ddp, hook=in_fp16)),
    "ddp-powersgd": Technique(_ddp_powersgd),
    "none": _compressed(Compression.none),
    "fp16": _compressed(Compression.fp16),
    "bf16": _compressed(Compression.bf16),
    "int8": _compressed(Compression.int8),
    "int4": _compressed(Compression.int4),
    "topk": _compressed(Compression.topk()),
    "powersgd": _compressed(Compression.powersgd(_RANK, start_step=0)),
    "localsgd": _outer(LocalSGD(sync_every=8)),
    "diloco": _outer(DiLoCo(sync_every=100, compression=Compression.int4)),
}


COUNTERS = Path("/proc/net/dev")
_FIRST_ROWS = 2  # of headings
_SENT = 8  # the column of sent bytes, after the eight of what was received


def measure(
    ranks: Ranks,
    model: nn.Module,
    batch: Batch,
    rounds: int,
    times: Samples,
    sent: Samples,
) -> None:
    """Appends, in each round, the seconds and the bytes of a step with each technique in ``times`` and ``sent``.

    Seconds are of the slowest rank, bytes of the host that has sent most, and both are averages over the steps of a
    block. Every rank must call it, with the same techniques.
    """
    with ExitStack() as stack:
        blocks = {}
        for name in times:
            ranks.progress(f"{name}, unmeasured")
            technique = TECHNIQUES[name]
            training = technique.make(ranks, copy.deepcopy(model))
            stack.callback(training.close)
            for _ in range(technique.warm_ups):
                training.step(batch)
            blocks[name] = partial(measure_block, ranks, partial(training.step, batch), technique.interval, sent[name])
        ranks.take_turns("rounds", blocks, rounds, times)
    gc.collect()


def measure_block(ranks: Ranks, step: Callable[[], object], steps: int, sent: list[float]) -> float:
    """Returns the mean seconds of ``steps`` steps, and appends the bytes of one to ``sent``. All ranks must call it."""
    before = read_sent(COUNTERS.read_text())
    seconds = ranks.timed(step, steps)
    # What a rank has sent may wait in its host's queue until the others have received it.
    ranks.barrier()
    sent.append(ranks.slowest(most_sent(before, read_sent(COUNTERS.read_text())) / steps))
    return seconds


def read_sent(counters: str) -> dict[str, int]:
    """Returns the bytes that each network interface has sent, but for loopback, from the text of /proc/net/dev.

    These are the counters of /sys/class/net/*/statistics/tx_bytes, of the process's own network namespace.
    """
    rows = (line.partition(":") for line in counters.splitlines()[_FIRST_ROWS:])
    sent = {name.strip(): int(numbers.split()[_SENT]) for name, _, numbers in rows}
    return {name: nbytes for name, nbytes in sent.items() if name != "lo"}


def most_sent(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Returns the bytes that the busiest interface has sent between the two counts.

    It is no sum: what leaves through a bridge or a bond is counted on that, and again on the interface below.
    """
    return max((nbytes - before.get(name, 0) for name, nbytes in after.items()), default=0)


AS_IS = "as-is"
_OWN_HOSTS = f"hvdlite-run -H HOST1,HOST2 python -m hvdlite.bench links --rates {AS_IS}"
_POLL_S = 0.5


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
class SlowLinks(Command):
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
    model: str = field(default="mlp", metadata=MODEL)
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
        "quartiles": quartiles_of,
        f"× {DDP}": lambda row: show_ratio(row["times_faster_than_ddp"]),
        f"× {DDP_FP16}": lambda row: show_ratio(row["times_faster_than_ddp_fp16"]),
        "steps": lambda row: str(row["count"] * row["interval"]),
    }
    text_columns = 2
    chart_title, panel = "Training steps over slow links", "rate"

    def __post_init__(self) -> None:
        self._makes_hosts = self.rates != (AS_IS,)
        if self.hosts is not None and not self._makes_hosts:
            raise OptionError(f"--hosts: with --rates {AS_IS} the hosts are those of the job: leave it out")
        self._count = 2 if self.hosts is None else self.hosts
        if self._count < 2:
            raise OptionError("--hosts: a host that is alone has no link: say at least 2")
        if "ddp-powersgd" in self.techniques and importlib.util.find_spec("numpy") is None:
            raise OptionError("--techniques: ddp-powersgd: PyTorch's hook needs numpy, which is not installed")
        self._workload = workload_of(self.model)
        self._rows = self.batch or self._workload.rows
        about: Row = {"model": self._workload.name, "batch": self._rows}
        self.cases = [Case(rate, {"rate": rate, **about}) for rate in self.rates]
        # The bytes that a host has sent in a step, by rate and technique; a case's samples are seconds.
        self.sent: dict[str, Samples] = {rate: {name: [] for name in self.techniques} for rate in self.rates}
        self.notes = [
            "bytes: what a host has sent in a step, counted by its network interface.",
            f"× {DDP}, × {DDP_FP16}: how many times as many steps in the same time; above 1 is faster.",
        ]
        averaged = [f"{name} {TECHNIQUES[name].interval}" for name in self.techniques if TECHNIQUES[name].interval > 1]
        if averaged:
            self.notes = [*self.notes, f"Averages over whole intervals, in steps: {', '.join(averaged)}."]
        self.turns = len(self.cases) * self.steps
        self._made: Hosts | None = None
        # What the JSON has of the hosts that it makes, in place of what it has of this process.
        self._about: Row = {}
        self._failed = False

    def prepare(self, ranks: Ranks) -> None:
        ranks.require(None if COUNTERS.exists() else f"bytes are counted by Linux's {COUNTERS}, which is not here")
        if self._makes_hosts:
            if ranks.size > 1 or read_placement(os.environ) is not None:
                raise OptionError(
                    f"it makes hosts of its own: start it outside of any job, or pass --rates {AS_IS} to measure "
                    "between the hosts of this one"
                )
            if ranks.device.type == "cuda":
                raise OptionError(f"the hosts that it makes train on the CPU: pass --device cpu, or --rates {AS_IS}")
            try:
                self._made = Hosts(self._count)
            except OSError as error:
                raise OptionError(f"{error}; or measure between your own hosts: {_OWN_HOSTS}") from None
        elif ranks.job.hosts < 2:
            raise OptionError(f"--rates {AS_IS}: there is no other host: {_OWN_HOSTS}")

    def run(self, ranks: Ranks) -> None:
        self.job = Job(self._count, self._count, "gloo") if self._makes_hosts else ranks.job
        model = self._workload.make(ranks.device)
        of_rank = len(self.techniques) * training_bytes(model)
        too_large = ranks.why_too_large(of_rank * (self._count if self._makes_hosts else 1))
        try:
            if too_large is not None:
                for case in self.cases:
                    case.skipped = f"{too_large}: fewer --techniques need less"
            elif self._made is not None:
                del model
                self._run_on(self._made, ranks)
            else:
                (case,) = self.cases
                case.samples = {name: [] for name in self.techniques}
                batch = self._workload.batch(self._rows, 1 + ranks.rank, ranks.device)
                measure(ranks, model, batch, self.steps, case.samples, self.sent[AS_IS])
        finally:
            left = [] if self._made is None else self._made.close()
            self.notes = [*self.notes, *(f"NOT REMOVED: {each}" for each in left)]
            self._failed |= bool(left)

    def _run_on(self, hosts: Hosts, ranks: Ranks) -> None:
        has_own = hosts.cores == self._count
        shares = "Each host has a core of its own." if has_own else f"Hosts share {show_count(hosts.cores, 'core')}."
        self.notes = [*self.notes, shares]
        words = [sys.executable, "-m", "hvdlite.bench", self.name, "--rates", AS_IS, "--device", "cpu"]
        words += ["--techniques", ",".join(self.techniques), "--model", self.model, "--batch", f"{self._rows}"]
        words += ["--steps", f"{self.steps}", "--json"]
        for case in self.cases:
            ranks.progress(case.label)
            hosts.limit(case.label)
            # The command tells of its progress and of its files, which is for users of a job of their own.
            with (
                tempfile.NamedTemporaryFile("r", suffix=".json") as file,
                tempfile.TemporaryFile("w+", errors="replace") as said,
            ):
                failure = failure_of(hosts.start([*words, file.name], os.environ, said))
                hosts.end_ranks()
                if failure is not None:
                    said.seek(0)
                    print(said.read(), end="", file=sys.stderr, flush=True)
                    case.skipped, self._failed = failure, True
                    continue
                found = json.loads(Path(file.name).read_text())
            self._about = {key: found[key] for key in ("ranks", "hosts", "threads_per_rank")}
            for row in found["rows"]:
                case.samples[row["technique"]] = row["samples_s"]
                self.sent[case.label][row["technique"]] = row["samples_bytes"]
            ranks.progress(case.label, self.steps)

    def title(self) -> str:
        made = " (network namespaces)" if self._makes_hosts else ""
        return f"a training step of {self._workload.name}, batch {self._rows}, on {self.job}{made}"

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        row: Row = {"technique": name, "variant": name if name.startswith(DDP) else f"hvdlite {name}"}
        for key, rival in (("ddp", DDP), ("ddp_fp16", DDP_FP16)):
            row[f"times_faster_than_{key}"] = ratio_of(medians.get(rival), medians[name])
        # With the count of `samples_s`, which is the same.
        return {**row, "interval": TECHNIQUES[name].interval, **spread(self.sent[case.label][name], "bytes")}

    def text_of(self, row: Row) -> str:
        return f"{show_time(row['median_s'])}, {show_ratio(row['times_faster_than_ddp'])} × ddp"

    def report(self) -> BenchReport:
        report = super().report()
        return report._replace(data={**report.data, **self._about}, code=int(self._failed))


def failure_of(processes: Sequence[subprocess.Popen[bytes]]) -> str | None:
    """Waits until a rank has failed, and returns which one, or until all have ended well, and returns None."""
    while True:
        codes = [each.poll() for each in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return f"rank {failed} ended with exit code {codes[failed]}, after what stderr says"
        if None not in codes:
            return None
        time.sleep(_POLL_S)
