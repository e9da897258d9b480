"""Programs written for Horovod may take a step before they broadcast, and find gradients of zeros after it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import hvdlite.horovod.torch as hvd
import pytest
import torch
from torch import nn
from worlds import PLAIN, run_worlds

import hvdlite
from hvdlite.horovod import names
from hvdlite.horovod.names import HorovodBasics

WARNS = replace(PLAIN, check_parameters="warn")


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"step_on_arrival": True}])
def test_parameters_that_differ_are_one_warning_of_one_rank_and_training_goes_on(options, caplog):
    def rank(own: int) -> list[float]:
        param = nn.Parameter(torch.full((2,), float(own)))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)], **options)
        seen = []
        for _ in range(3):
            (param * (own + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(param[0].item())
            # As a program's first broadcast, after a step that has made its optimizer's state.
            hvd.broadcast_parameters([param])
        return seen

    with caplog.at_level(logging.WARNING, "hvdlite"):
        first, second = run_worlds(2, rank, WARNS)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("parameter 'weight' has different values on rank 1 (node1) than on rank 0 (node0)")
    assert "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on every rank" in warning
    assert first[0] != second[0]
    assert first[1:] == second[1:]


def test_parameters_that_are_equal_are_no_warning(caplog):
    def rank(own: int) -> None:
        param = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        param.sum().backward()
        optimizer.step()

    run_worlds(2, rank, WARNS)
    assert caplog.records == []


@pytest.mark.parametrize("init", [hvd.init, hvd.mpi_ops.init, HorovodBasics().init])
@pytest.mark.parametrize(
    ("environ", "argument", "expected"),
    [({}, None, "warn"), ({}, True, True), ({"HVDLITE_CHECK_PARAMETERS": "3"}, None, None)],
)
def test_init_under_horovods_names_has_differences_warned_of(init, environ, argument, expected, monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(names.hvd, "init", lambda *_, check_parameters, **__: given.append(check_parameters))
    monkeypatch.setattr(os, "environ", environ)
    init(check_parameters=argument)
    assert given == [expected]


def test_without_state_gradients_are_zeros_after_its_broadcast_and_no_step_is_taken():
    def rank(own: int) -> None:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        for form in (lambda each: each, hvd.DistributedOptimizer):
            optimizer = form(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
            model.zero_grad()
            model[1].bias.grad = torch.ones(2)
            before = [param.detach().clone() for param in model.parameters()]
            hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
            assert all(map(torch.equal, before, model.parameters()))
            assert model[0].weight.grad.is_sparse
            assert model[0].weight.grad.to_dense().tolist() == [[0, 0]] * 4
            assert model[1].weight.grad.tolist() == [[0, 0]] * 2
            # What is there stays, as does that there is none.
            assert model[1].bias.grad.tolist() == [1, 1]
            assert model[2].weight.grad is None
            optimizer.zero_grad()
            hvdlite.broadcast_optimizer_state(optimizer)
            assert model[1].weight.grad is None
        for param in model.parameters():
            optimizer.state[param] = {"momentum_buffer": torch.zeros_like(param)}
        hvd.broadcast_optimizer_state(optimizer)
        assert model[1].weight.grad is None, "with state Horovod leaves gradients alone"

    run_worlds(2, rank)


def test_a_backward_pass_adds_to_these_zeros_and_is_averaged():
    def rank(own: int) -> list[float]:
        embedding = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        hvd.broadcast_optimizer_state(optimizer, 0, embedding)
        embedding(torch.tensor([own])).sum().backward()
        optimizer.step()
        return embedding.weight.flatten().tolist()

    assert run_worlds(2, rank) == [[-0.5, -0.5, 0.0]] * 2


@pytest.mark.parametrize("name", ["ccl", "cuda", "ddl", "gloo", "mpi", "nccl", "rocm"])
def test_the_builds_are_those_of_torch(name):
    built = getattr(names, f"{name}_built")
    assert built() is built(verbose=True) is bool(getattr(hvd, f"{name}_built")())


def test_variables_are_set_in_a_context_alone(monkeypatch):
    monkeypatch.setenv("ONE_OF_A_TEST", "1")
    with names.env(ONE_OF_A_TEST=None, OTHER_OF_A_TEST="2"):
        assert "ONE_OF_A_TEST" not in os.environ
        assert os.environ["OTHER_OF_A_TEST"] == "2"
    assert os.environ["ONE_OF_A_TEST"] == "1"
    assert "OTHER_OF_A_TEST" not in os.environ


def test_versions_are_compared_by_their_numbers():
    later = names.is_version_greater_equal_than
    assert later("1.10.0", "1.9.2")
    assert later("2.1.0+cpu", "2.1.0")
    assert not later("1.9.9", "1.10.0")
    with pytest.raises(ValueError, match="three numbers"):
        later("2.1", "2.1.0")
