"""torch.compile leaves hvdlite's functions out of its graphs, at no cost for programs that compile nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import pytest

import hvdlite as hvd
import hvdlite.elastic
from hvdlite.optim.reducer import Reducer
from hvdlite.outside_graphs import keep_outside_graphs, outside_graphs

# They communicate with nobody: a graph may have their results, or what they return is no part of one.
ANYWHERE = {
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "is_initialized"),
    *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"),
    *("gloo_enabled", "mpi_enabled", "mpi_threads_supported"),
    "run",
}


def is_outside(function: Any) -> bool:
    return bool(getattr(function, "_torchdynamo_disable", False))


def test_every_function_that_communicates_is_left_out_and_is_no_wrapper():
    functions = {name: getattr(hvd, name) for name in hvd.__all__ if isinstance(getattr(hvd, name), FunctionType)}
    assert len(functions) > 50
    for name, function in functions.items():
        assert is_outside(function) == (name not in ANYWHERE), name
        assert function.__code__.co_name == name
        assert "/hvdlite/" in function.__code__.co_filename


@pytest.mark.parametrize(
    "kind", [hvd.DistributedOptimizer, hvd.Handle, hvdlite.elastic.TorchState, hvdlite.elastic.ElasticSampler]
)
def test_all_methods_of_what_communicates_are_left_out(kind):
    names = [name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), FunctionType)]
    own = [name for name in names if getattr(kind, name).__module__.startswith("hvdlite")]
    assert len(own) > 5
    assert [name for name in own if not is_outside(getattr(kind, name))] == []


def test_the_hooks_on_gradients_are_left_out():
    assert is_outside(Reducer.on_gradient)


class Both(NamedTuple):
    """Has methods that all NamedTuples share."""

    one: int


class Promise(Protocol):
    """Has a constructor that all protocols share."""


def test_functions_that_others_have_too_are_not_marked():
    keep_outside_graphs(globals())
    assert is_outside(is_outside)
    assert not any(is_outside(getattr(each, name, None)) for each in (Both, Promise) for name in dir(each))


def test_importing_it_does_not_import_the_compiler():
    code = "import sys, hvdlite as hvd; hvd.allreduce; hvd.init; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_marked_function_stays_the_same():
    def function() -> None: ...

    assert outside_graphs(function) is function
