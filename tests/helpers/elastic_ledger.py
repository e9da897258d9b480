"""Checks what the workers of an elastic job have noted (`elastic_program`): nothing is lost and nothing done twice.

    files of the workers ── generations, their first steps ── steps that count ── the same in one process ── equal?

A step *counts* if no later generation begins before it. From the steps that count, and from the number of ranks in
each, follow the samples of each rank in each step, and the parameters after each step: both are computed here anew, in
one process, without hvdlite.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from elastic_program import BATCH, SAMPLER_SEED, SAMPLES, loss_of, new_model, new_optimizer
from elastic_scenarios import Scenario

TOLERANCE = 1e-12

LOSSES = (
    *("SIGKILL", "SIGSEGV", "raises", "exits"),
    *("link_is_cut", "link_is_cut_for_a_while", "kill_all_on_a_host", "power_off"),
    *("kill_an_agent", "kill_an_ssh_client"),
)  # fmt: skip
# Of the time from a loss to the next step: until a survivor's wait fails; until it has restored its state and left its
# world; until it has a rank again (hvdlite-run knows that the worker has ended, and all others have come); until
# hvd.init() has connected them; until states are equal; and the step.
PARTS = ("noticed", "left", "seated", "connected", "synced", "stepped")
_MOST_RANKS = 4

Note = dict[str, Any]


@dataclass
class _Generation:
    """A world: its workers by rank, what each took and had as its loss in each step, and where each began."""

    number: int
    size: int
    workers: dict[int, int] = field(default_factory=dict)
    source_step: int | None = None  # that of rank 0 when it was given its seat
    begins: dict[int, Note] = field(default_factory=dict)
    takes: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by step and rank
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)  # by rank: the last commit


@dataclass(frozen=True)
class Step:
    """A step that counts. ``is_first``: of its generation."""

    generation: int
    size: int
    takes: Sequence[Sequence[int]]
    losses: Sequence[float | None]


@dataclass(frozen=True)
class Recovery:
    """How long it took, in seconds, from a fault to the first step after it; and of what it consists."""

    how: str
    size: int
    parts: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def read(directory: Path) -> dict[int, list[Note]]:
    """Returns the notes of each worker."""
    notes = {}
    for path in directory.glob("worker.*"):
        # A worker may be killed within a write.
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        notes[int(path.suffix[1:])] = [json.loads(line) for line in lines]
    return notes


def check(scenario: Scenario, notes: dict[int, list[Note]]) -> list[Step]:
    """Asserts that the job has done what it had to; returns the steps that count."""
    generations = _generations(notes)
    _check_order(generations)
    history: list[tuple[_Generation, int]] = []
    starts: list[tuple[_Generation, int, list[tuple[int, int]]]] = []
    committed = 0
    for generation in generations:
        if generation.begins:
            begin = f"generation {generation.number} begins"
            start = _same(generation.begins.values(), "step", f"{begin} at different steps")
            _same(generation.begins.values(), "bits", f"{begin} with different models")
            assert start == generation.source_step, f"generation {generation.number} begins where rank 0 was not"
            assert committed <= start <= len(history), f"generation {generation.number}: a commit of all ranks is lost"
            del history[start:]
            starts.append((generation, start, _keys(history)))
        last = max((step for step, _ in generation.losses), default=0)
        history += [(generation, step) for step in range(len(history) + 1, last + 1) if generation.begins]
        if len(generation.saved) == generation.size:
            committed = max(committed, min(generation.saved.values()))
    if scenario.exit_code == 0:
        ends = [note for each in notes.values() for note in each if note["what"] == "ends"]
        assert [note["rank"] for note in sorted(ends, key=lambda note: note["rank"])] == list(range(len(ends)))
        assert {note["size"] for note in ends} == {len(ends)} == {scenario.stages[-1].size}
        end_step, end_bits, samples = (
            _same(ends, each, f"ends differ: {each}") for each in ("step", "bits", "samples")
        )
        assert end_step == len(history), "the last step that counts is that of the end"
    steps = [_step_of(generation, number) for generation, number in history]
    _check_samples(steps)
    models = _replay(steps)
    for generation, start, keys in starts:
        if keys == _keys(history)[:start]:
            _assert_equal(generation.begins, models[start])
    if scenario.exit_code == 0:
        assert samples == sum(len(taken) for step in steps for taken in step.takes)
        _assert_equal({"end": {"bits": end_bits}}, models[-1])
    return steps


def _same(notes: Iterable[Note], name: str, why: str) -> Any:
    found = {note[name] for note in notes}
    assert len(found) == 1, why
    return found.pop()


def _keys(history: Sequence[tuple[_Generation, int]]) -> list[tuple[int, int]]:
    return [(generation.number, step) for generation, step in history]


def _generations(notes: dict[int, list[Note]]) -> list[_Generation]:
    found: dict[int, _Generation] = {}
    for worker, each in notes.items():
        step = saved = rank = 0
        for note in each:
            what = note["what"]
            if what == "seat":
                rank = note["rank"]
                generation = found.setdefault(note["generation"], _Generation(note["generation"], note["size"]))
                assert generation.size == note["size"]
                assert generation.workers.setdefault(rank, worker) == worker, "two workers have the same rank"
                if rank == 0:
                    generation.source_step = step
            elif what == "begins":
                assert (note["rank"], note["size"]) == (rank, generation.size)
                assert rank or note["step"] == step, "the state of rank 0 has changed in between"
                generation.begins[rank] = note
                step = note["step"]
            elif what == "synced":
                step = saved = note["step"]
            elif what == "takes":
                assert note["step"] == step + 1, "a step is left out, or done twice"
                generation.takes[note["step"], rank] = note["indices"]
            elif what == "done":
                step = note["step"]
                generation.losses[step, rank] = note["loss"]
            elif what == "saved":
                assert note["step"] == step
                saved = generation.saved[rank] = step
            elif what == "restored":
                assert note["step"] == saved, "it has not gone back to its last commit"
                step = saved
    return [found[number] for number in sorted(found)]


def _check_order(generations: Sequence[_Generation]) -> None:
    """Survivors keep their order, and those that are new come behind them."""
    known: list[int] = []
    for generation in generations:
        members = [generation.workers[rank] for rank in sorted(generation.workers)]
        survivors = [worker for worker in known if worker in members]
        assert members[: len(survivors)] == survivors, f"generation {generation.number}: {known} became {members}"
        if len(members) == generation.size:
            # A worker may have been killed before it noted its seat.
            known = members


def _step_of(generation: _Generation, number: int) -> Step:
    ranks = range(generation.size)
    missing = [rank for rank in ranks if (number, rank) not in generation.takes]
    assert not missing, f"step {number} of generation {generation.number} without the samples of ranks {missing}"
    takes = [generation.takes[number, rank] for rank in ranks]
    losses = [generation.losses.get((number, rank)) for rank in ranks]
    return Step(generation.number, generation.size, takes, losses)


def _check_samples(steps: Sequence[Step]) -> None:
    """Asserts that each rank has had, in each step, the samples that follow from the steps before."""
    epoch = processed = number = of_each = 0
    seen: Counter[int] = Counter()
    left: list[int] = []
    for before, step in zip([None, *steps], steps, strict=False):
        if before is None or step.generation != before.generation:
            number, left = 0, _order(epoch)[processed:]
            of_each = -(-len(left) // step.size)
        if number * BATCH >= of_each:
            assert set(seen) == set(range(SAMPLES)), f"epoch {epoch} is over without some of its samples"
            # What is left is filled up, so that all ranks have equally many.
            assert sum(seen.values()) < SAMPLES + _MOST_RANKS, f"epoch {epoch} has had samples twice"
            epoch, processed, number, seen = epoch + 1, 0, 0, Counter()
            left = _order(epoch)
            of_each = -(-len(left) // step.size)
        padded = [left[index % len(left)] for index in range(of_each * step.size)]
        for rank, taken in enumerate(step.takes):
            expected = padded[rank :: step.size][number * BATCH : (number + 1) * BATCH]
            assert taken == expected, f"generation {step.generation}: rank {rank} has had other samples"
            seen.update(taken)
        number += 1
        processed += BATCH * step.size


def _order(epoch: int) -> list[int]:
    order = list(range(SAMPLES))
    random.Random(SAMPLER_SEED + epoch).shuffle(order)
    return order


def _replay(steps: Sequence[Step]) -> list[torch.Tensor]:
    """Does the steps in one process, compares the losses, and returns the parameters after each."""
    model = new_model()
    optimizer = new_optimizer(model)
    models = [_flat(model)]
    for number, step in enumerate(steps, start=1):
        optimizer.zero_grad()
        for taken, noted in zip(step.takes, step.losses, strict=True):
            loss = loss_of(model, taken)
            assert noted is None or abs(loss.item() - noted) < TOLERANCE, f"the loss of step {number} is another"
            (loss / step.size).backward()
        optimizer.step()
        models.append(_flat(model))
    return models


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def _assert_equal(found: dict[Any, Note], expected: torch.Tensor) -> None:
    for note in found.values():
        parameters = torch.frombuffer(bytearray.fromhex(note["bits"]), dtype=torch.float64)
        assert (parameters - expected).abs().max().item() < TOLERANCE, "the model is not that of the steps that count"


def recoveries(scenario: Scenario, notes: dict[int, list[Note]]) -> list[Recovery]:
    """How long the job took to go on after each loss that no other followed before it did."""
    how = {("fault", each.id): each.how for each in scenario.faults if not each.joiner}
    how |= {("event", each.id): each.do for each in scenario.events}
    everything = sorted(
        ((note["at_s"], worker, note) for worker, each in notes.items() for note in each), key=lambda each: each[0]
    )
    begun: dict[tuple[str, str], tuple[float, int, Note]] = {}
    for at_s, worker, note in everything:
        if (what := note["what"]) in ("fault", "event"):
            begun.setdefault((what, note[what]), (at_s, worker, note))
    found = []
    for cause, (at_s, lost, note) in begun.items():
        if how.get(cause, "") not in LOSSES:
            continue
        later = [each for each in everything if each[0] > at_s and (each[1] != lost or cause[0] == "event")]
        after = [each for each in later if each[2]["what"] == "done" and each[2]["generation"] > note["generation"]]
        if not after or any(at_s < other_s < after[0][0] for other_s, *_ in begun.values()):
            continue
        end_s, survivor, _ = after[0]
        # The first note of each sort.
        its = {each["what"]: its_s for its_s, worker, each in reversed(later) if worker == survivor}
        marks = [its.get(what) for what in ("restoring", "asks", "seat", "connected", "begins")]
        if None not in marks:
            parts = [mark_s - before_s for before_s, mark_s in itertools.pairwise([at_s, *marks, end_s])]
            found.append(Recovery(how[cause], scenario.ranks, dict(zip(PARTS, parts, strict=True))))
    return found
