"""What elastic programs and their users reach for: hvd.run, spares, programs as written for Horovod, wrong states."""

from __future__ import annotations

import sys

import pytest
from e2e.conftest import assert_clean

pytestmark = pytest.mark.slow

PATIENCE_S = 300

# A training function with a model, an optimizer and a counter of batches. The gradients of all ranks are equal, so that
# the model depends on the number of batches alone.
TRAINING = """
import os, signal, sys, time
import torch
import hvdlite.torch as hvd

def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def step(state):
    state.optimizer.zero_grad()
    state.model(torch.ones(3, 4) * (state.batch % 7 + 1)).pow(2).mean().mul(0.01).backward()
    state.optimizer.step()
    state.batch += 1

worker = os.environ.get("HVDLITE_WORKER")
"""

CALLS = """
def train(batches, *, lost):
    worker = os.environ["HVDLITE_WORKER"]
    hvd.init()
    model, optimizer = made()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)

    @hvd.elastic.run
    def until_done(state):
        while state.batch < batches or hvd.size() < 2:
            if worker in lost and state.batch == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            step(state)
            state.commit()
            time.sleep(0.01)
        return state.batch

    batch = until_done(state)
    return hvd.rank(), hvd.size(), worker, batch, model.weight.sum().item()

if __name__ == "__main__":
    first, second = hvd.run(train, (10,), {"lost": ["1"]}, np=2, min_np=1, max_np=2, on_failure="replace")
    assert first[:3] == (0, 2, "0"), first
    assert second[:3] == (1, 2, "2"), second
    assert first[3:] == second[3:], (first, second)
    assert first[3] >= 10, first
"""


def test_a_function_returns_by_rank_of_the_last_generation_though_a_worker_was_killed(launch, tmp_path, rank_server):
    program = tmp_path / "program.py"
    program.write_text(rank_server.line_for_functions() + TRAINING + CALLS)
    job = launch(str(program), program=())
    code, _, err = job.ended(PATIENCE_S)
    told = err.decode()
    assert code == 0, told
    assert "worker 1 (rank 1 on localhost) was killed by SIGKILL" in told
    assert "worker 2 joins as rank 1 on localhost" in told
    job.assert_gone()


def elastic_job(launch, body: str, *flags: str, env: dict[str, str] | None = None):
    """Runs the body of a training function in an elastic job; returns exit code, stdout and stderr."""
    program = f"""{TRAINING}
hvd.init()
model, optimizer = made()
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)

@hvd.elastic.run
def train(state):
{body}

train(state)
print("end", hvd.rank(), hvd.size(), worker, state.batch, flush=True)
"""
    job = launch(*flags, sys.executable, "-c", program, env=env or {})
    code, out, err = job.ended(PATIENCE_S)
    job.assert_gone()
    return code, out.decode(), err.decode()


def test_a_spare_takes_the_place_of_a_lost_rank_so_that_the_ranks_never_become_fewer(launch):
    body = """
    while state.batch < 20:
        if worker == "1" and state.batch == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        step(state)
        if state.batch % 10 == 0:
            state.commit()
"""
    flags = ["-np", "2", "--min-np", "2", "--max-np", "2", "--spares", "1", "-H", "localhost:3"]
    code, out, err = elastic_job(launch, body, *flags)
    assert code == 0, err
    # The first generation is made when the spare waits, too.
    took_over = "generation 2: 2 ranks; worker 1 (rank 1 on localhost) was killed by SIGKILL; worker 2 joins as rank 1"
    assert f"hvdlite-run: {took_over} on localhost\n" in err
    assert sorted(out.splitlines()) == ["[0]<stdout>:end 0 2 0 20", "[1]<stdout>:end 1 2 2 20"]


# What is in a reference cycle is not finalised at the end of a worker. The handler runs last.
LEAVES = """
import atexit, gc
atexit.register(lambda: print("collects", gc.get_freeze_count() == 0, flush=True))
import os, sys
import torch
import hvdlite.torch as hvd

class Log:
    def __init__(self):
        self.itself = self
        self.file = open(sys.argv[1] + os.environ["HVDLITE_WORKER"], "w")
        self.file.write("written")

log = Log()
hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 10:
        if os.environ["HVDLITE_WORKER"] == "1" and state.step == 5:
            sys.exit(3)
        hvd.allreduce(torch.ones(2), name="step")
        state.step += 1

train(state)
"""


@pytest.mark.night
def test_a_rank_that_calls_sys_exit_ends_without_garbage_collections_for_which_the_others_would_wait(launch, tmp_path):
    flags = ["-np", "2", "--min-np", "1", "--on-failure", "shrink", "-H", "localhost:2"]
    job = launch(*flags, sys.executable, "-c", LEAVES, str(tmp_path / "log."))
    code, out, err = job.ended(PATIENCE_S)
    told = err.decode()
    assert code == 0, told
    assert [line.partition(b":")[2] for line in out.splitlines()] == [b"collects False"] * 2
    assert [(tmp_path / f"log.{worker}").read_text() for worker in range(2)] == ["written"] * 2
    assert "rank 1 (localhost) has ended" in told
    assert "worker 1 (rank 1 on localhost) failed with exit code 3" in told
    job.assert_gone()


@pytest.mark.night
def test_a_program_without_elastic_run_is_told_what_could_have_followed_when_it_has_lost_a_rank(launch):
    program = """
import os, signal
import torch
import hvdlite.torch as hvd
hvd.init()
for step in range(10):
    if hvd.rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(2), name="step")
"""
    job = launch("-np", "2", "--min-np", "1", "--on-failure", "shrink", sys.executable, "-c", program)
    code, _, err = job.ended(PATIENCE_S)
    told = err.decode()
    assert code == 137, told
    assert "<stderr>:this program is not in a function of hvd.elastic.run, so that it ends when a rank is lost" in told
    assert "hvdlite-run --on-failure restart starts other programs anew" in told
    job.assert_gone()


