"""torchdata's `StatefulDataLoader` goes on in the middle of an epoch, with PyTorch's sampler and with hvdlite's."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from integrations.test_framework_page import SECTIONS, snippets_of
from torch.utils.data import DistributedSampler, Sampler

from hvdlite.elastic import ElasticSampler

pytestmark = pytest.mark.slow  # torchdata is there only where tests of all packages run

LENGTH, EPOCHS, BATCH = 22, 2, 3


class Training:
    """Training of one rank of two, which may stop after some batches: what it has trained, and its last state."""

    def __init__(self, make: Any, workers: int, is_recorded: bool, state: dict[str, Any] | None = None) -> None:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        self.sampler: Sampler[int] = make()
        self.loader = stateful.StatefulDataLoader(
            torch.arange(LENGTH), batch_size=BATCH, sampler=self.sampler, num_workers=workers
        )
        self._is_recorded = is_recorded
        self.trained: list[tuple[int, list[int]]] = []
        self.epoch = 0
        if state is not None:
            self.epoch = state["epoch"]
            self.loader.load_state_dict(state["loader"])

    def run(self, batches: int = -1, *, to_the_end_of_an_epoch: bool = False) -> dict[str, Any]:
        """Trains so many batches, or all, and returns the state."""
        while self.epoch < EPOCHS:
            if isinstance(self.sampler, DistributedSampler):
                self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                self.trained.append((self.epoch, batch.tolist()))
                if self._is_recorded:
                    self.sampler.record_batch(0, len(batch))
                if len(self.trained) == batches and not to_the_end_of_an_epoch:
                    return self.state()
            self.epoch += 1
            if len(self.trained) == batches:
                return self.state()
            if isinstance(self.sampler, ElasticSampler):
                self.sampler.set_epoch(self.epoch)
        return self.state()

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}


def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.elastic.sampler.rank", lambda: 1)
    monkeypatch.setattr("hvdlite.elastic.sampler.size", lambda: 2)


SAMPLERS = {
    "DistributedSampler": (lambda: DistributedSampler(range(LENGTH), num_replicas=2, rank=1), False),
    "ElasticSampler, recorded": (lambda: ElasticSampler(range(LENGTH)), True),
    "ElasticSampler": (lambda: ElasticSampler(range(LENGTH)), False),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_batches_after_a_break_are_those_without_it(monkeypatch, kind, workers):
    second_of_two(monkeypatch)
    make, is_recorded = SAMPLERS[kind]
    whole = Training(make, workers, is_recorded)
    whole.run()
    in_epoch = len(whole.trained) // EPOCHS
    assert in_epoch == 4, "the last batch is a short one"
    for stop in range(1, len(whole.trained)):
        for at_end in {False, stop == in_epoch}:
            first = Training(make, workers, is_recorded)
            second = Training(make, workers, is_recorded, first.run(stop, to_the_end_of_an_epoch=at_end))
            second.run()
            assert first.trained + second.trained == whole.trained, (stop, at_end)


def test_a_job_of_one_rank_goes_on_where_two_have_stopped(monkeypatch):
    make, _ = SAMPLERS["ElasticSampler"]
    second_of_two(monkeypatch)
    second = Training(make, 0, is_recorded=False)
    state = second.run(2)
    monkeypatch.setattr("hvdlite.elastic.sampler.rank", lambda: 0)
    first = Training(make, 0, is_recorded=False)
    first.run(2)
    monkeypatch.setattr("hvdlite.elastic.sampler.size", lambda: 1)
    alone = Training(make, 0, False, state)
    alone.run()
    drawn = [index for epoch, batch in first.trained + second.trained + alone.trained if epoch == 0 for index in batch]
    assert sorted(drawn) == list(range(LENGTH))


def test_the_pages_program_ends_with_the_same_bits_though_it_is_broken_off(launch, tmp_path):
    package, before, after = SECTIONS["torchdata"]
    pytest.importorskip(package)
    (tmp_path / "train.py").write_text("\n".join([before, snippets_of("torchdata"), after]))

    def trained(break_at: int = -1, ranks: int = 2) -> set[tuple[str, str]]:
        env = {"OMP_NUM_THREADS": "1", "BREAK_AT": str(break_at)}
        job = launch("-np", str(ranks), sys.executable, "train.py", cwd=tmp_path, env=env)
        code, out, err = job.ended()
        assert (code == 0) == (break_at == -1), (out + err).decode()
        found = re.findall(r"\[(\d)\]<stdout>:trained (\d+) (\d+)\n", out.decode())
        assert len(found) == (ranks if break_at == -1 else 0), out.decode()
        return {(steps, bits) for _, steps, bits in found}

    ((steps, bits),) = trained()
    assert int(steps) == 3 * 175
    (tmp_path / "checkpoint.pt").unlink()
    trained(break_at=130)  # the checkpoint is from step 100, within the first epoch
    trained(break_at=199)  # of step 275, within the second one
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    assert trained() == {("250", bits)}
    (tmp_path / "checkpoint.pt").write_bytes(kept)
    ((alone, _),) = trained(ranks=1)
    assert int(alone) == 150 + 350, "what is left of the epoch, and the next one"
