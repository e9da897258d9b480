"""Elastic jobs: training goes on from the last commit when workers are lost, and with others when hosts change."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from copied_ranks import RankServer

pytestmark = pytest.mark.slow

PATIENCE_S = 240

# Rank and worker faults are placed at a batch of generation 1. All ranks compute the same gradients, so that what is
# learned depends on the batches that are committed, and not on how many ranks there are.
TRAINING = """
import os, signal, sys, time
import torch
import hvdlite.torch as hvd

hvd.init()
worker = int(os.environ["HVDLITE_WORKER"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
for parameter in model.parameters():
    # Gradients of few bits, so that the average of N equal ones is the same for any N.
    parameter.register_hook(lambda gradient: (gradient * 2**14).round() / 2**14)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
# Each rank has all samples, so each sees how many batches its own world has had.
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4) * (state.batch % 7 + 1)).pow(2).mean().mul(0.01).backward()
    optimizer.step()
    state.batch += 1


def lose(*workers):
    if worker in workers and state.batch == 15 and hvd.size() == 3 and not resets:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
{body}


train(state)
digest = sum(parameter.double().sum().item() for parameter in model.parameters())
print("end", hvd.rank(), hvd.size(), state.batch, repr(digest), resets, flush=True)
"""

FORTY_BATCHES = """
    while state.batch < 40:
        {fault}
        step()
        if state.batch % 10 == 0:
            state.commit()
"""


def program(body: str) -> list[str]:
    return [sys.executable, "-c", TRAINING.replace("{body}", body)]


def ends(out: bytes) -> list[tuple[int, int, int, str, str]]:
    """What each rank has printed at its end: rank, size, batches, digest of the model, sizes after each reset."""
    found = re.findall(rb"^\[(\d+)\]<stdout>:end (\d+) (\d+) (\d+) (\S+) (.*)$", out, re.MULTILINE)
    assert all(label == rank for label, rank, *_ in found), out.decode()
    return sorted((int(rank), int(size), int(batch), digest.decode(), sizes.decode())
                  for _, rank, size, batch, digest, sizes in found)  # fmt: skip


@pytest.fixture(scope="module")
def digest(rank_server: RankServer) -> str:
    """Of the model after forty batches, in one process and without a fault."""
    command = [sys.executable, *rank_server.python(), *program(FORTY_BATCHES.format(fault="pass"))[1:]]
    env = {**os.environ, "HVDLITE_WORKER": "0"}
    run = subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, env=env)
    return run.stdout.decode().split()[4]


@pytest.mark.night(but=1)
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_what_is_left_of_a_job_goes_on_from_the_last_commit(launch, digest, lost):
    job = launch(
        *("--min-np", "1", "--max-np", "3", "--on-failure", "shrink", "-np", "3", "-H", "localhost:3"),
        *program(FORTY_BATCHES.format(fault=f"lose({', '.join(map(str, lost))})")),
    )
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    left = 3 - len(lost)
    # Both are lost at once or, where one sees the other's end before it is at the batch, one after the other.
    assert [(rank, size, batch, model) for rank, size, batch, model, _ in ends(out)] == [
        (rank, left, 40, digest) for rank in range(left)
    ], (out + err).decode()
    for worker in lost:
        assert f"worker {worker} (rank {worker} on localhost) was killed by SIGKILL" in err.decode()
    job.assert_gone()


def test_a_worker_that_takes_the_place_of_a_lost_one_gets_the_state_of_rank_0(launch):
    body = """
    # Those that have seen the loss go on until somebody has joined; who joins has batches behind it.
    while state.batch < 20 or hvd.size() < 3:
        lose(1)
        step()
        state.commit()
        time.sleep(0.01)
"""
    job = launch("--min-np", "2", "--max-np", "3", "-np", "3", "-H", "localhost:3", *program(body))
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    found = ends(out)
    assert [(rank, size) for rank, size, *_ in found] == [(0, 3), (1, 3), (2, 3)], (out + err).decode()
    assert len({(batch, model) for _, _, batch, model, _ in found}) == 1, "all have the same model"
    assert "worker 3" in err.decode(), "it has joined"
    job.assert_gone()


@pytest.mark.night
def test_a_worker_of_a_slot_that_is_removed_ends_well_and_the_others_go_on(launch, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("localhost:3\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    body = f"""
    while hvd.size() == 3 or state.batch < 20:
        if hvd.rank() == 0 and state.batch == 5:
            with open({str(hosts)!r} + ".new", "w") as new:
                new.write("localhost:2\\n")
            os.rename(new.name, {str(hosts)!r})
        step()
        state.commit()
        time.sleep(0.01)
"""
    job = launch("--min-np", "2", "--max-np", "3", "--host-discovery-script", str(script), *program(body))
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    found = ends(out)
    assert [(rank, size) for rank, size, *_ in found] == [(0, 2), (1, 2)], (out + err).decode()
    assert len({(batch, model) for _, _, batch, model, _ in found}) == 1
    assert b"Traceback" not in err
    job.assert_gone()


def test_a_rank_that_is_lost_while_the_ranks_of_a_generation_connect_is_left_out_too(launch, digest):
    fault = "lose(1)"
    killed_within_init = """
import os, signal
import hvdlite.runtime.make_world as make_world
exchange = make_world.exchange_rank_info

def exchange_and_die(store, own, *arguments):
    exchanged = exchange(store, own, *arguments)
    if own.placement.worker == 2 and own.placement.size == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return exchanged

make_world.exchange_rank_info = exchange_and_die
"""
    job = launch(
        *("--min-np", "1", "--max-np", "3", "--on-failure", "shrink", "-np", "3", "-H", "localhost:3"),
        *(sys.executable, "-c", killed_within_init + program(FORTY_BATCHES.format(fault=fault))[-1]),
    )
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    assert [each[:4] for each in ends(out)] == [(0, 1, 40, digest)], (out + err).decode()
    job.assert_gone()


@pytest.mark.night
def test_the_same_exception_on_all_ranks_ends_the_job_at_once(launch):
    fault = "if state.batch == 15: raise ValueError('a bug')"
    job = launch(
        *("--min-np", "1", "--max-np", "2", "-np", "2", "-H", "localhost:2"),
        *program(FORTY_BATCHES.format(fault=fault)),
    )
    code, _, err = job.ended(PATIENCE_S)
    assert code == 1, err.decode()
    assert b"ValueError: a bug" in err
    job.assert_gone()
