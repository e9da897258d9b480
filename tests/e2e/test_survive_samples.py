"""``hvdlite-run --survive``: a worker that is killed in the middle of an epoch leaves none of its samples out.

Each worker writes down the samples of each step that it has ended.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.slow

PATIENCE_S = 300
LENGTH, EPOCHS = 180, 3

# `DIE` is epoch:batch:point of worker 1, where points of a step are begin and vote (behind all averages).
PROGRAM = """
import json, os, signal, sys, types
import torch
import hvdlite as hvd
import hvdlite.elastic
from hvdlite import faults

hvd.init()
worker = int(os.environ["HVDLITE_WORKER"])
died = tuple(os.environ["DIE"].split(":"))
waits = os.environ["WAITS"] == "1"
torch.set_num_threads(1)


numbers = torch.utils.data.TensorDataset(torch.arange(180))
torch.manual_seed(0)
model = torch.nn.Embedding(180, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
sampler, other = hvd.elastic.ElasticSampler(numbers), hvd.elastic.ElasticSampler(range(7))
parts = dict(model=model, optimizer=optimizer, sampler=sampler, other=other, epoch=0, step=0)
number = -1
if os.environ["PLAIN"] == "1":
    run, state = lambda train: train, types.SimpleNamespace(**parts, commit=lambda: None)
else:
    run, state = hvd.elastic.run, hvd.elastic.TorchState(**parts)


def maybe_die(point):
    if worker == 1 and (str(state.epoch), str(number), point) == died:
        os.kill(os.getpid(), signal.SIGKILL)


faults._armed = types.SimpleNamespace(pass_point=maybe_die)
notes = open(os.environ["RESULTS"] + f"/{worker}", "w")


@run
def train(state):
    global number
    loader = torch.utils.data.DataLoader(numbers, 4, sampler=state.sampler, num_workers=2)
    while state.epoch < 3:
        for number, (batch,) in enumerate(loader):
            maybe_die("begin")
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            state.sampler.record_batch(number, 4)
            state.step += 1
            print(json.dumps([state.epoch, state.step, hvd.size(), batch.tolist()]), file=notes, flush=True)
            # Not before the replacement is there, so that it joins in this epoch.
            while waits and hvd.size() < 3:
                state.commit()
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        carried = state.sampler._ledger.carried
        state.commit()
    print("carried", carried, "rank", hvd.rank(), flush=True)


train(state)
"""


def steps_of(launch, tmp_path, died: str, *flags: str, waits: bool = False, plain: bool = False):
    """Runs a job of three workers; returns by epoch and step the number of ranks and the batch of each worker."""
    results = tmp_path / "results"
    results.mkdir()
    variables = {"DIE": died, "RESULTS": str(results), "WAITS": str(int(waits)), "PLAIN": str(int(plain))}
    job = launch(*("-np", "3", "--min-np", "1", "--survive", *flags), sys.executable, "-c", PROGRAM, env=variables)
    code, out, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 0, err.decode()
    assert "going back to the last commit" not in err.decode()
    assert "carried [] rank 0" in out.decode()
    steps: dict[int, dict[int, dict[int, tuple[int, list[int]]]]] = {}
    for each in results.iterdir():
        for line in each.read_text().splitlines():
            epoch, step, size, batch = json.loads(line)
            assert (
                steps.setdefault(epoch, {}).setdefault(step, {}).setdefault(int(each.name), (size, batch))[1] == batch
            )
    return steps


def assert_each_sample_is_in_one_step(steps) -> None:
    assert steps.keys() == set(range(EPOCHS))
    for epoch, of_epoch in steps.items():
        drawn = Counter()
        for batches in of_epoch.values():
            assert len({len(batch) for _, batch in batches.values()}) == 1, "batches of one step differ in length"
            drawn += Counter(index for _, batch in batches.values() for index in batch)
        assert set(drawn) == set(range(LENGTH)), f"epoch {epoch} lacks {set(range(LENGTH)) - set(drawn)}"
        # At most three divisions, each of which repeats fewer samples than it has ranks.
        assert drawn.total() - LENGTH <= (6 if epoch == 1 else 2)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("died", "plain"), [("1:3:begin", False), ("1:2:vote", False), ("1:4:begin", True)])
def test_the_others_train_what_the_lost_worker_had_left_in_the_same_epoch(launch, tmp_path, died, plain):
    steps = steps_of(launch, tmp_path, died, "--on-failure", "shrink", plain=plain)
    assert_each_sample_is_in_one_step(steps)
    assert {size for size, _ in steps[2][max(steps[2])].values()} == {2}


@pytest.mark.night
def test_a_replacement_that_joins_in_the_same_epoch_trains_nothing_again(launch, tmp_path):
    steps = steps_of(launch, tmp_path, "1:2:begin", "--on-failure", "replace", waits=True)
    assert_each_sample_is_in_one_step(steps)
    assert {len(batches) for batches in steps[1].values()} == {2, 3}
    assert 3 in steps[1][max(steps[1])], "the replacement has trained in this epoch"
