"""DistributedOptimizer with op=hvd.Adasum: each rank takes its own step, and the changes are combined by Adasum."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, Branches, MixedTypes, Plain, Tied, adamw, batches, build, part_loss, sgd
from ranks import attempt_ranks, counting, run_ranks, set_of
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.group import Group


def adasum(vectors: list[Tensor]) -> Tensor:
    """The paper's formula for two vectors, up a binary tree; one without a partner goes up unchanged."""
    if len(vectors) == 1:
        return vectors[0]
    pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
    return adasum([_of_two(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def _of_two(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = (a * b).sum().double(), (a * a).sum().double(), (b * b).sum().double()
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def train_alone(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], x: Tensor, y: Tensor, size: int
) -> nn.Module:
    """Does in one process what all ranks do: one copy and optimizer per rank, combined after each step."""
    copies = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [make(list(each.parameters())) for each in copies]
    for step in range(len(x)):
        before = [param.detach().clone() for param in copies[0].parameters()]
        for part, (each, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(x.shape[1]):
                part_loss(each, x[step, micro], y[step, micro], part, size).backward()
            optimizer.step()
        with torch.no_grad():
            for start, *params in zip(before, *(each.parameters() for each in copies), strict=True):
                after = start + adasum([param - start for param in params])
                for param in params:
                    param.copy_(after)
    return copies[0]


def wrap(group: Group, model: nn.Module, make: Callable[..., Any] = sgd, **options: Any) -> hvd.DistributedOptimizer:
    options = {"bucket_cap_mb": 0.0002, **options}
    return hvd.DistributedOptimizer(
        make(list(model.parameters())), model.named_parameters(), op=hvd.Adasum, process_set=set_of(group), **options
    )


def train_rank(
    group: Group, model: nn.Module, make: Callable[..., Any], x: Tensor, y: Tensor, **options: Any
) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = wrap(group, model, make, backward_passes_per_step=x.shape[1], **options)
    assert isinstance(optimizer, hvd.DistributedOptimizer)
    for step in range(len(x)):
        optimizer.zero_grad()
        for micro in range(x.shape[1]):
            part_loss(model, x[step, micro], y[step, micro], group.rank, group.size).backward()
        optimizer.synchronize()  # this call does nothing
        optimizer.step()
    optimizer.close()
    return model


def assert_like(models: list[nn.Module], reference: nn.Module, tolerance: float) -> None:
    for model in models:
        for (name, param), expected, first in zip(
            model.named_parameters(), reference.parameters(), models[0].parameters(), strict=True
        ):
            torch.testing.assert_close(param, expected, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
            assert torch.equal(param, first), f"{name} has the same bits on all ranks"


@pytest.mark.parametrize(("kind", "size"), [*((Plain, size) for size in (1, 2, 4)), *((kind, 3) for kind in MODELS)])
def test_ranks_together_are_one_process_that_combines_their_deltas(kind, size):
    model = build(kind)
    x, y = batches(steps=3, passes=2, rows=12)
    make = adamw if kind in (Plain, Tied) else sgd
    ranks = run_ranks(size, lambda group: train_rank(group, model, make, x, y))
    # A value that was rounded to bfloat16 affects all other gradients too.
    assert_like(ranks, train_alone(model, make, x, y, size), 0.02 if kind is MixedTypes else 1e-10)


def test_deltas_that_travel_narrower_are_combined_as_such():
    model = build(Plain)
    x, y = batches(steps=3, passes=1, rows=12)
    ranks = run_ranks(3, lambda group: train_rank(group, model, sgd, x, y, compression=hvd.Compression.fp16))
    expected = train_alone(model, sgd, x, y, 3)
    assert_like(ranks, expected, 1e-3)
    with pytest.raises(AssertionError):
        assert_like(ranks, expected, 1e-9)


def test_a_compression_that_makes_no_floats_is_refused():
    class Bytes:
        def compress(self, buffer: Tensor) -> Tensor:
            return buffer.to(torch.int8)

        def decompress(self, wire: Tensor, out: Tensor) -> None:
            out.copy_(wire)

    model = build(Plain)
    x, y = batches(steps=1, passes=1, rows=12)
    with pytest.raises(ValueError, match=r"op=hvd\.Adasum: .*Bytes.* makes \d+ numbers of torch.int8"):
        run_ranks(2, lambda group: train_rank(group, model, sgd, x, y, compression=Bytes()))


@pytest.mark.parametrize("size", [1, 2])
def test_skipping_synchronization_is_refused_in_horovods_words(size):
    def skip(group: Group) -> None:
        optimizer = wrap(group, nn.Linear(2, 1))
        with optimizer.skip_synchronize():
            raise RuntimeError("unreachable")

    words = r"^Skipping synchronization is not supported when using Adasum optimizer\.$"
    with pytest.raises(AssertionError, match=words):
        run_ranks(size, skip)


def test_a_predivide_factor_is_refused_in_horovods_words():
    with pytest.raises(ValueError, match=r"^gradient_predivide_factor not supported with op != Average$"):
        run_ranks(1, lambda group: wrap(group, nn.Linear(2, 1), gradient_predivide_factor=2.0))


def test_more_backward_passes_than_agreed_are_an_error_but_not_under_no_sync():
    alike = nn.Linear(2, 1, bias=False)

    def train(group: Group) -> None:
        model = copy.deepcopy(alike)
        optimizer = wrap(group, model, backward_passes_per_step=2)
        for _ in range(3):
            with optimizer.no_sync():
                model(torch.ones(1, 2)).sum().backward()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is None
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(
            hvd.GradientError,
            match=r"Gradients were computed more than .*those of 'weight', with backward_passes_per_step=2",
        ):
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, train)


def test_a_bucket_that_no_rank_has_gradients_for_does_not_travel():
    def train(group: Group) -> int:
        model = build(Branches)
        optimizer = wrap(group, model)
        x, y = batches(steps=1, passes=1, rows=12)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        group.engine.calls.clear()
        part_loss(model, x[0, 0], y[0, 0], group.rank, group.size).backward()
        optimizer.step()
        assert torch.equal(before["never.weight"], model.never.weight)
        assert torch.equal(before["frozen.weight"], model.frozen.weight)
        # Only rank 1 has a gradient for it.
        assert not torch.equal(before["odd.weight"], model.odd.weight)
        with_frozen = sum(1 for operation, _ in group.engine.calls if operation == "alltoall")
        model.frozen.requires_grad_(True)
        optimizer.zero_grad()
        group.engine.calls.clear()
        part_loss(model, x[0, 0], y[0, 0], group.rank, group.size).backward()
        optimizer.step()
        assert not torch.equal(before["frozen.weight"], model.frozen.weight)
        return sum(1 for operation, _ in group.engine.calls if operation == "alltoall") - with_frozen

    assert all(more > 0 for more in run_ranks(2, train, counting))


def test_all_ranks_skip_a_step_for_which_one_has_found_no_finite_gradient():
    def train(group: Group) -> list[list[float]]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, lambda params: torch.optim.SGD(params, lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            overflow = step == 1 and group.rank == 1
            scaler.scale(model(torch.full((1, 2), float("inf") if overflow else 1.0)).sum()).backward()
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append(model.weight.flatten().tolist())
        return seen

    # Equal gradients of 1: their Adasum is their average.
    assert run_ranks(2, train) == [[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]] * 2


def test_a_closure_is_called_once_and_its_loss_returned():
    def train(group: Group) -> tuple[float, list[float]]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, lambda params: torch.optim.SGD(params, lr=0.5))

        def closure() -> Tensor:
            loss = model(torch.eye(2)[group.rank : group.rank + 1]).sum() * (group.rank + 1)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        return float(loss.detach()), model.weight.flatten().tolist()

    # Orthogonal gradients are added.
    assert run_ranks(2, train) == [(1.0, [0.5, 0.0]), (2.0, [0.5, 0.0])]


def test_state_schedulers_and_more_parameters_are_the_wrapped_optimizers():
    def train(group: Group) -> None:
        first, second = nn.Linear(2, 1), nn.Linear(2, 1)
        for module in (first, second):
            for param in module.parameters():
                nn.init.ones_(param)
        plain = torch.optim.SGD(first.parameters(), lr=0.5, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, first.named_parameters(), op=hvd.Adasum, process_set=set_of(group))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.1})
        (first(torch.ones(1, 2)) + second(torch.ones(1, 2)) * (group.rank + 1)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert plain.param_groups[0]["lr"] == 0.25
        assert optimizer.state_dict() == plain.state_dict()
        assert len(optimizer.state) == 4
        torch.testing.assert_close(first.weight, torch.full((1, 2), 0.5))
        # (1 - 2/2) 0.1 + (1 - 2/8) 0.2
        torch.testing.assert_close(second.weight, torch.full((1, 2), 0.85))

    run_ranks(2, train)


def test_ranks_with_different_models_or_operations_are_told():
    def differ(group: Group) -> None:
        wrap(group, nn.Linear(2 + group.rank, 1)).step()

    def half(group: Group) -> None:
        model = nn.Linear(2, 1)
        hvd.DistributedOptimizer(
            sgd(list(model.parameters())), op=hvd.Adasum if group.rank else hvd.Average, process_set=set_of(group)
        ).step()

    for outcome in attempt_ranks(2, differ):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'weight' has shape (1, 2)" in str(outcome)
    for outcome in attempt_ranks(2, half):
        assert isinstance(outcome, hvd.MismatchError)
        assert "Adasum" in str(outcome)


def test_the_newer_of_two_optimizers_takes_the_parameters_over():
    def train(group: Group) -> None:
        model = nn.Linear(2, 1)
        earlier = wrap(group, model)
        hvd.DistributedOptimizer(sgd(list(model.parameters())), process_set=set_of(group))
        with pytest.raises(hvd.GradientError, match="was closed, or a newer one has"):
            earlier.step()

    run_ranks(2, train)


@pytest.mark.usefixtures("_alone")
def test_it_survives_pickling():
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), op=hvd.Adasum)
    again = pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(AssertionError, match="Skipping synchronization"), again.skip_synchronize():
        pass


@pytest.fixture
def _alone():
    hvd.init()
    yield
    hvd.shutdown()


def test_ranks_that_sit_steps_out_follow_the_others():
    def train(group: Group) -> list[Tensor]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, lambda params: torch.optim.SGD(params, lr=0.5))
        seen = []
        for _ in range(2):
            if group.rank == 2:
                assert optimizer._reducer.sit_out(False)
            else:
                optimizer.zero_grad()
                model(torch.eye(2)[group.rank : group.rank + 1]).sum().backward()
                optimizer.step()
            seen.append(model.weight.flatten().tolist())
        assert not optimizer._reducer.sit_out(True)
        return seen

    assert run_ranks(3, train) == [[[0.5, 0.5], [0.0, 0.0]]] * 3


