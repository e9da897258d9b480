"""Ranks whose parameters differ get an error at the first step; others exchange only one small message for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import attempt_ranks, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import wrap
from worlds import PLAIN, attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.buckets.parameter_check import ParameterCheck, fingerprints
from hvdlite.comm.group import Group
from hvdlite.errors import MismatchError
from hvdlite.runtime.world import current_world

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.uint8, torch.bool)
KINDS: list[dict[str, Any]] = [
    {},
    {"op": hvd.Adasum},
    {"op": hvd.Sum, "compression": hvd.Compression.fp16},
    {"step_on_arrival": True},
    {"bucket_cap_mb": 1e-6},
]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


MODEL = model_of()


def own_model(change: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Returns a copy of the model, which a rank may change for itself."""
    model = copy.deepcopy(MODEL)
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def wrapped(model: nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def step(model: nn.Module, optimizer: hvd.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


class NotingMaxima:
    """A process group that notes the number of elements of each maximum: steps compute no other maxima."""

    def __init__(self, engine: Any, maxima: list[int]) -> None:
        self._engine = engine
        self.maxima = maxima

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        if opts.reduceOp == dist.ReduceOp.MAX:
            self.maxima.append(tensors[0].numel())
        return self._engine.allreduce(tensors, opts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def noting_maxima() -> Callable[[Any], Any]:
    """For `run_worlds`: every engine of a rank notes into ``group.engine.maxima``."""
    maxima: list[int] = []
    return lambda engine: NotingMaxima(engine, maxima)


def add_to_bias(model: nn.Module) -> None:
    model[0].bias[1] += 1e-6


@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_forgotten_broadcast_is_an_error_on_every_rank_that_says_what_to_call(size, options, engine):
    def rank(own: int) -> None:
        model = own_model(add_to_bias if own == size - 1 else None)
        optimizer = wrapped(model, **options)
        backward(model)
        before = [param.detach().clone() for param in model.parameters()]
        try:
            optimizer.step()
        finally:
            if not options.get("step_on_arrival"):
                assert all(map(torch.equal, before, model.parameters())), "a step was taken"

    for error in attempt_worlds(size, rank, engine=engine):
        assert isinstance(error, MismatchError)
        assert str(error).startswith(
            f"parameter '0.bias' has different values on rank {size - 1} (node{size - 1}) than on rank 0 (node0) "
            "(1 of 4 parameters differ): "
        )
        assert "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on every rank" in str(error)
        assert "hvd.init(check_parameters=False)" in str(error)


def test_the_error_counts_the_parameters_and_names_the_ranks():
    def rank(own: int) -> None:
        model = own_model(lambda model: [param.add_(own) for param in model.parameters()] if own else None)
        step(model, wrapped(model))

    for error in attempt_worlds(3, rank):
        assert str(error).startswith(
            "parameter '0.weight' has different values on ranks 1 (node1), 2 (node2) than on rank 0 (node0) "
            "(4 of 4 parameters differ): "
        )


@pytest.mark.parametrize("options", KINDS)
def test_after_the_broadcast_that_it_asks_for_training_goes_on(options):
    def rank(own: int) -> Tensor:
        model = model_of(own)
        optimizer = wrapped(model, **options)
        with pytest.raises(MismatchError):
            step(model, optimizer)
        # Compared again: a broadcast of a part of the parameters is not enough.
        hvd.broadcast_parameters(list(model.named_parameters())[:1], root_rank=0)
        with pytest.raises(MismatchError, match=r"parameter '0.bias' .*\(3 of 4 "):
            step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(3):
            step(model, optimizer)
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    results = run_worlds(2, rank)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("everywhere", [False, True])
def test_nan_is_a_difference_where_one_rank_alone_has_it(everywhere):
    def rank(own: int) -> None:
        model = own_model(lambda model: model[1].weight.fill_(torch.nan) if everywhere or own == 1 else None)
        step(model, wrapped(model))

    outcomes = attempt_worlds(2, rank)
    if everywhere:
        assert outcomes == [None, None]
    else:
        assert all("parameter '1.weight' has different values" in str(error) for error in outcomes)


def test_frozen_parameters_are_compared_too():
    def rank(own: int) -> None:
        model = own_model(lambda model: model[0].weight.add_(own))
        model[0].requires_grad_(False)
        step(model, wrapped(model))

    assert all("parameter '0.weight'" in str(error) for error in attempt_worlds(2, rank))


def test_a_dtype_that_differs_is_told_in_the_first_step():
    def rank(own: int) -> None:
        wrapped(own_model().to([torch.float32, torch.float64][own])).step()

    assert all("every rank must build the same model" in str(error) for error in attempt_worlds(2, rank))


def test_a_model_without_parameters_steps_as_before():
    def rank(own: int) -> None:
        for options in ({}, {"op": hvd.Adasum}):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([{"params": []}], lr=0.1), **options)
            optimizer.step()

    run_worlds(2, rank)


def test_parameters_that_can_have_no_gradient_are_compared():
    def rank(own: int) -> None:
        model = own_model()
        model.register_parameter("table", nn.Parameter(torch.arange(3) + own, requires_grad=False))
        step(model, wrapped(model))

    assert all("parameter 'table' has different values" in str(error) for error in attempt_worlds(2, rank))


@pytest.mark.parametrize(("when", "expected"), [(True, [0]), (False, []), (3, [0, 3, 6]), (1, list(range(7)))])
@pytest.mark.parametrize("options", KINDS)
def test_how_often_is_what_was_asked_for(options, when, expected):
    def rank(own: int) -> list[int]:
        model = own_model()
        optimizer = wrapped(model, **options)
        maxima = current_world().group.engine.maxima
        compared = []
        for number in range(7):
            maxima.clear()
            step(model, optimizer)
            assert set(maxima) <= {2}
            compared += [number] * len(maxima)
        return compared

    environment = replace(PLAIN, check_parameters=when)
    for compared in run_worlds(2, rank, environment, make_wrapper=noting_maxima):
        assert compared == expected


def test_drift_is_found_at_the_next_comparison():
    def rank(own: int) -> None:
        model = own_model()
        optimizer = wrapped(model)
        for _ in range(4):
            step(model, optimizer)
        with torch.no_grad():
            model[0].weight[0, 0] += own
        step(model, optimizer)
        step(model, optimizer)
        step(model, optimizer)

    environment = replace(PLAIN, check_parameters=3)
    assert all("parameter '0.weight'" in str(error) for error in attempt_worlds(2, rank, environment))
    assert attempt_worlds(2, rank) == [None, None], "the first step alone is compared"


def test_one_rank_compares_nothing(monkeypatch):
    monkeypatch.setattr("hvdlite.buckets.parameter_check.fingerprints", lambda params: pytest.fail("it was computed"))

    def rank(own: int) -> None:
        for options in KINDS:
            model = own_model()
            step(model, wrapped(model, **options))

    run_worlds(1, rank, replace(PLAIN, check_parameters=1))


# -- in the middle of a step


@pytest.mark.parametrize("own_bucket", [False, True])
def test_ranks_whose_gradients_come_in_another_order_or_not_at_all_compare_at_the_same_place(own_bucket):
    def rank(own: int) -> Tensor:
        model = own_model()
        optimizer = wrapped(model, **({"bucket_cap_mb": 1e-6} if own_bucket else {}))
        for number in range(6):
            optimizer.zero_grad()
            if number % 3 != own:
                (model[own](torch.ones(1, 3 + own)).sum() * (own + 1)).backward()
            optimizer.step()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    results = run_worlds(3, lambda own: rank(min(own, 1)), replace(PLAIN, check_parameters=1))
    assert all(torch.equal(result, results[0]) for result in results)


def test_accumulation_and_clipping_and_steps_that_are_skipped_count_alike_on_all_ranks():
    def rank(own: int) -> Tensor:
        model = own_model()
        optimizer = wrapped(model, backward_passes_per_step=2)
        for number in range(6):
            optimizer.zero_grad()
            for _ in range(2 if (number + own) % 2 else 1):
                backward(model)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number == 3:
                # As GradScaler does if an average is not finite.
                continue
            with optimizer.skip_synchronize():
                optimizer.step()
        return model[0].weight.detach()

    results = run_worlds(2, rank, replace(PLAIN, check_parameters=2))
    assert torch.equal(*results)


def test_grad_scaler_skips_a_step_and_nothing_pairs_with_anything_else():
    def rank(own: int) -> tuple[Tensor, float]:
        model = own_model()
        optimizer = wrapped(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            scaler.scale(loss * (torch.inf if number in (0, 2) and own == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return model[0].weight.detach(), scaler.get_scale()

    (one, scale), (other, _) = run_worlds(2, rank, replace(PLAIN, check_parameters=2))
    assert torch.equal(one, other)
    assert scale == 2.0**8


def test_a_gradient_changed_too_early_on_one_rank_costs_the_others_nothing():
    def rank(own: int) -> str:
        model = own_model()
        optimizer = wrapped(model)
        backward(model)
        if own == 1:
            model[0].weight.grad.mul_(2.0)
        said = ""
        try:
            optimizer.step()
        except hvd.GradientError as error:
            said = str(error)
        optimizer.zero_grad()
        step(model, optimizer)
        return said

    fine, said = run_worlds(2, rank)
    assert not fine
    assert "was changed while it was being averaged" in said


def test_what_another_optimizer_left_behind_is_dropped_and_compared_in_passing():
    def rank(own: int) -> bool:
        first, second = own_model(), own_model()
        ours, others = wrapped(first), wrapped(second)
        for _ in range(3):
            (first(torch.ones(2, 3)).sum() + second(torch.ones(2, 3)).sum()).backward()
            ours.step()
            others.zero_grad()
            step(second, others)
            ours.zero_grad()
        return torch.equal(first[0].weight, second[0].weight)

    run_worlds(2, rank, replace(PLAIN, check_parameters=1))


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("when", [True, 1, 2])
def test_a_rank_that_has_joined_sits_out_whatever_its_parameters_are(options, when):
    def rank(own: int) -> int:
        model = own_model(add_to_bias if own == 0 else None)
        optimizer = wrapped(model, **options)
        for _ in range(4 if own else 0):
            step(model, optimizer)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        for _ in range(3):
            step(model, optimizer)
        return last

    assert len(set(run_worlds(3, rank, replace(PLAIN, check_parameters=when)))) == 1


def test_ranks_that_go_on_are_compared_without_those_that_have_joined():
    def rank(own: int) -> None:
        model = own_model(add_to_bias if own == 2 else None)
        optimizer = wrapped(model)
        if own:
            step(model, optimizer)
        hvd.join()

    joined, *others = attempt_worlds(3, rank)
    # The step in which it takes part after joining fails too; otherwise it would first learn that the other ranks
    # ended.
    assert isinstance(joined, hvd.HvdliteError)
    for error in others:
        assert "parameter '0.bias' has different values on rank 2 (node2) than on rank 1 (node1)" in str(error)
        assert "root_rank=1" in str(error)


# -- which parameters, and whose


def test_only_the_members_of_a_process_set_are_compared():
    def rank(own: int) -> None:
        even = hvd.add_process_set([0, 2])
        model = own_model(add_to_bias if own == 1 else None)
        for _ in range(2):
            step(model, wrapped(model, process_set=even))

    run_worlds(3, rank)


def test_the_error_of_a_process_set_names_its_first_rank_and_the_set():
    def rank(own: int) -> None:
        members = hvd.add_process_set([1, 2])
        model = own_model(add_to_bias if own == 2 else None)
        try:
            if members.included():
                step(model, wrapped(model, process_set=members))
        finally:
            hvd.barrier()

    outcomes = attempt_worlds(3, rank)
    assert outcomes[0] is None
    for error in outcomes[1:]:
        assert "on rank 2 (node2) than on rank 1 (node1)" in str(error)
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=1, process_set=...)" in str(error)


def test_parameters_that_are_added_later_are_compared_at_the_next_step():
    def rank(own: int) -> None:
        model = own_model()
        optimizer = wrapped(model)
        step(model, optimizer)
        late = nn.Parameter(torch.full((2,), float(own)))
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [late], "lr": 0.1})
        (late.sum() + model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(MismatchError, match=r"\(1 of 5 parameters differ\)"):
            optimizer.step()

    run_worlds(2, rank)


def test_state_of_the_optimizer_that_is_loaded_and_broadcast_asks_for_no_comparison():
    def rank(own: int) -> list[int]:
        model = own_model()
        optimizer = wrapped(model)
        step(model, optimizer)
        if own == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        maxima = current_world().group.engine.maxima
        maxima.clear()
        step(model, optimizer)
        return maxima

    assert run_worlds(2, rank, make_wrapper=noting_maxima) == [[], []]


def test_a_checkpoint_that_one_rank_loads_is_found_at_the_first_step():
    saved = model_of(7).state_dict()

    def rank(own: int) -> None:
        model = own_model()
        optimizer = wrapped(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if own == 0:
            model.load_state_dict(saved)
        step(model, optimizer)

    assert all("after loading a checkpoint on one rank" in str(error) for error in attempt_worlds(2, rank))


# -- the fingerprints


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 8, 9, 1000, (1 << 19) + 5])
def test_a_fingerprint_depends_on_bits_and_places_alone(dtype, numel):
    values = torch.randint(0, 2, (numel,)).to(dtype)
    padded = torch.cat([values[:1], values]) if numel else values
    # The same bits at another address.
    moved = padded[1:] if numel else values.clone()
    assert fingerprints([values]) == fingerprints([moved]) == fingerprints([values.clone()])
    if numel > 1:
        for place in {0, numel // 2, numel - 1}:
            changed = values.clone()
            changed[place] = 1 - changed[place].to(torch.int64).item() if dtype is torch.bool else changed[place] + 1
            assert fingerprints([changed]) != fingerprints([values])


def test_values_that_change_places_change_the_fingerprint():
    values = torch.randn(1 << 18)
    swapped = values.clone()
    swapped[[3, 200_000]] = values[[200_000, 3]]
    assert len({*fingerprints([values]), *fingerprints([swapped]), *fingerprints([values.flip(0)])}) == 3
    one, other = torch.randn(5), torch.randn(5)
    assert fingerprints([one, other]) == fingerprints([other, one])[::-1]


def test_signs_zeros_dtypes_and_shapes_are_told_apart():
    values = torch.randn(64)
    tensors = [values, -values, values.double(), values.view(8, 8), values.view(torch.int32), values.abs()]
    for pair in ((1, 3), (0, 2), (5, 61)):
        flipped = values.clone()
        flipped[list(pair)] *= -1
        tensors.append(flipped)
    tensors += [torch.zeros(3), -torch.zeros(3), torch.zeros(4), torch.zeros(0)]
    assert len(set(fingerprints(tensors))) == len(tensors)


def test_random_changes_of_few_bits_never_have_the_same_fingerprint():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, generator=generator)
    tensors = []
    for number in range(2000):
        changed = values.clone()
        places = torch.randperm(300, generator=generator)[: 1 + number % 3]
        bits = changed.view(torch.int32)
        bits[places] ^= 1 << int(torch.randint(0, 31, (1,), generator=generator))
        tensors.append(changed)
    assert len(set(fingerprints(tensors))) == len({tuple(each.view(torch.int32).tolist()) for each in tensors})


def test_a_layout_with_gaps_and_one_in_another_order_have_fingerprints():
    values = torch.randn(4, 3, 5, 5)
    last = values.to(memory_format=torch.channels_last)
    gaps = torch.zeros(4, 3, 5, 10)[..., ::2].copy_(values)
    assert fingerprints([gaps]) == fingerprints([values])
    changed = last.clone(memory_format=torch.preserve_format)
    changed[1, 2, 3, 4] += 1.0
    assert fingerprints([changed]) != fingerprints([last])


def test_it_takes_no_copy_of_the_model():
    values = torch.zeros(1 << 22)
    made: list[int] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            storage = result.untyped_storage()
            if storage.data_ptr() != values.untyped_storage().data_ptr():
                made.append(storage.nbytes())
            return result

    with Noting():
        fingerprints([values])
    assert max(made) <= 1 << 19


def test_ranks_over_a_process_set_without_a_world_are_compared():
    def rank(group: Group) -> None:
        weight = nn.Parameter(torch.full((3,), float(group.rank)))
        optimizer = wrap(group, [weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()

    assert all(isinstance(error, MismatchError) for error in attempt_ranks(2, rank))
    assert run_ranks(1, rank) == [None]


@pytest.mark.parametrize("spares_first", [False, True])
def test_ranks_that_finish_a_step_after_a_loss_compare_in_the_next_one(spares_first: bool) -> None:
    """Until then the others have waited long enough."""

    def on_rank(group: Group) -> list[bool]:
        check = ParameterCheck(group, True, spares_first=spares_first)
        check.add([("weight", torch.full((3,), float(group.rank)))])
        differs = []
        for _ in range(2):
            check.begin(takes_part=True)
            check.send(group)
            try:
                check.finish(group)
                differs.append(False)
            except MismatchError:
                differs.append(True)
        return differs

    assert run_ranks(2, on_rank) == [[not spares_first, True]] * 2
