"""Errors contain the words of Horovod's errors for which users search, where the case is the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from worlds import run_worlds

import hvdlite.torch as hvd


def new_optimizer(**options: object) -> tuple[torch.nn.Module, hvd.DistributedOptimizer]:
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("named_parameters", model.named_parameters())
    return model, hvd.DistributedOptimizer(sgd, **options)


def wrap(named: Callable[[torch.nn.Module], object] = lambda model: model.named_parameters(), **options: object):
    def make() -> None:
        model = torch.nn.Linear(2, 1)
        given = {name: value(model) if callable(value) else value for name, value in options.items()}
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named(model), **given)

    return make


def backward_twice() -> None:
    model, _optimizer = new_optimizer()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def zero_too_early() -> None:
    model, optimizer = new_optimizer()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()


def skip_with_adasum() -> None:
    _, optimizer = new_optimizer(op=hvd.Adasum)
    with optimizer.skip_synchronize():
        pass


def broadcast_lbfgs() -> None:
    hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), root_rank=0)


TEXTS = [
    (
        wrap(lambda model: list(model.parameters())),
        ValueError,
        "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
        "model.named_parameters().",
    ),
    (
        wrap(lambda model: [("b", model.weight), ("a", model.bias), ("a", model.bias), ("b", model.weight)]),
        ValueError,
        "Parameter names in named_parameters must be unique. Found duplicates: a, b",
    ),
    (
        wrap(lambda model: [("w", model.weight)]),
        ValueError,
        "named_parameters was specified, but one or more model parameters were not named.",
    ),
    (
        wrap(op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
        "gradient_predivide_factor not supported with op != Average",
    ),
    (
        wrap(groups=-1),
        ValueError,
        "groups should be a non-negative integer or a list of list of torch.Tensor.",
    ),
    (wrap(groups=[["w"]]), ValueError, "groups must consist of torch.Tensor."),
    (
        wrap(groups=lambda model: [[model.weight], [model.weight]]),
        ValueError,
        "A parameter can only appear once in groups.",
    ),
    (wrap(backward_passes_per_step=0), ValueError, "backward_passes_per_step must be > 0"),
    (
        backward_twice,
        AssertionError,
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        "backward_passes_per_step to accumulate gradients locally.",
    ),
    (
        zero_too_early,
        AssertionError,
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(). This is prohibited as it can cause a race condition",
    ),
    (skip_with_adasum, AssertionError, "Skipping synchronization is not supported when using Adasum optimizer."),
    (lambda: hvd.broadcast_parameters(3, root_rank=0), ValueError, "invalid params of type: <class 'int'>"),
    (broadcast_lbfgs, ValueError, "cannot broadcast torch.optim.LBFGS state"),
    (
        lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
        ValueError,
        "The op parameter supersedes average. Please provide only one of them.",
    ),
]


@pytest.mark.parametrize(("action", "kind", "text"), TEXTS)
def test_an_error_has_horovods_words(action, kind, text):
    for size in (1, 2):
        with pytest.raises(kind, match=re.escape(text)):
            run_worlds(size, lambda rank: action())


def test_before_init_every_question_has_horovods_words():
    questions = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "mpi_threads_supported"]
    for question in [*questions, "barrier", "stop_timeline"]:
        with pytest.raises(ValueError, match=re.escape("Horovod has not been initialized; use hvd.init().")):
            getattr(hvd, question)()