def test_sparse_gradients_make_dense_deltas():
    def train(group: Group) -> list[list[float]]:
        model = nn.Embedding(3, 1, sparse=True)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, lambda params: torch.optim.SGD(params, lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.tensor([group.rank, group.rank])).sum()).backward()
        scaler.step(optimizer)
        return model.weight.flatten().tolist()

    # Orthogonal: added.
    assert run_ranks(2, train) == [[0.0, 0.0, 1.0]] * 2


def test_a_closures_pass_belongs_to_its_own_step():
    def train(group: Group) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, lambda params: torch.optim.SGD(params, lr=0.5))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.eye(2)[group.rank : group.rank + 1]).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        closure()
        return model.weight.flatten().tolist()

    # Orthogonal: added.
    assert run_ranks(2, train) == [[0.0, 0.0]] * 2


def test_its_step_uses_a_pass_that_leaves_gradients_in_another_optimizer():
    def train(group: Group) -> list[float]:
        generator, discriminator = (nn.Linear(1, 1, bias=False) for _ in range(2))
        nn.init.zeros_(discriminator.weight)
        nn.init.ones_(generator.weight)
        of_generator = wrap(group, generator, lambda params: torch.optim.SGD(params, lr=0.5))
        of_discriminator = hvd.DistributedOptimizer(
            torch.optim.SGD(discriminator.parameters(), lr=1.0), process_set=set_of(group)
        )
        for _ in range(2):
            (generator.weight + discriminator.weight).sum().backward()
            of_generator.step()
            of_discriminator.zero_grad()
            (discriminator.weight * (group.rank + 1)).sum().backward()
            of_discriminator.step()
            of_discriminator.zero_grad()
            of_generator.zero_grad()
        return discriminator.weight.flatten().tolist()

    assert run_ranks(2, train) == [[-3.0]] * 2
