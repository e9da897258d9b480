"""What is in an optimizer's parameter groups is averaged, whoever put it there; to read them is local."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equal_states import assert_same
from fake_hosts import on
from ranks import counting, run_ranks, set_of
from torch import Tensor, nn
from training import take_steps
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group


def wrap(group: Group, inner: torch.optim.Optimizer, named: Any = None, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(inner, named, process_set=set_of(group), **options)


def new(numel: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel))


def sgd(*groups: list[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": list(params)} for params in groups], lr=1.0, momentum=0.5)


def replace(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = new(5)


def append(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(new(2))


def append_group(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [new(4)]})


def add_to_inner(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    inner.add_param_group({"params": [new(4)]})


def remove(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    del inner.param_groups[0]["params"][1:2]


def new_lists(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Replaces all parameters, and the lists and groups that hold them."""
    optimizer.param_groups = [{**group, "params": [new(2) for _ in group["params"]]} for group in inner.param_groups]


def reverse(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    inner.param_groups[0]["params"].reverse()


CHANGES = (replace, append, append_group, add_to_inner, remove, new_lists, reverse)
Change = Callable[[torch.optim.Optimizer, torch.optim.Optimizer], None]


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def backward(optimizer: torch.optim.Optimizer, factor: float) -> None:
    torch.stack([param.sum() * (number + 1) for number, param in enumerate(params_of(optimizer))]).sum().mul(
        factor
    ).backward()


# When in a step the program changes the groups.
MOMENTS = ("before zero_grad", "before backward", "before step", "after step")


def train(inner: torch.optim.Optimizer, optimizer: Any, change: Change, moment: str, factor: float) -> list[Any]:
    found = []
    for step in range(6):
        changes = step in (2, 4)
        if changes and moment == "before zero_grad":
            change(inner, optimizer)
        optimizer.zero_grad()
        if changes and moment == "before backward":
            change(inner, optimizer)
        backward(inner, factor * (step + 1))
        if changes and moment == "before step":
            change(inner, optimizer)
        optimizer.step()
        if changes and moment == "after step":
            change(inner, optimizer)
        found.append([param.tolist() for param in params_of(inner)])
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_is_twice_in_a_group_is_averaged_once(size):
    params = [new() for _ in range(size)]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        inners = [torch.optim.SGD([param, param], lr=1.0) for param in params]

    def train(group: Group) -> list[float]:
        optimizer, param = wrap(group, inners[group.rank]), params[group.rank]
        (param * (1 + group.rank)).sum().backward()
        optimizer.synchronize()
        assert param.grad is not None
        return param.grad.tolist()

    assert run_ranks(size, train) == [[(1 + size) / 2] * 3] * size


def test_gradients_may_be_grouped_before_there_is_a_parameter():
    def train(group: Group) -> list[float]:
        inner, param = torch.optim.SGD([{"params": []}], lr=1.0), new()
        optimizer = wrap(group, inner, groups=2)
        inner.param_groups[0]["params"].append(param)
        param.sum().backward()
        optimizer.step()
        return param.tolist()

    assert run_ranks(1, train) == [[-1.0] * 3]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_put_into_the_groups_are_averaged_from_then_on(change, moment):
    """Two parameters share a bucket at first, and one has its own, in another group."""

    def rank(group: Group) -> list[Any]:
        inner = sgd([new(), new()], [new()])
        return train(inner, wrap(group, inner), change, moment, group.rank + 1.0)

    alone = sgd([new(), new()], [new()])
    expected = train(alone, alone, change, moment, 1.5)
    assert run_ranks(2, rank, engine="shared memory") == [expected] * 2


def test_parameters_that_are_replaced_in_every_step_leave_nothing_behind():
    """They lie in memory that the ranks share, so that each has mapped the other's."""
    counts: list[tuple[int, int]] = []

    def rank(group: Group) -> list[Any]:
        inner = sgd([new(5000), new(3)], [new(2000)])
        optimizer = wrap(group, inner)
        for step in range(200):
            inner.param_groups[0]["params"][0] = new(5000)
            optimizer.zero_grad()
            backward(inner, group.rank + 1.0)
            optimizer.step()
            if step in (99, 199) and group.rank == 0:
                reducer = optimizer._reducer
                counts.append((len(reducer.step.plan.added), len(reducer.engine.connected().all.engine._context._seen)))
        return params_of(inner)[0][:2].tolist()

    assert run_ranks(2, rank, engine="shared memory") == [[-1.5, -1.5]] * 2
    for added, seen in counts:
        assert added <= 3
        assert 2 <= seen < 20


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Adasum},
        {"step_on_arrival": True},
        {"max_norm": 1e9},
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"backward_passes_per_step": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("change", [replace, new_lists, remove])
def test_so_it_is_with_any_form_of_a_step(change, options):
    def rank(group: Group) -> list[Any]:
        inner = sgd([new(), new()], [new()])
        # Adasum of equal changes is the change.
        factor = 1.5 if "op" in options else group.rank + 1.0
        return train(inner, wrap(group, inner, **options), change, "before zero_grad", factor)

    alone = sgd([new(), new()], [new()])
    expected = train(alone, alone, change, "before zero_grad", 1.5)
    for found in run_ranks(2, rank):
        for own, right in zip(found, expected, strict=True):
            for values, right_values in zip(own, right, strict=True):
                assert values == pytest.approx(right_values)


