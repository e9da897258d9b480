"""Every rank gets the root's optimizer state, whatever state it had before."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd

Schedule = namedtuple("Schedule", ["warm_up", "decay"])

FORMS = ["bare", "wrapped", "wrapped, Adasum"]


def params_of(shapes: Any = ((3,), (2, 2))) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def in_form(form: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if form == "bare":
        return optimizer
    return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum if "Adasum" in form else hvd.Average)


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], times: int = 1) -> None:
    for _ in range(times):
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        for param in params:
            param.grad = None


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and are equal, also within containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def everything(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the options by group, and the states by parameter; None if there is none."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return groups, [optimizer.state.get(param) for param in params]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("root", [0, 1])
def test_options_that_only_some_ranks_have_become_the_roots(form, root):
    def rank(own: int) -> Any:
        options = {"lr": 0.1} if own == root else {"lr": 0.2, "momentum": 0.9}
        optimizer = torch.optim.SGD(params_of(), **options)
        if own == root:
            optimizer.param_groups[0]["layer_scale"] = 0.5
            del optimizer.param_groups[0]["nesterov"]
        else:
            optimizer.param_groups[0]["its_own"] = 7
        wrapped = in_form(form, optimizer)
        group = optimizer.param_groups[0]
        hvd.broadcast_optimizer_state(wrapped, root_rank=root)
        assert optimizer.param_groups[0] is group
        assert len(group["params"]) == 2
        return everything(optimizer)[0]

    outcomes = run_worlds(2, rank)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0]["layer_scale"] == 0.5
    assert outcomes[0][0]["lr"] == 0.1
    assert not {"its_own", "nesterov"} & outcomes[0][0].keys()


def test_defaults_stay_each_ranks_own_as_in_horovod():
    def rank(own: int) -> Any:
        optimizer = torch.optim.SGD(params_of(), lr=0.1 * (own + 1))
        hvd.broadcast_optimizer_state(optimizer)
        optimizer.add_param_group({"params": params_of()})
        return [group["lr"] for group in optimizer.param_groups]

    assert run_worlds(2, rank) == [[0.1, 0.1], [0.1, 0.2]]


VALUES: dict[str, Any] = {
    "int": 3,
    "float": 0.1,
    "bool": True,
    "None": None,
    "str": "warm",
    "tuple": (0.9, 0.999),
    "list": [1, [2.0, "x"]],
    "namedtuple": Schedule(10, (0.5, torch.tensor(2))),
    "dictionary": {"a": torch.arange(3)},
    "ordered dictionary": OrderedDict([("b", 1), ("a", 2)]),
    "0-dim tensor": torch.tensor(0.25, dtype=torch.float64),
    "whole tensor": torch.tensor([1, 2], dtype=torch.int8),
    "numpy float": np.float32(0.3),
    "numpy int": np.int16(5),
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "complex": 1j,
    "large int": 2**70,
}


@pytest.mark.parametrize("form", FORMS)
def test_options_and_states_keep_their_types(form):
    def rank(own: int) -> bool:
        params = params_of()
        optimizer = torch.optim.SGD(params, lr=0.1)
        if own == 1:
            optimizer.param_groups[0].update(VALUES)
            optimizer.state[params[1]] = dict(VALUES)
        else:
            optimizer.param_groups[0].update(dict.fromkeys(VALUES, 1.5))
        hvd.broadcast_optimizer_state(in_form(form, optimizer), root_rank=1)
        (options,), states = everything(optimizer)
        assert states[0] is None
        return same({key: options[key] for key in VALUES}, VALUES) and same(states[1], VALUES)

    assert run_worlds(2, rank) == [True, True]


def test_tensors_of_a_parameters_state_keep_dtypes_of_their_own():
    def state(value: int) -> dict[str, Tensor]:
        dtypes = (torch.uint8, torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64)
        return {str(dtype): torch.full((4,), value).to(dtype) for dtype in dtypes}

    def rank(own: int) -> bool:
        param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([param], lr=0.1)
        optimizer.state[param] = state(1 - own)
        hvd.broadcast_optimizer_state(optimizer)
        return same(dict(optimizer.state[param]), state(1))

    assert run_worlds(3, rank) == [True] * 3


@pytest.mark.parametrize("form", ["bare", "wrapped"])
def test_state_that_some_parameters_have_not_is_had_by_the_same_ones(form):
    def rank(own: int) -> Any:
        params = params_of()
        optimizer = torch.optim.Adam(params, lr=0.1)
        wrapped = in_form(form, optimizer)
        # Each rank has stepped with another parameter.
        step(optimizer, [params[own]], times=own + 1)
        hvd.broadcast_optimizer_state(wrapped, root_rank=1)
        assert set(optimizer.state) == {params[1]}
        return optimizer.state[params[1]]

    first, second = run_worlds(2, rank)
    assert same(first, second)
    assert first["step"] == 2


@pytest.mark.parametrize("form", ["bare", "wrapped"])
def test_where_the_root_has_no_state_nobody_has(form):
    def rank(own: int) -> Any:
        params = params_of()
        optimizer = torch.optim.Adam(params, lr=0.1)
        wrapped = in_form(form, optimizer)
        if own:
            step(optimizer, params)
        hvd.broadcast_optimizer_state(wrapped)
        return len(optimizer.state)

    assert run_worlds(3, rank) == [0, 0, 0]


@pytest.mark.night(but=10)
@pytest.mark.slow(but=4)
@pytest.mark.parametrize("make", [
    lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
    lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_steps_go_on_alike_after_a_checkpoint_that_the_root_alone_has_loaded(make, size):
    def rank(own: int) -> Any:
        params = params_of()
        optimizer = make(params)
        wrapped = hvd.DistributedOptimizer(optimizer)
        if own == 0:
            step(optimizer, params, times=3)
            earlier = make(params)
            earlier.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(earlier.state_dict())
        hvd.broadcast_parameters(params)
        hvd.broadcast_optimizer_state(wrapped)
        step(wrapped, params, times=2)
        return [param.detach() for param in params], everything(optimizer)

    outcomes = run_worlds(size, rank)
    assert all(same(outcome, outcomes[0]) for outcome in outcomes)


def test_what_has_been_received_is_the_ranks_own():
    def rank(own: int) -> Any:
        params = params_of()
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        shared = torch.zeros(3)
        if own == 0:
            for param in params:
                optimizer.state[param] = {"shared": shared, "of": params[0]}
            optimizer.param_groups[0]["first"] = params[0]
        hvd.broadcast_optimizer_state(optimizer)
        one, other = (optimizer.state[param] for param in params)
        # Entries that shared a tensor share one again, and a parameter is this rank's.
        one["shared"] += own + 1
        assert other["shared"].tolist() == [own + 1.0] * 3
        assert one["of"] is other["of"] is optimizer.param_groups[0]["first"] is params[0]
        return one["shared"].tolist()

    assert run_worlds(2, rank) == [[1.0] * 3, [2.0] * 3]


class Slow(torch.optim.SGD):
    """Has a counter of its own, which is in its state_dict."""

    looks = 0

    def state_dict(self) -> dict[str, Any]:
        return {"looks": self.looks, "average": torch.full((2,), float(self.looks)), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.looks, self.average = own.pop("looks"), own.pop("average")
        super().load_state_dict(own)


def test_an_optimizer_that_has_a_state_dict_of_its_own_is_asked_for_it():
    def rank(own: int) -> Any:
        optimizer = Slow(params_of(), lr=0.1 * (own + 1))
        optimizer.looks = 5 - own
        hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), root_rank=1)
        return optimizer.looks, optimizer.param_groups[0]["lr"], getattr(optimizer, "average", None)

    (looks, lr, average), (own_looks, own_lr, none) = run_worlds(2, rank)
    assert (looks, lr, average.tolist()) == (4, 0.2, [4.0, 4.0])
    assert (own_looks, own_lr, none) == (4, 0.2, None)


class Duck:
    """Not a torch.optim.Optimizer, but with the same attributes."""

    def __init__(self, value: int) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params_of()}]
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_only_looks_like_an_optimizer_will_do():
    def rank(own: int) -> int:
        duck = Duck(own)
        hvd.broadcast_optimizer_state(duck, root_rank=1)  # type: ignore[arg-type]
        return duck.value

    assert run_worlds(2, rank) == [1, 1]


@pytest.mark.parametrize("groups", [
    [[(3,)], [(2, 2)]],  # the same number of parameters, in two groups
    [[(3,), (2, 2), (1,)]],
    [[(2, 2), (3,)]],
    [[(3,), (2, 3)]],
])  # fmt: skip
def test_other_parameters_are_an_error_on_every_rank_and_change_nothing(groups):
    def rank(own: int) -> float:
        mine = groups if own else [[(3,), (2, 2)]]
        optimizer = torch.optim.SGD([{"params": params_of(shapes)} for shapes in mine], lr=0.1 * (own + 1))
        with pytest.raises(hvd.MismatchError, match="parameter shapes by parameter group"):
            hvd.broadcast_optimizer_state(optimizer)
        return optimizer.param_groups[0]["lr"]

    assert run_worlds(2, rank) == [0.1, 0.2]


def test_optimizers_of_different_classes_are_an_error_that_names_them():
    def rank(own: int) -> None:
        make = torch.optim.SGD if own else torch.optim.Adam
        hvd.broadcast_optimizer_state(make(params_of(), lr=0.1))

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "Adam" in str(outcome)
        assert "SGD" in str(outcome)


def test_functions_in_options_travel():
    def rank(own: int) -> float:
        optimizer = torch.optim.SGD(params_of(), lr=0.1)
        rate = own + 1.0
        optimizer.param_groups[0]["schedule"] = lambda count: rate / count
        hvd.broadcast_optimizer_state(optimizer)
        return optimizer.param_groups[0]["schedule"](4)

    assert run_worlds(2, rank) == [0.25, 0.25]


def adam(lr: Any, params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}], lr=lr, **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_that_is_a_tensor_of_the_program_stays_the_optimizers(form):
    def rank(own: int) -> Any:
        params, rate = params_of(), torch.tensor(0.1 * (own + 1))
        beta = torch.tensor(0.5 + 0.1 * own)
        optimizer = adam(rate, params)
        optimizer.param_groups[1]["betas"] = (beta, 0.999)
        hvd.broadcast_optimizer_state(in_form(form, optimizer), root_rank=1)
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        rate.mul_(0.5)
        beta.add_(1)
        (one, other), _ = everything(optimizer)
        return [one["lr"].item(), one["betas"], other["lr"].item(), [float(each) for each in other["betas"]]]

    outcomes = run_worlds(3, rank)
    assert outcomes == [outcomes[1]] * 3
    assert outcomes[0][0] == pytest.approx(0.1)


def test_a_learning_rate_of_an_optimizer_with_a_state_dict_of_its_own_stays_the_programs():
    def rank(own: int) -> float:
        rate = torch.tensor(0.1 * (own + 1))
        optimizer = Slow(params_of(), lr=rate)
        hvd.broadcast_optimizer_state(optimizer)
        assert optimizer.param_groups[0]["lr"] is rate
        return rate.item()

    assert run_worlds(2, rank) == [pytest.approx(0.1)] * 2


def test_state_tensors_and_their_memory_stay_where_the_root_has_some_of_that_form():
    def rank(own: int) -> Any:
        params = params_of()
        optimizer = torch.optim.Adam(params, lr=0.1)
        step(optimizer, params, times=own + 1)
        if own == 0:
            optimizer.state[params[1]]["exp_avg"] = torch.ones(2, 2, dtype=torch.float64)
        earlier = {key: [optimizer.state[param][key] for param in params] for key in ("step", "exp_avg")}
        hvd.broadcast_optimizer_state(optimizer)
        now = {key: [optimizer.state[param][key] for param in params] for key in earlier}
        kept = [a is b for key in now for a, b in zip(now[key], earlier[key], strict=True)]
        return kept, everything(optimizer)[1]

    (_, states), (kept, others) = run_worlds(2, rank)
    # The last has another dtype than the root's.
    assert kept == [True, True, True, False]
    assert same(states, others)


def test_a_tensor_in_two_places_takes_one_value_and_parameters_are_never_written():
    def rank(own: int) -> Any:
        params, shared = params_of(), torch.zeros(3)
        optimizer = torch.optim.SGD(params, lr=0.1)
        for number, param in enumerate(params):
            alias = params[0].detach() if own else torch.full((3,), 7.0)
            state = torch.full((3,), float(number)) if own == 0 else shared
            optimizer.state[param] = {"mine": state, "part": shared[:2] if own else torch.ones(2), "alias": alias}
        hvd.broadcast_optimizer_state(optimizer)
        assert params[0].tolist() == [1.0] * 3
        return [[each.tolist() for each in optimizer.state[param].values()] for param in params]

    outcomes = run_worlds(2, rank)
    assert outcomes[0] == outcomes[1] == [[[float(n)] * 3, [1.0] * 2, [7.0] * 3] for n in range(2)]
