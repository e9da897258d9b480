"""Broadcasts at the start: parameters, optimizer state and objects of the root, on every rank."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from models import Plain, adamw, build, sgd
from ranks import counting
from torch import nn
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.runtime.world import current_world


def run_ranks(size, function, make_wrapper=None):
    return run_worlds(size, lambda own: function(current_world().group), make_wrapper=make_wrapper)


def attempt_ranks(size, function):
    return attempt_worlds(size, lambda own: function(current_world().group))


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list of parameters", "list of pairs"])
@pytest.mark.parametrize("root", [0, 1])
def test_different_initial_weights_are_the_roots_after_broadcast(form, root):
    models = [build(Plain, seed) for seed in range(2)]
    wanted = copy.deepcopy(models[root])

    def rank(group: Group):
        model = models[group.rank]
        forms = {
            "state_dict": model.state_dict(),
            "named_parameters": model.named_parameters(),
            "list of parameters": list(model.parameters()),
            "list of pairs": list(model.named_parameters()),
        }
        hvd.broadcast_parameters(forms[form], root_rank=root)
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))

    assert run_ranks(2, rank) == [True, True]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def test_entries_of_every_dtype_and_layout_are_broadcast():
    def entries(value: int) -> dict[str, torch.Tensor]:
        tensors = {str(dtype): torch.full((3,), value, dtype=torch.float32).to(dtype) for dtype in DTYPES}
        tensors["transposed"] = torch.full((2, 5), float(value)).t()
        tensors["strided"] = torch.full((4, 6), float(value))[::2, ::3]
        tensors["channels_last"] = torch.full((2, 3, 2, 2), float(value)).to(memory_format=torch.channels_last)
        tensors["scalar"] = torch.tensor(value)
        tensors["empty"] = torch.empty(0, 3)
        return tensors

    def rank(group: Group):
        mine = entries(1 + group.rank)
        hvd.broadcast_parameters(mine, root_rank=1)
        return [name for name, tensor in entries(2).items() if not torch.equal(mine[name].float(), tensor.float())]

    assert run_ranks(2, rank) == [[], []]


def test_a_model_of_300_tensors_is_a_handful_of_broadcasts():
    def rank(group: Group):
        tensors = [torch.full((100,), float(group.rank)) for _ in range(300)]
        group.engine.calls.clear()
        hvd.broadcast_parameters(tensors)
        assert all(tensor.sum() == 0 for tensor in tensors)
        return len(group.engine.calls)

    for calls in run_ranks(2, rank, counting):
        assert calls <= 5


def test_packs_larger_than_one_buffer_arrive_whole(monkeypatch):
    monkeypatch.setattr("hvdlite.ops.broadcast.PACK_BYTES", 100)

    def rank(group: Group):
        tensors = [torch.arange(size) + group.rank for size in (1, 40, 3, 7, 0, 20)]
        hvd.broadcast_parameters(tensors)
        return all(torch.equal(tensor, torch.arange(len(tensor))) for tensor in tensors)

    assert run_ranks(2, rank) == [True, True]


def test_dictionaries_built_in_different_orders_agree_by_name():
    def rank(group: Group):
        names = ["a", "b"] if group.rank else ["b", "a"]
        params = {name: torch.tensor([float(ord(name) + group.rank)]) for name in names}
        hvd.broadcast_parameters(params)
        return params["a"].item(), params["b"].item()

    assert run_ranks(2, rank) == [(97.0, 98.0)] * 2


def test_tensors_that_differ_between_ranks_are_named_with_both_shapes_and_ranks():
    def rank(group: Group):
        hvd.broadcast_parameters({"same": torch.zeros(2), "wide": torch.zeros(3 + group.rank)})

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        for words in ("'wide'", "(3,)", "(4,)", "rank 0 (node0)", "rank 1 (node1)"):
            assert words in str(outcome)


def test_a_tensor_missing_on_one_rank_is_named():
    def rank(group: Group):
        params = {"a": torch.zeros(2)} | ({"b": torch.zeros(1)} if group.rank else {})
        hvd.broadcast_parameters(params)

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'b' is missing on rank 0" in str(outcome)


def test_roots_that_differ_between_ranks_are_an_error_on_all():
    def rank(group: Group):
        hvd.broadcast_parameters([torch.zeros(1)], root_rank=group.rank)

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "root_rank is 0" in str(outcome)


@pytest.mark.parametrize("params", [3, torch.zeros(2)])
def test_things_that_hold_no_tensors_are_refused(params):
    with pytest.raises(ValueError, match="invalid params of type"):
        run_ranks(1, lambda group: hvd.broadcast_parameters(params))


def test_a_model_in_the_place_of_its_state_is_told_what_to_pass():
    with pytest.raises(TypeError, match=r"'entry 0' is Linear, not a tensor, .*: pass model.state_dict\(\)$"):
        run_ranks(1, lambda g: hvd.broadcast_parameters(nn.Sequential(nn.Linear(2, 1)), root_rank=0))


def test_an_entry_that_is_no_tensor_is_named_and_none_is_left_out():
    with pytest.raises(TypeError, match="'extra' is dict"):
        run_ranks(1, lambda g: hvd.broadcast_parameters({"extra": {}}))
    run_ranks(1, lambda g: hvd.broadcast_parameters({"none": None}))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_optimizer_state_is_the_roots_without_a_step_and_without_changing_a_parameter(make):
    models = [build(Plain, seed) for seed in range(2)]

    def rank(group: Group):
        model = models[group.rank]
        optimizer = make(list(model.parameters()))
        if group.rank == 0:
            for _ in range(3):
                sum(param.square().sum() for param in model.parameters()).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.77
        before = copy.deepcopy(list(model.parameters()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return optimizer.state_dict()

    first, second = run_ranks(2, rank)
    assert second["param_groups"] == first["param_groups"]
    assert second["param_groups"][0]["lr"] == 0.77
    assert first["state"].keys() == second["state"].keys() != set()
    for number, entry in first["state"].items():
        for key, value in entry.items():
            other = second["state"][number][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_the_state_of_lbfgs_is_refused():
    with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
        run_ranks(1, lambda g: hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1)])))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_travel_whole(size):
    def rank(group: Group):
        mine = {"rank": group.rank, "text": "ä" * 1000 * group.rank}
        return (
            hvd.broadcast_object(mine, root_rank=size - 1)["rank"],
            [item["rank"] for item in hvd.allgather_object(mine)],
        )

    assert run_ranks(size, rank) == [(size - 1, list(range(size)))] * size


def test_functions_travel_too():
    def rank(group: Group):
        offset = group.rank + 10
        return (
            hvd.broadcast_object((lambda value: value + offset) if group.rank else None, root_rank=1)(1),
            [function() for function in hvd.allgather_object(lambda: offset)],
        )

    assert run_ranks(2, rank) == [(12, [10, 11])] * 2


@pytest.mark.parametrize("rank_of_it", [0, 1])
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks_that_names_the_operation_rank_and_cause(rank_of_it):
    def share(function, group: Group):
        obj = threading.Lock() if group.rank == rank_of_it else 0
        try:
            function(obj)
        except TypeError as error:
            return error, group.all_gather_json(str(error), "afterwards")
        return None

    def rank(group: Group):
        return [
            share(lambda obj: hvd.broadcast_object(obj, rank_of_it, name="settings"), group),
            share(lambda obj: hvd.allgather_object(obj, name="settings"), group),
        ]

    for number, outcomes in enumerate(run_ranks(2, rank)):
        for (error, everyones), what in zip(outcomes, ("broadcast_object", "allgather_object"), strict=True):
            assert set(everyones) == {str(error)}
            where = f"rank {rank_of_it} (node{rank_of_it})"
            assert f"{what} of 'settings': the object of {where} cannot be pickled" in str(error)
            assert "'_thread.lock' object" in str(error)
            assert (error.__cause__ is not None) == (number == rank_of_it)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class CannotBeSent:
    def __reduce__(self) -> str:
        raise MuteError


def test_an_object_whose_error_cannot_be_shown_leaves_no_rank_waiting():
    def rank(group: Group) -> str:
        obj = CannotBeSent() if group.rank == 0 else None
        with pytest.raises(TypeError) as caught:
            hvd.broadcast_object(obj, 0, name="settings")
        return str(caught.value)

    assert all("the object of rank 0 (node0) cannot be pickled: MuteError" in words for words in run_ranks(2, rank))


def test_optimizer_state_that_cannot_be_pickled_is_an_error_on_all_ranks():
    def rank(group: Group):
        optimizer = sgd([nn.Parameter(torch.zeros(1))])
        optimizer.param_groups[0]["schedule"] = threading.Lock()
        hvd.broadcast_optimizer_state(optimizer)

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, TypeError)
        assert "broadcast_optimizer_state: the state of rank 0 (node0) cannot be sent: param_groups[0][" in str(outcome)


def test_what_is_no_optimizer_and_what_has_no_values_is_refused():
    def rank(group: Group):
        with pytest.raises(TypeError, match="broadcast_optimizer_state: optimizer=3 is not"):
            hvd.broadcast_optimizer_state(3)
        with pytest.raises(ValueError, match="'w' is on the meta device"):
            hvd.broadcast_parameters({"w": torch.ones(2, device="meta")})

    run_ranks(1, rank)
