"""Whoever is lost within a step, and whoever joins: each sample of an epoch is in one step, and all ranks do as many.

Workers are generators that stop where a step needs all ranks, so that some may be ahead of others when one is lost.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from long_run import trials
from torch.utils.data import BatchSampler

from hvdlite.elastic import ElasticSampler, sampler
from hvdlite.runtime.survival import Note

COMMIT = "commit"


class Program(NamedTuple):
    """How a program trains."""

    length: int
    size: int
    batch_size: int = 2
    prefetch: int = 0
    passes: int = 1
    records_before: bool = False
    records_indices: bool = False
    shuffle: bool = False
    commits_every: int = 0
    epochs: int = 2


@dataclass(eq=False)
class Worker:
    """A rank's process: its sampler, the step in which it is, and how many it has ended."""

    sampler: Any = None
    runs: Any = None
    at: Any = None
    passed: int = 0


class Event(NamedTuple):
    """What happens at the step with this number, to how many ranks.

    ``kind``: ``redone`` (lost before the vote), ``ahead`` (some of the others have passed the vote), ``unheard`` (some
    of the others hear only of the next loss, which is at once), ``begun again`` (with newcomers, in the step),
    ``restore`` and, at the next commit, ``join``. Where a step cannot be redone: ``discarded``, ``ahead discarded``
    (some are a step ahead, and it is theirs that is discarded) and ``unheard discarded``.
    """

    step: int
    kind: str
    ranks: int = 1