@pytest.mark.parametrize(
    "compression", [hvd.Compression.int8, hvd.Compression.topk(0.4), hvd.Compression.powersgd(1)], ids=repr
)
def test_what_was_not_sent_of_a_parameter_goes_with_it(compression):
    def rank(group: Group) -> tuple[set[str], list[Any]]:
        inner = sgd([new(8), nn.Parameter(torch.zeros(6, 6))], [new(8)])
        optimizer = wrap(group, inner, compression=compression)
        for step in range(5):
            optimizer.zero_grad()
            if step in (2, 3):
                # At the same place, and of another size.
                optimizer.param_groups[0]["params"][:] = [new(5 + step), nn.Parameter(torch.zeros(3, 4))]
                inner.state.clear()
            for number, param in enumerate(params_of(inner)):
                (
                    param * torch.linspace(0.1, 1.0, param.numel()).view(param.shape) * (number + group.rank + 1)
                ).sum().backward()
            optimizer.step()
        state = optimizer.state_dict()["hvdlite"]["exchange"]
        names = {name for key in ("residuals", "numels", "q", "steps") for name in state.get(key, {})}
        assert names <= {name for name, _ in optimizer._groups.named}
        optimizer.load_state_dict(optimizer.state_dict())
        return [param.tolist() for param in params_of(inner)]

    first, *others = on("2 hosts", rank)
    assert all(other == first for other in others)


def test_outer_steps_refuse_that_a_parameter_leaves():
    def rank(group: Group) -> None:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner, outer=hvd.LocalSGD(sync_every=2))
        backward(inner, 1.0)
        optimizer.step()
        remove(inner, optimizer)
        with pytest.raises(hvd.GradientError, match=r"has left optimizer.param_groups, and outer=.* make a new"):
            optimizer.zero_grad()

    on("2 hosts", rank)


def test_a_parameter_that_has_left_is_let_go():
    kept: list[Any] = []

    def rank(group: Group) -> weakref.ref[nn.Parameter]:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        for _ in range(2):
            optimizer.zero_grad()
            backward(inner, 1.0)
            optimizer.step()
        left = inner.param_groups[0]["params"].pop(0)
        inner.state.pop(left)
        optimizer.zero_grad()
        left.grad = None
        # Its hooks are gone: it may be another optimizer's, or none's.
        assert not left._post_accumulate_grad_hooks
        kept.append(optimizer)
        return weakref.ref(left)

    left = run_ranks(2, rank)
    gc.collect()
    assert [where() for where in left] == [None, None]


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("begins", ["no backward pass", "gradients of another optimizer's pass"])
def test_ranks_may_begin_the_step_in_which_a_parameter_is_replaced_at_different_points(begins, alone):
    """One has begun it before, or begins it only when it steps."""

    def rank(group: Group) -> list[float]:
        inner, other = sgd([new(2), new(2)]), sgd([new(2)])
        optimizer, of_other = wrap(group, inner, backward_passes_per_step=2), wrap(group, other)
        for step in range(4):
            if begins != "no backward pass":
                backward(other, 1.0)
                if group.rank == alone:
                    inner.param_groups[0]["params"][1].sum().backward()
                of_other.step()
                of_other.zero_grad()
                inner.param_groups[0]["params"][1].grad = None
            came = new(2)
            if step % 2 == 0:
                inner.param_groups[0]["params"][0] = came
            if begins != "no backward pass" or group.rank != alone:
                backward(inner, 2.0)
            if step % 2 == 1:
                inner.param_groups[0]["params"][0] = came
            optimizer.step()
            optimizer.zero_grad()
        return inner.param_groups[0]["params"][1].tolist()

    # By momentum, four equal gradients.
    expected = -(1 + 1.5 + 1.75 + 1.875) * (4.0 if begins != "no backward pass" else 2.0)
    assert run_ranks(2, rank) == [[expected] * 2] * 2


