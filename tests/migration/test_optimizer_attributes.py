"""The attributes of Horovod's optimizer that programs read and write, and the warnings about them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from worlds import run_worlds

import hvdlite.torch as hvd

WORDS = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)


class Model:
    """Two parameters that are trained, one that is frozen, and one of integers."""

    def __init__(self) -> None:
        self.b, self.a = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.whole = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.named = [("b", self.b), ("a", self.a), ("frozen", self.frozen), ("whole", self.whole)]

    def wrapped(self, **options: Any) -> hvd.DistributedOptimizer:
        optimizer = torch.optim.SGD([param for _, param in self.named], lr=1.0)
        return hvd.DistributedOptimizer(optimizer, self.named, **options)

    def backward(self) -> None:
        (self.a.sum() + self.b.sum()).backward()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_names_and_counts_are_read_as_there(op, size):
    def rank(own: int) -> None:
        model = Model()
        optimizer = model.wrapped(op=op, backward_passes_per_step=2)
        names = optimizer._parameter_names
        assert list(names.values()) == ["a", "b", "frozen", "whole"]
        assert all(names[param] == name for name, param in model.named)
        assert optimizer._requires_update == {model.a, model.b}
        assert optimizer.backward_passes_per_step == optimizer._backward_passes_per_step == 2
        assert optimizer._handles == {}
        assert optimizer._allreduce_delay == {model.a: 2, model.b: 2, model.frozen: 2, model.whole: 2}
        model.backward()
        assert optimizer._handles.keys() == {model.a, model.b}
        assert optimizer._allreduce_delay[model.a] == 1
        assert optimizer._allreduce_delay[model.frozen] == 2
        model.backward()
        assert optimizer._handles.keys() == {model.a, model.b}
        assert optimizer._allreduce_delay[model.b] == 0
        assert not optimizer._synchronized
        optimizer.step()
        assert optimizer._handles == {}
        assert optimizer._allreduce_delay[model.b] == 2
        assert not optimizer._synchronized

    run_worlds(size, rank)


def test_what_is_synchronized_is_on_its_way_no_more():
    def rank(own: int) -> None:
        model = Model()
        optimizer = model.wrapped()
        model.backward()
        optimizer.synchronize()
        assert optimizer._handles == {}
        assert optimizer._synchronized
        assert optimizer._should_synchronize
        with optimizer.skip_synchronize():
            assert not optimizer._should_synchronize
            optimizer.step()
        assert optimizer._should_synchronize
        assert not optimizer._synchronized

    run_worlds(2, rank)


def test_what_a_program_clears_is_its_own_copy():
    def rank(own: int) -> list[float]:
        model = Model()
        optimizer = model.wrapped()
        for _ in range(2):
            (model.a.sum() * (own + 1)).backward()
            optimizer._handles.clear()
            optimizer._requires_update.clear()
            optimizer._parameter_names.clear()
            optimizer.step()
            optimizer.zero_grad()
            optimizer._handles.clear()
        return model.a.tolist()

    assert run_worlds(2, rank) == [[-3.0] * 3] * 2


def test_no_handles_may_be_set_where_there_are_none():
    def rank(own: int) -> list[float]:
        model = Model()
        optimizer = model.wrapped()
        optimizer._handles = {}
        (model.a.sum() * (own + 1)).backward()
        model.b.sum().backward()
        with pytest.raises(AssertionError, match="not while gradients are being averaged"):
            optimizer._handles = {}
        optimizer.synchronize()
        optimizer._handles = {}
        with optimizer.skip_synchronize():
            optimizer.step()
        return model.a.tolist()

    assert run_worlds(2, rank) == [[-1.5] * 3] * 2


def test_passes_per_step_may_be_set_as_attributes():
    def rank(own: int) -> None:
        optimizer = Model().wrapped()
        for name in ("backward_passes_per_step", "_backward_passes_per_step"):
            setattr(optimizer, name, 3)
            assert optimizer.backward_passes_per_step == 3
            optimizer.set_backward_passes_per_step(2)
            assert getattr(optimizer, name) == 2
            with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
                setattr(optimizer, name, 0)

    run_worlds(1, rank)


def test_skipping_may_be_set_as_an_attribute():
    def rank(own: int) -> list[float]:
        model = Model()
        optimizer = model.wrapped()
        (model.a.sum() * (own + 1)).backward()
        optimizer.synchronize()
        optimizer._should_synchronize = False
        optimizer.step()
        optimizer._should_synchronize = True
        return model.a.tolist()

    assert run_worlds(2, rank) == [[-1.5] * 3] * 2


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_arguments_are_read_as_they_were_given(compression):
    def rank(own: int) -> None:
        optimizer = Model().wrapped(compression=compression, gradient_predivide_factor=2.0, sparse_as_dense=True)
        assert optimizer._compression is compression
        assert optimizer.op == hvd.Average
        assert optimizer.gradient_predivide_factor == 2.0
        assert optimizer.sparse_as_dense is True
        assert optimizer.process_set is hvd.global_process_set
        assert Model().wrapped(op=hvd.Sum).op == hvd.Sum

    run_worlds(2, rank)


def test_a_rank_that_takes_no_part_reads_them_too():
    def rank(own: int) -> None:
        first = hvd.add_process_set([0])
        optimizer = Model().wrapped(process_set=first, compression=hvd.Compression.fp16)
        assert optimizer.process_set is first
        assert optimizer.op == hvd.Average
        assert optimizer._compression is hvd.Compression.fp16
        optimizer.synchronize()
        hvd.barrier()

    run_worlds(2, rank)


def test_freezing_shows_at_once():
    def rank(own: int) -> None:
        model = Model()
        optimizer = model.wrapped()
        model.a.requires_grad_(False)
        model.frozen.requires_grad_(True)
        assert optimizer._requires_update == {model.b, model.frozen}

    run_worlds(1, rank)


def test_groups_that_are_added_are_among_them():
    def rank(own: int) -> None:
        optimizer, param = Model().wrapped(), nn.Parameter(torch.zeros(1))
        optimizer.add_param_group({"params": [param]})
        assert param in optimizer._requires_update
        assert param in optimizer._parameter_names
        assert optimizer._allreduce_delay[param] == 1

    run_worlds(1, rank)


def test_a_pickled_optimizer_has_them():
    def rank(own: int) -> None:
        optimizer = Model().wrapped(compression=hvd.Compression.bf16, op=hvd.Sum)
        file = io.BytesIO(pickle.dumps(optimizer))
        for other in (pickle.load(file), copy.deepcopy(optimizer)):
            assert other._compression is hvd.Compression.bf16
            assert other.op == hvd.Sum
            assert other.process_set is hvd.global_process_set
            assert list(other._parameter_names.values()) == ["a", "b", "frozen", "whole"]

    run_worlds(1, rank)


# -- the warning


def warned(size: int, use: Any, **options: Any) -> list[str]:
    """Returns the warnings that each rank got while it used an optimizer."""

    def rank(own: int) -> None:
        model = Model()
        use(model, model.wrapped(**options))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_worlds(size, rank)
    return [str(warning.message) for warning in caught if "skip_synchronize" in str(warning.message)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_after_synchronize_warns_once_in_horovods_words_and_averages_once(size):
    averages = []

    def use(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
        for _ in range(3):
            model.a.grad = model.b.grad = None
            model.backward()
            optimizer.synchronize()
            model.a.grad.mul_(10)
            optimizer.step()
        averages.append(model.a.tolist())

    assert warned(size, use) == [WORDS] * size
    assert averages == [[-30.0] * 3] * size


def skipping(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
    model.backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    model.backward()
    optimizer.step()


def reading_groups(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
    """Reads the gradients as GradScaler does, which asks no rank to wait."""
    model.backward()
    assert optimizer.param_groups[0]["params"]
    optimizer.step()


def plain_steps(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
    for _ in range(2):
        model.backward()
        optimizer.step()


def saying_that_nothing_was_synchronized(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
    model.backward()
    optimizer.synchronize()
    optimizer._synchronized = False
    optimizer.step()


@pytest.mark.parametrize("use", [skipping, reading_groups, plain_steps, saying_that_nothing_was_synchronized])
def test_other_steps_do_not_warn(use):
    assert warned(2, use) == []


def test_adasum_whose_synchronize_does_nothing_does_not_warn():
    def use(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
        model.backward()
        optimizer.synchronize()
        optimizer.step()

    assert warned(2, use, op=hvd.Adasum) == []


def test_the_warning_names_the_line_that_steps():
    def rank(own: int) -> None:
        model = Model()
        optimizer = model.wrapped()
        model.backward()
        optimizer.synchronize()
        optimizer.step()

    with pytest.warns(UserWarning, match=r"optimizer\.step\(\) called without") as caught:
        run_worlds(1, rank)
    assert caught[0].filename == __file__
