"""The check of what elastic jobs have noted finds steps that are lost, done twice or done otherwise."""

from __future__ import annotations

import copy

import elastic_ledger
import pytest
from elastic_program import BATCH, SAMPLER_SEED, SAMPLES, bits_of, loss_of, new_model, new_optimizer
from elastic_scenarios import Scenario, Stage

from hvdlite.elastic import ElasticSampler, sampler

SCENARIO = Scenario(0, "two generations", [2], 2, stages=[Stage(9, 1)])


class Job:
    """Two workers as one process would do it; ``goes_back`` drops what rank 1 was lost in."""

    def __init__(self, monkeypatch):
        self.notes = {0: [], 1: []}
        self.model = new_model()
        self.optimizer = new_optimizer(self.model)
        self.step = self.samples = 0
        self.seat = (0, 0)
        monkeypatch.setattr(sampler, "rank", lambda: self.seat[0])
        monkeypatch.setattr(sampler, "size", lambda: self.seat[1])
        self.seat = (0, 1)
        self.sampler = ElasticSampler(range(SAMPLES), seed=SAMPLER_SEED)

    def note(self, workers, what, **details):
        for rank, worker in enumerate(workers):
            line = {"at_s": 0.0, "what": what, "generation": self.generation, "rank": rank, "size": len(workers)}
            self.notes[worker].append({**line, **details})

    def begin(self, generation, workers):
        self.generation, self.workers, self.batch = generation, workers, 0
        self.note(workers, "seat")
        self.note(workers, "synced", step=self.step)
        self.note(workers, "begins", step=self.step, bits=bits_of(self.model))
        self.taken = []
        for rank in range(len(workers)):
            self.seat = (rank, len(workers))
            self.sampler.reset()
            self.taken.append(list(self.sampler))

    def do_step(self, applied=True):
        self.optimizer.zero_grad()
        losses = []
        for rank, indices in enumerate(self.taken):
            taken = indices[self.batch * BATCH : (self.batch + 1) * BATCH]
            self.notes[self.workers[rank]].append(
                {"what": "takes", "step": self.step + 1, "indices": taken, "generation": self.generation}
            )
            losses.append(loss_of(self.model, taken))
            self.samples += len(taken)
        (sum(losses) / len(losses)).backward()
        if applied:
            self.optimizer.step()
        self.batch += 1
        self.step += 1
        self.sampler.record_batch(0, BATCH)
        for rank, worker in enumerate(self.workers):
            done = {"what": "done", "step": self.step, "loss": losses[rank].item(), "generation": self.generation}
            self.notes[worker].append(done)

    def commit(self):
        self.note(self.workers, "saved", step=self.step)
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.sampler.state_dict())
        self.saved = (self.step, self.samples, *copy.deepcopy(parts))

    def restore(self, workers):
        self.step, self.samples, model, optimizer, place = copy.deepcopy(self.saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.sampler.load_state_dict(place)
        self.note(workers, "restored", step=self.step)

    def end(self):
        end = {"step": self.step, "samples": self.samples, "bits": bits_of(self.model)}
        self.note(self.workers, "ends", **end)

    def check(self):
        return elastic_ledger.check(SCENARIO, self.notes)


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def run(job, *, lose=lambda job: job.restore([0]), last=lambda job: job.do_step()):
    job.begin(1, [0, 1])
    for _ in range(4):
        job.do_step()
    job.commit()
    job.do_step()
    lose(job)
    job.begin(2, [0])
    for _ in range(8):
        job.do_step()
    last(job)
    job.end()


def test_a_job_that_goes_back_to_its_last_commit_is_as_it_must_be(job):
    run(job)
    assert [step.size for step in job.check()] == [2] * 4 + [1] * 9


def test_a_job_that_goes_on_from_where_it_was_has_done_that_step_too(job):
    run(job, lose=lambda _: None)
    assert [step.size for step in job.check()] == [2] * 5 + [1] * 9


def lose_the_commit(job):
    job.restore([0])
    job.step = 3


def go_back_with_the_number_alone(job):
    job.step = 4
    job.note([0], "restored", step=4)


def forget_the_momentum(job):
    job.restore([0])
    job.optimizer = new_optimizer(job.model)


def forget_the_place_in_the_epoch(job):
    job.restore([0])
    job.sampler.set_epoch(0)


def restore_with_the_newest_samples(job):
    place = job.sampler.state_dict()
    job.restore([0])
    job.sampler.load_state_dict(place)


@pytest.mark.parametrize(
    "lose",
    [
        lose_the_commit,
        go_back_with_the_number_alone,
        forget_the_momentum,
        forget_the_place_in_the_epoch,
        restore_with_the_newest_samples,
    ],
)
def test_what_is_not_restored_is_found(job, lose):
    run(job, lose=lose)
    with pytest.raises(AssertionError):
        job.check()


def test_a_step_that_is_counted_and_not_done_is_found(job):
    run(job, last=lambda job: job.do_step(applied=False))
    with pytest.raises(AssertionError, match="the model is not that of the steps that count"):
        job.check()


def test_a_rank_that_begins_with_another_model_is_found(job):
    run(job)
    begins = next(note for note in job.notes[1] if note["what"] == "begins")
    begins["bits"] = "ff" + begins["bits"][2:]
    with pytest.raises(AssertionError, match="generation 1 begins with different models"):
        job.check()


def test_a_newcomer_before_a_survivor_is_found(job):
    run(job)
    job.notes[2] = [{**note, "rank": 0, "generation": 3, "size": 2} for note in job.notes[0] if note["what"] == "seat"][
        :1
    ]
    job.notes[0].append({**job.notes[2][0], "rank": 1})
    with pytest.raises(AssertionError, match=r"generation 3: \[0\] became \[2, 0\]"):
        job.check()
