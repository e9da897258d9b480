"""A worker that joins a job keeps nobody waiting until it is ready, and may be lost at any point of it."""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = pytest.mark.slow

PATIENCE_S = 300

# Worker 1 is lost in its fourth step. The worker that takes its place makes its model when the others have taken three
# more steps without it, and they end when it has taken three with them.
PROGRAM = """
import hashlib, os, signal, time
from pathlib import Path

import torch
import hvdlite as hvd

hvd.init()
worker = int(os.environ["HVDLITE_WORKER"])
there = Path(os.environ["RESULTS"])
is_late = worker > 2 and "IS_LATE" in os.environ
size_before, full = hvd.size(), int(os.environ["FULL"])
while is_late and not (there / "late").exists():
    time.sleep(0.01)
torch.manual_seed(worker)
model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, alone=0, together=0)
callbacks = []
state.register_reset_callbacks([lambda: callbacks.append(hvd.size())])


@hvd.elastic.run
def train(state):
    while state.together < 3:
        if worker == 1 and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        inputs = torch.randn(4, 12, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        if state.step > 3:
            # Not by ``size_before``: a worker that comes after two losses finds fewer ranks before it is one.
            state.alone += hvd.size() == full - 1
            state.together += hvd.size() == full
        if state.alone == 3 and hvd.rank() == 0:
            (there / "late").touch()
        state.commit()


train(state)
moments = [each["exp_avg"] for each in optimizer.state.values()]
bits = b"".join(each.detach().numpy().tobytes() for each in [*model.parameters(), *moments])
print("end", worker, hvd.size(), size_before, callbacks[-1:], hashlib.sha256(bits).hexdigest(), flush=True)
"""


def ends_of(launch, tmp_path, *flags: str, **env: str):
    """Returns what each worker has said at its end, by its number, and what hvdlite-run has said."""
    env |= {"RESULTS": str(tmp_path), "FULL": "3"}
    job = launch("-np", "3", "--min-np", "2", *flags, sys.executable, "-c", PROGRAM, env=env)
    code, out, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 0, err.decode()
    lines = [line.split("end ", 1)[1].split(maxsplit=4) for line in out.decode().splitlines() if "end " in line]
    return {int(worker): rest for worker, *rest in lines}, err.decode()


@pytest.mark.night(but=1)
def test_nobody_waits_for_a_spare_that_has_asked_before_it_knew_of_the_program_and_makes_its_model(launch, tmp_path):
    # The first generation begins once all workers have asked, the spare too. Later it takes worker 1's place.
    flags = ["-H", "localhost:4", "--max-np", "3", "--spares", "1", "--max-restarts", "0"]
    ends, err = ends_of(launch, tmp_path, *flags, IS_LATE="1")
    assert ends.keys() == {0, 2, 3}
    assert re.search(r"generation 2: 2 ranks; worker 1 .*\n(.*\n)*.*generation 3: 3 ranks; worker 3 joins", err), err


@pytest.mark.night(but=1)
@pytest.mark.parametrize("flags", [("--survive",), ()], ids=["survive", "restore"])
def test_the_others_train_while_a_new_worker_makes_its_model_and_it_gets_their_state(launch, tmp_path, flags):
    ends, err = ends_of(launch, tmp_path, *flags, IS_LATE="1")
    assert len(ends) == 3
    assert {0, 2} < ends.keys()
    # In the new worker too, hvd.size() was 3 before it was a rank, and its reset callbacks were called.
    assert {(size, before, called) for size, before, called, _ in ends.values()} == {("3", "3", "[3]")}
    assert len({digest for *_, digest in ends.values()}) == 1
    assert "2 ranks" in err


@pytest.mark.night
def test_a_spare_has_made_its_model_before_a_rank_is_lost(launch, tmp_path):
    ends, _ = ends_of(launch, tmp_path, "--survive", "--max-np", "3", "--spares", "1")
    assert len({digest for *_, digest in ends.values()}) == 1
    # Its number of ranks is that which it had before it was one.
    assert ends[3][1] == "3"


# The founders pass the point in their first steps, too: worker 0 has taken some when the new one joins.
@pytest.mark.night(but=1)
@pytest.mark.parametrize("fault", ["kill@join:worker=3", "kill@handover:worker=3", "kill@handover:worker=0:step=4"])
def test_whoever_is_lost_while_a_worker_joins_the_others_go_on_and_another_joins(launch, tmp_path, fault):
    ends, err = ends_of(launch, tmp_path, "--survive", "--chaos", fault)
    assert len(ends) == 3
    assert len({digest for *_, digest in ends.values()}) == 1
    assert "was killed by SIGKILL" in err


@pytest.mark.night(but=1)
@pytest.mark.parametrize("flags", [("--survive",), ()], ids=["survive", "restore"])
def test_a_new_worker_does_not_begin_anew_if_the_last_one_with_the_state_is_lost(launch, tmp_path, flags):
    fault = ["--chaos", "kill@handover:worker=0:step=4"]
    job = launch(
        "-np",
        "2",
        "--min-np",
        "1",
        *fault,
        *flags,
        sys.executable,
        "-c",
        PROGRAM,
        env={"RESULTS": str(tmp_path), "FULL": "2"},
    )
    code, out, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 1, out.decode() + err.decode()
    assert b"end " not in out
    assert "no rank is left that has the state of the training: start the job again" in err.decode()