def test_a_changed_optimizer_can_be_copied_and_pickled():
    hvd.init()
    inner = sgd([new(), new()])
    optimizer = hvd.DistributedOptimizer(inner)
    replace(inner, optimizer)
    append_group(inner, optimizer)
    copied = copy.deepcopy(optimizer)
    again = pickle.loads(pickle.dumps(copied))
    for each in (copied, again):
        assert [tuple(param.shape) for param in params_of(each)] == [(5,), (3,), (4,)]
    # Other ranks may not copy it, and all must find the change together.
    assert [tuple(param.shape) for _, param in optimizer._groups.named] == [(3,), (3,)]


@pytest.mark.parametrize("codec", [hvd.Compression.int4, hvd.Compression.topk(0.5), hvd.Compression.powersgd(1, 1)])
@pytest.mark.parametrize("groups", [None, 1])
def test_copies_and_states_have_nothing_of_a_parameter_that_has_just_left(codec, groups):
    def rank(own: int) -> None:
        params = [nn.Parameter(torch.zeros(6, 6)) for _ in range(2)]
        inner = torch.optim.SGD(params, lr=1.0)
        named = [(f"p{number}", param) for number, param in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(inner, named, compression=codec, groups=groups)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(own))
            optimizer.step()
        before = optimizer.state_dict()["hvdlite"]["exchange"]
        inner.param_groups[0]["params"][0] = new(5)
        inner.state.pop(params[0], None)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        copied = copy.deepcopy(optimizer)
        again = pickle.loads(pickle.dumps(optimizer))
        for found in (state, copied.state_dict(), again.state_dict()):
            kept = found["hvdlite"]["exchange"]
            assert set(kept["residuals"]) == {"p1"}
            assert all("p0" not in kept[key] for key in kept)
            assert_same(kept["residuals"]["p1"], before["residuals"]["p1"])
        copied.close()
        again.close()

    run_worlds(2, rank)


def test_a_parameter_that_comes_back_within_a_step_has_its_residual():
    def rank(own: int) -> None:
        param = nn.Parameter(torch.zeros(40))
        inner = torch.optim.SGD([param], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, [("p0", param)], compression=hvd.Compression.int4)
        param.grad = torch.randn(40, generator=torch.Generator().manual_seed(own))
        optimizer.step()
        before = optimizer.state_dict()
        (left,) = inner.param_groups[0]["params"]
        inner.param_groups[0]["params"] = []
        assert "hvdlite" not in optimizer.state_dict()
        inner.param_groups[0]["params"] = [left]
        assert_same(optimizer.state_dict(), before)

    run_worlds(2, rank)


def surplus(
    group: Group, having: list[int], *, steps: int, **options: Any
) -> tuple[list[nn.Parameter], hvd.DistributedOptimizer]:
    """Returns two parameters and their optimizer, with gradients that another optimizer's pass left on some ranks."""
    other, params = new(1), [new(1), new(1)]
    of_other, optimizer = (wrap(group, torch.optim.SGD(each, lr=1.0), **options) for each in ([other], params))
    for step in range(steps):
        optimizer.zero_grad()
        of_other.zero_grad()
        own = [(group.rank + 1.0) * param.sum() for param in params] if group.rank in having else []
        sum([other.sum(), *own]).backward()
        of_other.step()
        if step < steps - 1:
            optimizer.step()
    return params, optimizer


actions = pytest.mark.parametrize("action", ["add_param_group", "consolidate_state_dict"])


def take(action: str, optimizer: hvd.DistributedOptimizer) -> None:
    if action == "add_param_group":
        optimizer.add_param_group({"params": [new(2)]})
    else:
        optimizer.consolidate_state_dict()


