"""
`python tests/bench/time_to_loss.py`: trains with techniques of sending gradients to a loss, over links of a set rate.

    random numbers ── a random MLP gives each row a class ── Problem: batches, all new ── another MLP learns the classes

Its hosts are those of `python -m hvdlite.bench links`: network namespaces, with one rank and one core each. This file
is the program of the ranks too. Everything is made of seeds: every technique begins with the same parameters, and step
by step gets the same batches.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvdlite as hvd
from hvdlite.bench.arguments import OptionError, read_count, show_count, show_ratio, show_size, show_time, some_of
from hvdlite.bench.links import (
    AS_IS,
    DDP,
    TECHNIQUES,
    failure_of,
    measure_block,
    read_rates,
)
from hvdlite.bench.namespaces import Hosts
from hvdlite.bench.ranks import Ranks, Samples
from hvdlite.bench.report import Columns, Row, ratio_of, table
from hvdlite.bench.training import Batch, Training
from hvdlite.runtime.world import current_world

ROWS = 32
USUAL_LOSS, MOST_STEPS = 1.0, 1000
_INPUTS, _CLASSES = 64, 16
_GUESSED = math.log(_CLASSES)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
_TEACHER_WIDTH, _WIDTH = 32, 512
_EVALUATED_ROWS, _EVALUATED_SEED = 512, 2**40
# Techniques whose parameters are always those that all hosts share are evaluated so often.
_STEPS = 10


def read_loss(text: str) -> float:
    """Returns the text as a loss, above 0 and below that of guessing."""
    with suppress(ValueError):
        if 0 < float(text) < _GUESSED:
            return float(text)
    raise OptionError(f"{text!r} is not a loss between 0 and that of guessing, {_GUESSED:.2f}, such as {USUAL_LOSS}")


def steps_of_block(name: str) -> int:
    """Returns the number of steps between two evaluations of a technique: a whole interval, after which hosts agree."""
    interval = TECHNIQUES[name].interval
    return interval if interval > 1 else _STEPS


class Problem:
    """Rows of random numbers in 16 classes, for `_WIDTH` wide layers: 0.3 M parameters, and few operations for each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.manual_seed(0)
        self._teacher = nn.Sequential(
            nn.Linear(_INPUTS, _TEACHER_WIDTH), nn.ReLU(), nn.Linear(_TEACHER_WIDTH, _CLASSES)
        )
        self._evaluated = self._batch(_EVALUATED_SEED, _EVALUATED_ROWS)

    def model(self) -> nn.Module:
        """Returns a new model on the device, with the same parameters each time and on every rank."""
        torch.manual_seed(1)
        layers = (nn.Linear(_INPUTS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(_WIDTH, _CLASSES)).to(self._device)

    def batches(self, first_step: int, count: int, rank: int, size: int) -> list[Batch]:
        """Returns the batches of a rank for ``count`` steps. No rank of the ``size`` and no step has the same ones."""
        return [self._batch(step * size + rank, ROWS) for step in range(first_step, first_step + count)]

    @torch.no_grad()
    def loss(self, training: Training) -> float:
        """Returns the loss on rows that are in no batch, of the parameters that all hosts share."""
        inputs, targets = self._evaluated
        with training.averaged():
            return functional.cross_entropy(training.model(inputs), targets).item()

    @torch.no_grad()
    def _batch(self, seed: int, rows: int) -> Batch:
        inputs = torch.randn(rows, _INPUTS, generator=torch.Generator().manual_seed(seed))
        targets: Tensor = self._teacher(inputs).argmax(1)
        return inputs.to(self._device), targets.to(self._device)


class Progress(NamedTuple):
    """What a technique has taken so far, or until its loss was ``reached``: the last of ``losses``, one per block."""

    reached: bool
    steps: int
    seconds: float
    sent_bytes: float
    losses: Sequence[float]


def progress_of(
    name: str, wanted: float, times: Sequence[float], sent: Sequence[float], losses: Sequence[float]
) -> Progress:
    """Returns the progress of a technique, from a step's seconds and bytes in each block, and the loss after it."""
    steps = steps_of_block(name)
    reached = any(loss <= wanted for loss in losses)
    return Progress(reached, steps * len(losses), steps * math.fsum(times), steps * math.fsum(sent), losses)


def learn(
    ranks: Ranks,
    loss: float,
    most_steps: int,
    times: Samples,
    sent: Samples,
    losses: Samples,
    after_round: Callable[[], object] = lambda: None,
) -> None:
    """Trains with each technique from the start until its loss is reached, or it has made ``most_steps``.

    Appends the seconds and bytes of a step in each block of `steps_of_block`, and the loss after it in ``losses``.
    Every rank must call it, with the same arguments. What the loss takes is in no time.
    """
    problem = Problem(ranks.device)
    with ExitStack() as stack:
        blocks = {}
        for name in times:
            training = TECHNIQUES[name].make(ranks, problem.model(), ADAMW)
            stack.callback(training.close)
            blocks[name] = partial(_learn, ranks, problem, training, steps_of_block(name), sent[name], losses[name])

        def remove_those_at_the_end() -> None:
            for name in list(blocks):
                if losses[name][-1] <= loss or len(losses[name]) * steps_of_block(name) >= most_steps:
                    del blocks[name]
            after_round()

        ranks.take_turns("rounds", blocks, most_steps, times, remove_those_at_the_end)
    gc.collect()


def _learn(
    ranks: Ranks, problem: Problem, training: Training, steps: int, sent: list[float], losses: list[float]
) -> float:
    batches = iter(problem.batches(len(losses) * steps, steps, ranks.rank, ranks.size))
    seconds = measure_block(ranks, lambda: training.step(next(batches)), steps, sent)
    # Of all ranks, so that they end in the same round: the last bits may differ between CPUs.
    losses.append(ranks.slowest(problem.loss(training)))
    return seconds


def report_of(rates: dict[str, dict[str, Samples]], wanted: float) -> list[Row]:
    """Returns a row for each technique at each rate, from the times, bytes and losses of its blocks."""
    rows = []
    for rate, found in rates.items():
        of_rate = {
            name: progress_of(name, wanted, found["times"][name], found["sent"][name], losses)
            for name, losses in found["losses"].items()
        }
        ddp = of_rate.get(DDP)
        for name, own in of_rate.items():
            both = ddp is not None and ddp.reached and own.reached
            sooner = ratio_of(ddp.seconds, own.seconds) if both else None
            rows.append({"rate": rate, "technique": name, **own._asdict(), "times_sooner_than_ddp": sooner})
    return rows


_COLUMNS: Columns = {
    "link": lambda row: row["rate"],
    "technique": lambda row: row["technique"],
    "time": lambda row: show_time(row["seconds"]) if row["reached"] else f"not in {show_count(row['steps'], 'step')}",
    f"× {DDP}": lambda row: show_ratio(row["times_sooner_than_ddp"]),
    "steps": lambda row: f"{row['steps']}" if row["reached"] else "–",
    "bytes": lambda row: show_size(row["sent_bytes"]) if row["reached"] else "–",
}


def text_of(rows: Sequence[Row], wanted: float) -> str:
    """Returns the table of the rows."""
    return table(f"training to a loss of {wanted:g}, batch {ROWS} of each rank", rows, _COLUMNS, text_columns=2)


def rank_main(names: Sequence[str], loss: float, most_steps: int, file: Path) -> None:
    """Trains on this rank's CPU, and has rank 0 write what was measured to the file. Every rank must call it."""
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    found: dict[str, Samples] = {kind: {name: [] for name in names} for kind in ("times", "sent", "losses")}
    learn(ranks, loss, most_steps, found["times"], found["sent"], found["losses"])
    if ranks.rank == 0:
        file.write_text(json.dumps(found))
    ranks.close()


def main(words: Sequence[str] | None = None) -> int:
    """Makes the hosts, trains at each rate, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Trains with each technique to a loss, over slow links.")
    parser.add_argument("--rates", type=read_rates, default=("1gbit", "100mbit"), metavar="RATE,...")
    known = some_of(TECHNIQUES, "a technique")
    parser.add_argument("--techniques", type=known, default=tuple(TECHNIQUES), metavar="NAME,...")
    parser.add_argument("--hosts", type=read_count, default=2, metavar="N")
    parser.add_argument("--loss", type=read_loss, default=USUAL_LOSS, metavar="LOSS", help="(%(default)s)")
    parser.add_argument("--steps", type=read_count, default=MOST_STEPS, metavar="N", help="at most (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # what each host runs, into --json
    given = parser.parse_args(words)
    if given.rank:
        rank_main(given.techniques, given.loss, given.steps, given.json)
        return 0
    if AS_IS in given.rates:
        parser.error("--rates: it makes its own links")
    program = [sys.executable, __file__, "--rank", "--techniques", ",".join(given.techniques)]
    program += ["--loss", f"{given.loss}", "--steps", f"{given.steps}"]
    hosts, rates, failures = Hosts(given.hosts), {}, []
    try:
        for rate in given.rates:
            hosts.limit(rate)
            with tempfile.NamedTemporaryFile("r") as file:
                failure = failure_of(hosts.start([*program, "--json", file.name], os.environ))
                hosts.end_ranks()
                if failure is None:
                    rates[rate] = json.loads(Path(file.name).read_text())
                else:
                    failures.append(failure)
    finally:
        failures += hosts.close()
    rows = report_of(rates, given.loss)
    print("\n".join([text_of(rows, given.loss), *failures]))
    if given.json is not None:
        given.json.write_text(json.dumps({"loss": given.loss, "rows": rows}, indent=1) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