@dataclass
class Job:
    """Workers in lockstep, and what each epoch has trained."""

    program: Program
    monkeypatch: pytest.MonkeyPatch
    workers: list[Worker] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    carried: dict[int, list[int]] = field(default_factory=dict)
    padding: int = 0
    steps: int = 0
    seat: tuple[int, int] = (0, 1)

    def __post_init__(self):
        self.monkeypatch.setattr(sampler, "rank", lambda: self.seat[0])
        self.monkeypatch.setattr(sampler, "size", lambda: self.seat[1])
        self.begin_with([Worker() for _ in range(self.program.size)], None)

    def run(self, events=()):
        events = deque(sorted(events))
        joins = 0
        while any(worker.at is not None for worker in self.workers):
            ats = {COMMIT if worker.at == COMMIT else type(worker.at) for worker in self.workers}
            assert len(ats) == 1, "the ranks do not do equally many steps"
            if ats == {COMMIT}:
                self.commit()
                if joins:
                    self.join(joins)
                    joins = 0
                else:
                    self.advance(self.workers)
                continue
            event = events.popleft() if events and events[0].step <= self.steps else None
            if event is not None and event.kind == "join":
                joins = event.ranks
            elif event is not None:
                self.happen(event)
                continue
            self.step()

    # -- the program

    def train(self, worker):
        program = self.program
        step = 0
        while worker.sampler.epoch < program.epochs:
            of_step = []
            for batch in prefetched(
                BatchSampler(worker.sampler, program.batch_size, drop_last=False), program.prefetch
            ):
                of_step += batch
                if program.records_before:
                    self.record(worker, batch)
                step += 1
                if step % program.passes == 0:
                    yield worker.sampler.epoch, of_step
                    of_step = []
                if not program.records_before:
                    self.record(worker, batch)
                if program.commits_every and step % (program.passes * program.commits_every) == 0:
                    yield COMMIT
            if of_step:
                yield worker.sampler.epoch, of_step
            worker.sampler.set_epoch(worker.sampler.epoch + 1)
            self.carried[worker.sampler.epoch] = list(worker.sampler._ledger.carried)
            self.padding += len(self.workers)

    def record(self, worker, batch):
        if self.program.records_indices:
            worker.sampler.record_indices(batch)
        else:
            worker.sampler.record_batch(0, self.program.batch_size)

    # -- what happens to it

    def sit(self, worker):
        self.seat = (self.workers.index(worker), len(self.workers))

    def advance(self, workers):
        for worker in workers:
            self.sit(worker)
            worker.at = next(worker.runs, None)

    def end_step(self, workers):
        for worker in workers:
            epoch, indices = worker.at
            self.trained.setdefault(epoch, []).extend(indices)
            worker.passed += 1
            worker.sampler.note_vote(0)
        self.advance(workers)

    def step(self):
        self.steps += 1
        self.end_step(self.workers)

    def go_on(self, heard_by):
        # In the world that they were in, and then in the next.
        notes = [Note(worker.passed, json.loads(json.dumps(worker.sampler.note_of(0)))) for worker in self.workers]
        self.padding += len(self.workers)
        for worker in heard_by:
            self.sit(worker)
            worker.sampler.go_on(copy.deepcopy(notes))

    def happen(self, event):  # noqa: PLR0911 - one for each kind
        self.steps += 1
        count = min(event.ranks, len(self.workers) - 1)
        if event.kind == "restore":
            return self.begin_with(self.workers[count:], self.saved)
        if event.kind == "begun again":
            for worker in self.workers:
                worker.sampler.begin_again(0)
            left = self.workers[count:]
            return self.begin_with([*left, Worker()], left[0].sampler.state_dict())
        lost, left = self.workers[:count], self.workers[count:]
        ahead = left[: len(left) // 2] if event.kind.startswith("ahead") else []
        if ahead:
            # The averages have the gradients of the lost ranks, too.
            for worker in lost:
                self.trained.setdefault(worker.at[0], []).extend(worker.at[1])
            self.end_step(ahead)
            if any(worker.at is None for worker in ahead):
                # It was the last step, and nothing is left to be drawn.
                self.workers = left
                return self.end_step(left[len(ahead) :])
            if any(worker.at == COMMIT for worker in ahead):
                # They lose it in a collective of the program: all go back.
                return self.begin_with(left, self.saved)
        self.workers = left
        if event.kind == "unheard discarded" and len(left) > 1:
            return self.discard_unheard(left)
        if event.kind == "unheard" and len(left) > 1:
            self.go_on(left[: len(left) // 2 + 1])
            self.workers = left = left[1:]
        self.go_on(left)
        if event.kind.endswith("discarded"):
            self.end_step(left[len(ahead) :] if ahead else [])
            return self.discard(left)
        if ahead:
            self.end_step(left[len(ahead) :])
        return None

    def discard_unheard(self, left):
        heard, unheard = left[: len(left) // 2 + 1], left[len(left) // 2 + 1 :]
        self.go_on(heard)
        self.discard(heard)
        self.workers, heard = left[1:], heard[1:]
        if any(worker.at == COMMIT for worker in heard):
            self.begin_with(self.workers, self.saved)
        elif any(worker.at is None for worker in heard):
            # It was the last step; what is carried on is known to those that have heard.
            carried = copy.deepcopy(self.carried)
            self.discard(unheard)
            self.carried = carried
        else:
            self.go_on(self.workers)
            # Those that have heard of the first loss are a step ahead, which is discarded too.
            self.discard(unheard)
            self.discard(self.workers)

    def discard(self, workers):
        self.padding += len(workers)
        for worker in workers:
            worker.passed += 1
            worker.sampler.note_discarded(0)
        self.advance(workers)

    def commit(self):
        self.saved = copy.deepcopy((self.workers[0].sampler.state_dict(), self.trained, self.carried))

    def join(self, count):
        self.begin_with([*self.workers, *(Worker() for _ in range(count))], self.workers[0].sampler.state_dict())

    def begin_with(self, workers, state):
        """Calls the training function again in a world of these workers, with a state or what was saved."""
        if isinstance(state, tuple):
            state, self.trained, self.carried = copy.deepcopy(state)
        self.workers = workers
        self.padding += len(workers)
        for worker in workers:
            self.sit(worker)
            if worker.sampler is None:
                worker.sampler = ElasticSampler(range(self.program.length), shuffle=self.program.shuffle)
            else:
                worker.sampler.reset()
            if state is not None:
                worker.sampler.load_state_dict(json.loads(json.dumps(state)))
            worker.passed, worker.runs = 0, self.train(worker)
        self.commit()
        self.advance(workers)

    def check(self):
        """Each epoch has trained its samples and those that were carried into it, but for those it carries on."""
        for epoch in range(self.program.epochs):
            wanted = Counter([*range(self.program.length), *self.carried.get(epoch, [])])
            done = Counter(self.trained.get(epoch, [])) + Counter(self.carried.get(epoch + 1, []))
            assert not wanted - done, f"epoch {epoch} lacks {wanted - done}"
            # Each division repeats fewer samples than it has ranks.
            assert (done - wanted).total() <= self.padding, f"epoch {epoch} has twice {done - wanted}"


def prefetched(batches, depth):
    """As a DataLoader with workers: some batches are drawn before they are used."""
    drawn, queue = iter(batches), deque()
    queue.extend(itertools.islice(drawn, depth))
    while True:
        queue.extend(itertools.islice(drawn, 1))
        if not queue:
            return
        yield queue.popleft()


def run(monkeypatch, program, *events):
    job = Job(program, monkeypatch)
    job.run(events)
    job.check()
    return job


HABITS = [
    {"records_before": before, "records_indices": indices, "prefetch": prefetch, "passes": passes}
    for before in (False, True)
    for indices in (False, True)
    for prefetch in (0, 3)
    for passes in (1, 2)
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: "-".join(str(value) for value in habit.values()))
@pytest.mark.parametrize(
    "kind", ["redone", "ahead", "unheard", "begun again", "discarded", "ahead discarded", "unheard discarded"]
)
@pytest.mark.parametrize("length", [24, 23])
def test_a_loss_at_any_step_leaves_no_sample_out(monkeypatch, length, kind, habit):
    for size, ranks in [(2, 1), (3, 1), (4, 2), (4, 3)]:
        program = Program(length, size, **habit)
        for step in range(run(monkeypatch, program).steps):
            job = run(monkeypatch, program, Event(step, kind, ranks))
            # Only padding is trained twice, not the batches of the lost rank.
            assert sum(map(len, job.trained.values())) <= 2 * length + job.padding


KINDS = ["redone", "ahead", "unheard", "begun again", "restore", "join"]
KINDS += ["discarded", "ahead discarded", "unheard discarded"]


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
def test_two_changes_in_an_epoch_leave_no_sample_out(monkeypatch, kinds):
    program = Program(21, 4, prefetch=1, commits_every=1, epochs=1)
    for first, second in itertools.combinations_with_replacement(range(5), 2):
        run(monkeypatch, program, Event(first, kinds[0]), Event(second, kinds[1]))


@pytest.mark.parametrize("seed", range(trials(20, 200)))
def test_any_changes_of_any_program_leave_no_sample_out(monkeypatch, seed):
    draw = random.Random(seed)
    for _ in range(20):
        program = Program(
            length=draw.randint(1, 70),
            size=draw.randint(1, 6),
            batch_size=draw.randint(1, 5),
            prefetch=draw.choice([0, 0, 1, 4, 100]),
            passes=draw.choice([1, 1, 2]),
            records_before=draw.random() < 0.3,
            records_indices=draw.random() < 0.5,
            shuffle=draw.random() < 0.5,
            commits_every=draw.choice([1, 2, 3]),
            epochs=draw.randint(1, 3),
        )
        events = [Event(draw.randint(0, 30), draw.choice(KINDS), draw.randint(1, 2)) for _ in range(draw.randint(0, 5))]
        try:
            run(monkeypatch, program, *events)
        except AssertionError as error:
            raise AssertionError(f"{error} in {program} with {events}") from error
