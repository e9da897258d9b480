"""init() in a plain program and beside torch.distributed; tests/e2e tests it under launchers."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from hvdlite_wire.store_requests import RankAssignment
from torch import nn
from worlds import instead_of_the_world

import hvdlite as hvd
from hvdlite.runtime import world


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("one rank alone must not use the network")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("_no_network")
def test_a_plain_program_is_one_rank_and_everything_works():
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert not dist.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        0, 1, 0, 1, 0, 1,
    )  # fmt: skip
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), compression=hvd.Compression.fp16
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    hvd.barrier()
    assert hvd.allgather(torch.ones(2)).tolist() == [1, 1]
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.size() == 1


@pytest.mark.parametrize("timeout_s", [0, -1, "5"])
def test_a_timeout_that_is_no_positive_number_is_an_error(timeout_s):
    with pytest.raises(ValueError, match="timeout_s="):
        hvd.init(timeout_s=timeout_s)


def test_torch_distributed_as_it_stands_is_adopted_and_never_destroyed():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hvd.init()
        model = nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hvd.shutdown()
        assert dist.is_initialized()
        dist.all_reduce(torch.ones(1))
        hvd.init()
        assert hvd.size() == 1
        hvd.shutdown()
    finally:
        dist.destroy_process_group()


def test_shutdown_after_the_program_destroyed_its_group_is_quiet():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hvd.init()
    dist.destroy_process_group()
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_an_optimizer_of_a_world_that_was_left_says_so():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hvd.init()
        model = nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        hvd.shutdown()
        with pytest.raises(hvd.CommunicationError, match="make a new optimizer"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.close()
    finally:
        dist.destroy_process_group()


ENDS_WHILE_CLOSING = """
import threading
import hvdlite as hvd
from hvdlite.comm import deferred_close
hvd.init()
deferred_close.prepare()
begun, ending = threading.Event(), threading.Event()
deferred_close.close_later(lambda: (begun.set(), ending.wait(), print("closed", flush=True)))
begun.wait()
late = threading.Timer(0.5, ending.set)
late.daemon = True
# Called when the program has ended, right before exit handlers.
threading._register_atexit(late.start)
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_what_the_garbage_collector_has_found_to_be_closed():
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_CLOSING], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


@pytest.mark.parametrize("generation", [2, 3])
def test_only_the_waits_of_the_generation_that_has_ended_are_ended(generation):
    """A thread that listened for the end of generation 2 may have been held up until generation 3 has begun."""
    controller, group, of_set, connecting = Mock(), Mock(), Mock(), Mock()
    sets = SimpleNamespace(groups=lambda: [of_set])
    assignment = RankAssignment(3, 0, 2, 0)
    own = Mock(assignment=assignment, controller=controller, group=group, sets=sets, connecting=connecting)
    with instead_of_the_world(own):
        world.revoke(generation, "worker 1 was killed")
    for each in (controller, group, of_set):
        assert each.revoke.mock_calls == ([call("worker 1 was killed")] if generation == 3 else [])
    assert connecting.give_up_begun.called == (generation == 3)