# `check_host_updates` is a broadcast from rank 0.
KILLED_IN_A_LOOK_AT_HOSTS = """
hvd.init()
model, optimizer = made()
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
state.batch = 3
state.commit()
state.batch = 0
state.restore()

@hvd.elastic.run
def train(state):
    print("begin", worker, state.batch, flush=True)
    while state.batch < 12:
        step(state)
        if worker == "0" and state.batch == 8:
            state._bcast_object = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        if state.batch % 5 == 0:
            state.commit()
        else:
            state.check_host_updates()

train(state)
state.batch += 1
state.commit()
print("end", worker, state.batch, flush=True)
"""


@pytest.mark.night
def test_a_rank_killed_while_ranks_look_for_new_hosts_loses_what_was_not_committed_and_commits_work_outside_of_run(
    launch,
):
    flags = ["-np", "2", "--min-np", "1", "--on-failure", "shrink", "-H", "localhost:2"]
    job = launch(*flags, sys.executable, "-c", TRAINING + KILLED_IN_A_LOOK_AT_HOSTS)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    assert sorted(line.partition(":")[2] for line in out.decode().splitlines()) == [
        "begin 0 3",
        "begin 1 3",
        "begin 1 5",
        "end 1 13",
    ], out.decode()
    assert b"worker 0 (rank 0 on localhost) was killed by SIGKILL" in err
    assert b"Traceback" not in err
    job.assert_gone()


# Gradients that the ranks' half precision and their averages over 3 and 2 ranks hold exactly.
OF_SETS = """
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair])
both, few = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
for parameter in (*both.parameters(), *few.parameters()):
    torch.nn.init.zeros_(parameter)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(both.parameters(), lr=0.5, momentum=0.5), named_parameters=both.named_parameters(),
    compression=hvd.Compression.fp16, backward_passes_per_step=2,
)
of_pair = hvd.DistributedOptimizer(
    torch.optim.SGD(few.parameters(), lr=0.5), named_parameters=few.named_parameters(),
    compression=hvd.Compression.fp16, process_set=pair,
)
state = hvd.elastic.TorchState(model=both, optimizer=optimizer, few=few, of_pair=of_pair, batch=0, sizes=[])

def slope(batch, number, rank):
    return 6.0 * ((7 * batch + 3 * number + 5 * rank) % 11 - 5)

@hvd.elastic.run
def train(state):
    while state.batch < 30:
        if worker == LOST and state.batch == 15 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        of_pair.zero_grad()
        for number in range(2):
            (both.weight.sum() * slope(state.batch, number, hvd.rank())).backward()
        optimizer.step()
        if pair.included():
            (few.weight.sum() * slope(state.batch, 2, hvd.rank())).backward()
            of_pair.step()
        state.batch += 1
        state.sizes = [*state.sizes, hvd.size()]
        if state.batch % 10 == 0:
            state.commit()

train(state)
weight = velocity = weight_of_pair = 0.0
for batch, size in enumerate(state.sizes):
    velocity = 0.5 * velocity + sum(slope(batch, i, rank) for i in range(2) for rank in range(size)) / size
    weight -= 0.5 * velocity
    weight_of_pair -= 0.5 * sum(slope(batch, 2, rank) for rank in range(2)) / 2
assert state.sizes == [3] * 10 + [2] * 20, state.sizes
torch.testing.assert_close(both.weight, torch.full((2, 3), weight), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(few.weight, torch.full((2, 2), weight_of_pair), rtol=0, atol=0)
print("end", hvd.rank(), flush=True)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("lost", [0, 2])
def test_optimizers_with_a_process_set_half_precision_and_two_passes_go_on_as_in_one_process(launch, lost):
    # Worker 2 is outside of the set at first, and in it once worker 0 is lost: then the set has all ranks.
    program = TRAINING + OF_SETS.replace("LOST", repr(str(lost)))
    flags = ["-np", "3", "--min-np", "2", "--on-failure", "shrink", "-H", "localhost:3"]
    job = launch(*flags, sys.executable, "-c", program)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    assert sorted(out.splitlines()) == [b"[0]<stdout>:end 0", b"[1]<stdout>:end 1"]
    job.assert_gone()


# Rank 0 is alone until it has written that there is another host.
JOINED = """
import os, time, torch
import hvdlite.torch as hvd
hvd.init()
param = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("weight", param)])
state = hvd.elastic.TorchState(optimizer=optimizer, batch=0)
directory = {directory!r}

@hvd.elastic.run
def train(state):
    while hvd.size() < 2:
        if state.batch == 5:
            with open(directory + "/new", "w") as new:
                new.write({hosts!r})
            os.rename(directory + "/new", directory + "/hosts")
        state.batch += 1
        state.commit()
        time.sleep(0.01)
    param.sum().backward()
    optimizer.step()
    print("met", hvd.size(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)

train(state)
"""


@pytest.mark.night
def test_a_job_that_begins_on_the_launchers_machine_alone_is_joined_by_another_host(make_lan, launch, tmp_path):
    lan = make_lan("b")
    (b,) = (host.spec for host in lan.hosts)
    (tmp_path / "hosts").write_text("localhost:1\n")
    program = JOINED.format(directory=str(tmp_path), hosts=f"localhost:1\n{b}:1\n")
    flags = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {tmp_path}/hosts"]
    job = launch(*flags, sys.executable, "-c", program, on=lan.desk)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    assert out.count(b"met 2") == 2
    assert_clean(lan)