@actions
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("having", [[0, 1, 2], [0, 2], [1]])
def test_gradients_that_another_optimizers_pass_has_left_stay_and_are_averaged_once(action, steps, having):
    def rank(group: Group) -> list[Any]:
        params, optimizer = surplus(group, having, steps=steps)
        take(action, optimizer)
        optimizer.step()
        return [param.grad.item() for param in params]

    average = sum(each + 1.0 for each in having) / 3
    assert run_ranks(3, rank) == [[pytest.approx(average)] * 2] * 3


@actions
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("end", ["step", "synchronize and step"])
def test_a_pass_on_some_ranks_only_may_add_to_those_averages(action, end, passes, op):
    def rank(group: Group) -> list[Any]:
        params, optimizer = surplus(group, [0, 1, 2], steps=2, op=op)
        take(action, optimizer)
        if passes and group.rank == 1:
            (3.0 * params[0].sum()).backward()
        if end != "step":
            optimizer.synchronize()
        optimizer.step()
        return [param.grad.item() for param in params]

    # The ranks' gradients were 1, 2 and 3 before, and 3 are added on one of them.
    parts = 3 if op is hvd.Average else 1
    assert run_ranks(3, rank) == [[pytest.approx((6.0 + 3.0 * passes) / parts), pytest.approx(6.0 / parts)]] * 3


@actions
@pytest.mark.parametrize("having", [[0, 1], [1]])
def test_a_parameter_that_was_put_into_the_groups_before_is_averaged_from_then_on_too(action, having):
    def rank(group: Group) -> list[Any]:
        params, optimizer = surplus(group, having, steps=1)
        optimizer.param_groups[0]["params"].append(late := new(1))
        take(action, optimizer)
        ((group.rank + 1.0) * late.sum()).backward()
        optimizer.step()
        return [param.grad.item() for param in [*params, late]]

    average = sum(each + 1.0 for each in having) / 2
    assert run_ranks(2, rank) == [[pytest.approx(average)] * 2 + [1.5]] * 2


@actions
@pytest.mark.parametrize("having", [[0, 1], [1]])
def test_those_that_the_program_has_dropped_before_are_not_averaged(action, having):
    def rank(group: Group) -> list[Any]:
        params, optimizer = surplus(group, having, steps=2)
        for param in params:
            param.grad = None
        take(action, optimizer)
        optimizer.step()
        return [param.grad for param in params]

    assert run_ranks(2, rank) == [[None, None]] * 2


@actions
@pytest.mark.parametrize("dropped", [[(0, 0)], [(0, 0), (1, 0)], [(1, 0), (1, 1)]])
def test_where_some_were_dropped_and_others_not_it_is_an_error_on_all_ranks(action, dropped):
    def rank(group: Group) -> list[float]:
        params, optimizer = surplus(group, [0, 1], steps=2)
        for place, param in enumerate(params):
            if (group.rank, place) in dropped:
                param.grad = None
        with pytest.raises(hvd.GradientError, match=r"were dropped, and others not: call zero_grad\(\) on every rank"):
            take(action, optimizer)
        optimizer.zero_grad()
        sum(param.sum() for param in params).backward()
        optimizer.step()
        return [param.grad.item() for param in params]

    assert run_ranks(2, rank) == [[1.0, 1.0]] * 2


@actions
def test_what_it_leaves_in_other_optimizers_is_surplus_once_they_have_stepped(action):
    """A pass for two optimizers, one of which adds several up and is changed between these."""

    def rank(group: Group) -> list[float]:
        one, several = sgd([new(1)]), sgd([new(1)])
        optimizer, adding = wrap(group, one), wrap(group, several, backward_passes_per_step=3)
        torch.cat([*params_of(one), *params_of(several)]).sum().backward()
        take(action, adding)
        adding.step()
        optimizer.zero_grad()
        backward(one, 2.0)
        optimizer.step()
        return [params_of(each)[0].grad.item() for each in (one, several)]

    assert run_ranks(2, rank) == [[2.0, 1.0]] * 2


@actions
def test_with_gradients_of_a_step_that_is_to_come_it_is_an_error_on_all_ranks(action):
    def rank(group: Group) -> str:
        inner = sgd([new()])
        optimizer = wrap(group, inner)
        if group.rank == 1:
            backward(inner, 1.0)
        with pytest.raises(hvd.GradientError) as error:
            take(action, optimizer)
        optimizer.step()
        return str(error.value)

    first, second = run_ranks(2, rank)
    assert f"{action}() was called while gradients of rank 1 (node1) are being averaged: call step() first" in first
    assert f"{action}() was called while gradients are being averaged (the first: " in second


def test_other_parameters_on_the_ranks_are_an_error_that_names_the_cause():
    def rank(group: Group) -> None:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        backward(inner, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        inner.param_groups[0]["params"].append(new(3 + group.rank))
        backward(inner, 1.0)
        words = r"parameter \"param_groups\[0\]\['params'\]\[2\]\" has shape \(3,\).* on rank 0.* and shape \(4,\)"
        with pytest.raises(hvd.MismatchError, match=words):
            optimizer.step()

    run_ranks(2, rank)


def test_a_parameter_that_cannot_be_averaged_is_refused_and_the_group_is_not_added():
    hvd.init()
    inner = sgd([new()])
    optimizer = hvd.DistributedOptimizer(inner)
    with pytest.raises(ValueError, match="cannot be averaged"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2))]})
    assert len(inner.param_groups) == 1
    optimizer.zero_grad()


def test_reading_the_groups_communicates_with_no_rank_wherever_a_step_is():
    def rank(group: Group) -> int:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        reads = 0

        def read() -> int:
            if group.rank != 0:
                return 0
            calls = len(group.engine.calls)
            assert optimizer.param_groups[0]["lr"] == 1.0
            assert len(params_of(optimizer)) == 2
            assert repr(optimizer)
            assert optimizer.state_dict()["param_groups"]
            return len(group.engine.calls) - calls

        for _ in range(3):
            optimizer.zero_grad()
            reads += read()
            backward(inner, group.rank + 1.0)
            reads += read()
            optimizer.synchronize()
            reads += read()
            optimizer.step()
            reads += read()
        assert params_of(inner)[0].tolist() == [-1.5 * (1 + 1.5 + 1.75)] * 3
        return reads

    assert run_ranks(2, rank, counting) == [0, 0]


def test_a_thread_may_read_the_groups_at_any_time():
    def rank(group: Group) -> list[float]:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        is_read, goes_on, errors = threading.Semaphore(0), threading.Semaphore(0), []

        def export() -> None:
            try:
                while goes_on.acquire() and optimizer.param_groups[0]["lr"] > 0:
                    is_read.release()
            except Exception as error:  # noqa: BLE001 - the test gets it
                errors.append(error)
                is_read.release()

        thread = threading.Thread(target=export, daemon=True)
        thread.start()

        def read(_: Any = None) -> None:
            goes_on.release()
            is_read.acquire()

        if group.rank == 0:
            # In the middle of backward, with a bucket on its way.
            params_of(inner)[0].register_hook(read)
        for _ in range(4):
            optimizer.zero_grad()
            backward(inner, group.rank + 1.0)
            if group.rank == 0:
                read()
            optimizer.step()
        inner.param_groups[0]["lr"] = 0.0
        goes_on.release()
        thread.join()
        assert not errors
        return params_of(inner)[0].tolist()

    first, second = run_ranks(2, rank)
    assert first == second


@pytest.mark.parametrize("step_on_arrival", [False, True])
def test_a_parameter_that_has_left_the_groups_within_a_step_is_not_updated_and_the_others_are(step_on_arrival):
    def rank(group: Group) -> list[float]:
        gone, stays = new(1), new(1)
        inner = sgd([gone, stays])
        optimizer = wrap(group, inner, step_on_arrival=step_on_arrival, bucket_cap_mb=0.00001)
        for _ in range(2):
            (gone * 1.0 + stays * (group.rank + 1.0)).sum().backward()
            inner.param_groups[0]["params"] = [stays]
            optimizer.step()
            optimizer.zero_grad()
            gone.grad = None
        return [gone.item(), stays.item()]

    # Averages of 1.5, with a momentum of 0.5.
    assert run_ranks(2, rank) == [[0.0, -3.75]] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_change_is_followed_alike_by_a_rank_without_a_backward_pass(late):
    """The rank with one begins its step in backward, and the other in step()."""

    def rank(group: Group) -> list[float]:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        backward(inner, 1.0)
        optimizer.step()
        for _ in range(3):
            for param in params_of(inner):
                param.grad = None
            inner.param_groups[0]["params"][0] = new()
            if group.rank == late:
                backward(inner, 1.0)
            optimizer.step()
        return params_of(inner)[0].tolist()

    assert run_ranks(2, rank) == [[-0.5] * 3] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_changes_before_and_after_a_pass_of_one_rank_are_followed_alike(late):
    """Both ranks find them in step(): what is sent together must not depend on where a rank's step began."""

    def rank(group: Group) -> list[list[float]]:
        inner = sgd([new(), new()])
        optimizer = wrap(group, inner)
        backward(inner, 1.0)
        optimizer.step()
        for param in params_of(inner):
            param.grad = None
        inner.param_groups[0]["params"][0] = new(2)
        if group.rank == late:
            backward(inner, 1.0)
        inner.add_param_group({"params": [new(4)]})
        if group.rank == late:
            params_of(inner)[2].sum().backward()
        optimizer.step()
        return [param.grad.tolist() for param in params_of(inner) if param.grad is not None]

    assert run_ranks(2, rank) == [[[0.5] * 2, [1.0] * 3, [0.5] * 4]] * 2


@pytest.mark.parametrize("zeroes", [0, 1])
def test_ranks_that_find_changes_apart_where_others_find_them_together_are_an_error_on_all(zeroes):
    """They would send in two buckets what the others send in one."""

    def rank(group: Group) -> str:
        inner = sgd([new()])
        optimizer = wrap(group, inner)
        backward(inner, 1.0)
        optimizer.step()
        for _ in range(2):
            inner.add_param_group({"params": [new(4)]})
            if group.rank == zeroes:
                optimizer.zero_grad()
        with pytest.raises(hvd.MismatchError) as error:
            optimizer.step()
        return str(error.value)

    for said in run_ranks(2, rank):
        assert "found in change 2 of the groups before this step" in said


def test_a_parameter_that_comes_within_a_closure_is_averaged():
    def rank(group: Group) -> list[float]:
        inner = sgd([new()])
        optimizer = wrap(group, inner)

        def closure() -> float:
            inner.param_groups[0]["params"].append(new())
            backward(inner, group.rank + 1.0)
            return 0.0

        optimizer.step(closure)
        return [param.grad[0].item() for param in params_of(inner)]

    assert run_ranks(2, rank) == [[1.5, 3.0]] * 2


@pytest.mark.parametrize(
    "first", ["the one that it has left", "synchronize of that one", "the one that it has come to"]
)
def test_a_parameter_is_not_averaged_by_two_optimizers_in_one_step(first):
    """It moves from one to the other, which would sum it once more."""

    def rank(group: Group) -> list[float]:
        left, come = sgd([new(1), new(1)]), sgd([new(1)])
        of_left, of_come = wrap(group, left, op=hvd.Sum), wrap(group, come, op=hvd.Sum)
        for inner, optimizer in ((left, of_left), (come, of_come)):
            backward(inner, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        moved = left.param_groups[0]["params"].pop()
        come.param_groups[0]["params"].append(moved)
        torch.cat([*params_of(left), *params_of(come)]).sum().backward()
        if first == "the one that it has left":
            of_left.step()
        elif first == "synchronize of that one":
            of_left.synchronize()
        with pytest.raises(hvd.GradientError, match=r"averages its gradient in this step: call zero_grad\(\)"):
            of_come.step()
        if first != "the one that it has left":
            with of_left.skip_synchronize() if first == "synchronize of that one" else contextlib.nullcontext():
                of_left.step()
        moved.grad = None
        of_come.step()
        of_left.zero_grad()
        of_come.zero_grad()
        torch.cat([*params_of(left), *params_of(come)]).sum().backward()
        of_left.step()
        of_come.step()
        return [param.grad.item() for param in [*params_of(left), *params_of(come)]]

    assert run_ranks(2, rank) == [[2.0] * 3] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_moves_to_another_optimizer_before_both_drop_their_gradients(set_to_none):
    def rank(group: Group) -> list[float]:
        left, come = sgd([new(1), new(1)]), sgd([new(1)])
        of_left, of_come = wrap(group, left, op=hvd.Sum), wrap(group, come, op=hvd.Sum)
        for _ in range(2):
            of_left.zero_grad(set_to_none)
            of_come.zero_grad(set_to_none)
            torch.cat([*params_of(left), *params_of(come)]).sum().backward()
            of_left.step()
            of_come.step()
            if len(params_of(left)) == 2:
                come.param_groups[0]["params"].append(left.param_groups[0]["params"].pop())
        return [param.grad.item() for param in [*params_of(left), *params_of(come)]]

    assert run_ranks(2, rank) == [[2.0] * 3] * 2


def test_passes_before_the_step_that_finds_a_parameter_add_up():
    def rank(group: Group) -> list[float]:
        inner = sgd([new()])
        optimizer = wrap(group, inner)
        inner.param_groups[0]["params"].append(new())
        first, came = params_of(inner)
        first.sum().backward()
        for _ in range(2):
            (came.sum() * (group.rank + 1.0)).backward()
        optimizer.step()
        return came.grad.tolist()

    assert run_ranks(2, rank) == [[3.0] * 3] * 2


@pytest.mark.parametrize("how", ["data", "double and back", "shared", "between passes"])
def test_a_model_that_is_moved_or_converted_and_back_is_averaged_as_before(how):
    """That replaces the memory of the gradients under the same objects."""

    def rank(group: Group) -> list[float]:
        model = nn.Linear(3, 1)
        for param in model.parameters():
            nn.init.zeros_(param)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        passes = 2 if how == "between passes" else 1
        optimizer = wrap(group, inner, model.named_parameters(), backward_passes_per_step=passes)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step == 1)
            for number in range(passes):
                (model(torch.ones(1, 3)).sum() * (group.rank + 1)).backward()
                if how == "between passes" and number == 0:
                    model.double().float()
            optimizer.step()
            if how == "data":
                for param in model.parameters():
                    param.grad.data = param.grad.data.clone()
            elif how == "shared":
                model.share_memory()
            else:
                model.double().float()
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    passes = 2 if how == "between passes" else 1
    assert run_ranks(2, rank, engine="shared memory") == [[-6.0 * passes] * 4] * 2


def test_a_parameter_that_is_resized_is_an_error_that_names_it():
    def rank(group: Group) -> None:
        inner = sgd([new()])
        optimizer = wrap(group, inner)
        backward(inner, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        (param,) = params_of(inner)
        param.data = torch.zeros(5)
        words = r"'\]\[0\]\" had dtype .* with shape \(3,\), and has a gradient of .* with shape \(5,\) now: .* resize"
        with pytest.raises(hvd.GradientError, match=words):
            backward(inner, 1.0)

    run_ranks(2, rank)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this PyTorch has no Tensor.grad_dtype")
def test_a_gradient_of_another_dtype_than_its_parameter_is_an_error_that_says_how_to_have_one():
    def rank(group: Group) -> None:
        inner = sgd([new()])
        (param,) = params_of(inner)
        param.grad_dtype = torch.float64
        optimizer = wrap(group, inner)
        words = r"has dtype torch.float32 on cpu, and a gradient of torch.float64 on cpu: .* Leave out param.grad_dtype"
        with pytest.raises(hvd.GradientError, match=words):
            backward(optimizer, 1.0)

    run_ranks(2, rank)


@pytest.mark.parametrize("when", ["between steps", "before step"])
def test_a_model_that_is_converted_for_good_is_an_error(when):
    def rank(group: Group) -> None:
        model = nn.Linear(3, 1)
        for param in model.parameters():
            nn.init.zeros_(param)
        optimizer = wrap(group, torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        take_steps(optimizer, lambda _: model(torch.ones(1, 3)).sum(), range(2))
        if when == "between steps":
            model.double()
            words = r"had dtype torch.float32 on cpu when the optimizer .* and has a gradient of torch.float64"
            with pytest.raises(hvd.GradientError, match=words):
                model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        else:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            model.double().float()
            with pytest.raises(hvd.GradientError, match="was moved or converted, with the model, while it was being"):
                optimizer.step()

    run_ranks(2, rank)


@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_new_parameter_that_is_frozen_again_before_the_step_is_averaged(late):
    """``late`` has no backward pass in that step: it finds the parameter where its step begins."""

    def rank(group: Group) -> list[list[float]]:
        inner = sgd([new()])
        optimizer = wrap(group, inner)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                inner.param_groups[0]["params"].append(new())
            if step != 1 or group.rank != late:
                backward(inner, group.rank + 1.0)
            if step == 1:
                params_of(inner)[1].requires_grad_(False)
            optimizer.step()
            found.append([param.grad[0].item() for param in params_of(inner) if param.grad is not None])
            if step == 1:
                params_of(inner)[1].requires_grad_(True)
        return found

    mean = {None: 1.5, 0: 1.0, 1: 0.5}[late]
    assert run_ranks(2, rank) == [[[1.5], [mean, 2 * mean], [1.5, 3.0]]] * 2
