"""step_on_arrival steps bucket by bucket, gives the same bits as an ordinary step, and leaves no gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CLASSES, FEATURES, Branches, Plain, batches, build, part_loss
from ranks import attempt_ranks, run_ranks, set_of
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group

# About one bucket per parameter.
SMALL = 0.0002


class Words(nn.Module):
    """A model with all kinds of gradients: sparse, of a frozen parameter, of one that some or all ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, FEATURES, sparse=True)
        self.branches = Branches()

    def forward(self, x: Tensor, part: int) -> Tensor:
        words = self.embedding(torch.arange(len(x)) % (5 + part % 2))
        return self.branches(x + words, part)


def wrap(group: Group, optimizer: torch.optim.Optimizer, **options: Any) -> hvd.DistributedOptimizer:
    options.setdefault("bucket_cap_mb", SMALL)
    return hvd.DistributedOptimizer(optimizer, process_set=set_of(group), **options)


def train(
    group: Group,
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    at: Callable[[int, nn.Module, hvd.DistributedOptimizer], None] = lambda *_: None,
    *,
    steps: int = 4,
    passes: int = 1,
    **options: Any,
) -> list[Tensor]:
    """Returns the bits of the parameters and of the optimizer's state after some steps; calls ``at`` before each."""
    own = copy.deepcopy(model)
    optimizer = wrap(group, make(list(own.parameters())), backward_passes_per_step=passes, **options)
    x, y = batches(steps, passes, 4 * group.size)
    for step in range(steps):
        at(step, own, optimizer)
        optimizer.zero_grad()
        for micro in range(passes):
            part_loss(own, x[step, micro], y[step, micro], group.rank, group.size).backward()
        optimizer.step()
        if options.get("step_on_arrival"):
            assert all(param.grad is None for param in own.parameters())
    optimizer.close()
    bits = [param.detach() for param in own.parameters()]
    for kept in (optimizer.state.get(param, {}) for param in own.parameters()):
        tensors = [value for value in kept.values() if isinstance(value, Tensor)]
        bits += [value.to_dense() if value.is_sparse else value for value in tensors]
    return bits


def assert_equal_bits(group: Group, *arguments: Any, **options: Any) -> list[Tensor]:
    expected = train(group, *arguments, **options)
    got = train(group, *arguments, **options, step_on_arrival=True)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return got


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], lr=0.1, momentum=0.9)


def freeze_and_thaw(step: int, model: nn.Module, optimizer: object) -> None:
    inner = model.branches if isinstance(model, Words) else model
    inner.frozen.requires_grad_(step in (2, 3))
    inner.odd.requires_grad_(step != 1)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_has_the_bits_of_the_ordinary_step(size):
    words, plain = build(Words), build(Plain)

    def rank(group: Group) -> None:
        assert_equal_bits(group, words, momentum, freeze_and_thaw, steps=6)
        assert_equal_bits(group, words, momentum, freeze_and_thaw, sparse_as_dense=True)
        assert_equal_bits(group, plain, momentum, passes=2, compression=hvd.Compression.fp16)
        assert_equal_bits(group, plain, lambda params: torch.optim.AdamW(params, foreach=True), op=hvd.Sum)

    run_ranks(size, rank)


CLASSES_OF_OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES_OF_OPTIMIZERS)
def test_every_optimizer_of_torch_has_the_bits_of_the_ordinary_step(kind):
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((FEATURES, 5), (5, 5), (5, CLASSES))))
    whole = Whole(model)
    variants: list[dict[str, Any]] = [{}]
    if "foreach" in kind.__init__.__annotations__:
        variants += [{"foreach": True}, {"foreach": False}]
    if "fused" in kind.__init__.__annotations__:
        variants += [{"fused": True}]

    def rank(group: Group) -> None:
        for variant in variants:
            assert_equal_bits(group, whole, lambda params, v=variant: kind(params, lr=0.01, **v), steps=5)

    run_ranks(2, rank)


class Whole(nn.Module):
    """A model whose loss does not depend on the rank's part of the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.double()

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_adam_of_sparse_gradients_alone_has_the_bits_of_the_ordinary_step(size):
    embeddings = nn.ModuleList(nn.Embedding(5, 3, sparse=True) for _ in range(3))

    def rank(group: Group) -> None:
        results = []
        for on_arrival in (False, True):
            own = copy.deepcopy(embeddings)
            optimizer = wrap(group, torch.optim.SparseAdam(own.parameters()), step_on_arrival=on_arrival)
            for step in range(4):
                optimizer.zero_grad()
                # One of the layers is not used by every rank, and one by none.
                used = own[: 2 if group.rank == 0 else 1]
                sum(part(torch.tensor([step, group.rank])).pow(2).sum() for part in used).backward()
                optimizer.step()
            results.append([param.detach() for param in own.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(size, rank)


def test_a_bucket_is_updated_and_its_gradients_are_freed_before_the_next_one_comes_back():
    def rank(group: Group) -> list[str]:
        events: list[str] = []
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]

        class Noting(torch.optim.SGD):
            def step(self, closure=None):
                here = {param for entry in self.param_groups for param in entry["params"]}
                number = [n for n, param in enumerate(params) if param in here]
                there = [n for n, param in enumerate(params) if param.grad is not None]
                events.append(f"step on {number}, gradients of {there}")
                return super().step(closure)

        optimizer = wrap(group, Noting(params, lr=1.0), step_on_arrival=True)

        for _ in range(2):
            events.clear()
            optimizer.zero_grad()
            sum(param.sum() for param in params).backward()
            optimizer.step()
        assert [param[0].item() for param in params] == [-2.0] * 3
        return events

    expected = [
        "step on [2], gradients of [0, 1, 2]",
        "step on [1], gradients of [0, 1]",
        "step on [0], gradients of [0]",
        "step on [], gradients of []",
    ]
    assert run_ranks(2, rank) == [expected] * 2


def test_step_hooks_see_all_averages_and_are_called_once_a_step():
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        optimizer = wrap(group, torch.optim.SGD(params, lr=1.0), step_on_arrival=True)
        seen: list[tuple[str, list[float]]] = []
        handles = [
            optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", [p.grad[0].item() for p in params]))),
            optimizer.register_step_post_hook(lambda *_: seen.append(("post", [p[0].item() for p in params]))),
        ]
        for step in range(2):
            if step == 1:
                handles[0].remove()
            optimizer.zero_grad()
            sum((1 + group.rank) * param.sum() for param in params).backward()
            optimizer.step()
            assert all(param.grad is None for param in params)
        assert seen == [("pre", [1.5] * 3), ("post", [-1.5] * 3), ("post", [-3.0] * 3)]

    run_ranks(2, rank)


@pytest.mark.parametrize("over", ["inner", "wrapper"])
def test_a_scheduler_counts_steps_and_does_not_warn(over, recwarn):
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        inner = torch.optim.SGD(params, lr=1.0)
        optimizer = wrap(group, inner, step_on_arrival=True)
        scheduler = torch.optim.lr_scheduler.StepLR(inner if over == "inner" else optimizer, 1, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            sum(param.sum() for param in params).backward()
            optimizer.step()
            scheduler.step()
        assert [param[0].item() for param in params] == [-1.75] * 3

    run_ranks(2, rank)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_after_clipping_or_a_grad_scaler_the_step_is_taken_as_a_whole():
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        optimizer = wrap(group, torch.optim.SGD(params, lr=1.0), step_on_arrival=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        sum((1 + group.rank) * param.sum() for param in params).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_value_(params, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(param.grad is None for param in params)

        sum((1 + group.rank) * param.sum() for param in params).backward()
        optimizer.synchronize()
        optimizer.step()

        scaler.scale(sum((1 + group.rank) * param.sum() for param in params)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [param[0].item() for param in params] == [-4.0] * 3
        # A gradient that is not finite: no step is taken, and the next step is not affected.
        scaler.scale(sum(float("inf") * (1 + group.rank) * param.sum() for param in params)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        sum(param.sum() for param in params).backward()
        optimizer.step()
        assert [param[0].item() for param in params] == [-5.0] * 3

    run_ranks(2, rank)


def test_it_works_with_accumulation_added_groups_checkpoints_and_pickles():
    def rank(group: Group) -> list[Tensor]:
        results = []
        for on_arrival in (False, True):
            torch.manual_seed(0)
            params = [nn.Parameter(torch.ones(64) * (n + 1)) for n in range(4)]
            optimizer = wrap(group, torch.optim.Adam(params[:2], lr=0.1), step_on_arrival=on_arrival)
            for step in range(6):
                if step == 2:
                    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
                if step == 4:
                    saved = copy.deepcopy(optimizer.state_dict())
                    fresh = torch.optim.Adam([{"params": params[:2]}, {"params": params[2:]}])
                    optimizer = wrap(group, fresh, step_on_arrival=on_arrival)
                    optimizer.load_state_dict(saved)
                optimizer.zero_grad()
                with optimizer.no_sync():
                    sum((param * (group.rank + n)).pow(2).sum() for n, param in enumerate(params)).backward()
                if step % 2:
                    # Only counted, and so averaged early, in step().
                    optimizer.set_backward_passes_per_step(2)
                sum((param * step).pow(2).sum() for param in params).backward()
                optimizer.step()
                optimizer.set_backward_passes_per_step(1)
            results.append([param.detach() for param in params])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        return results[1]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_pickled_optimizer_still_steps_on_arrival():
    hvd.init()
    params = [nn.Parameter(torch.zeros(3))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), step_on_arrival=True)
    again = pickle.loads(pickle.dumps(optimizer))
    (param,) = again.param_groups[0]["params"]
    param.sum().backward()
    again.step()
    assert param.grad is None
    assert param.tolist() == [-1.0] * 3


def test_ranks_that_join_take_part_and_ranks_outside_of_the_set_step_alone():
    def rank(number: int) -> float:
        evens = hvd.add_process_set([0, 2])
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0), process_set=evens, step_on_arrival=True, bucket_cap_mb=SMALL
        )
        for _ in range(2 if number == 2 else 1):
            sum((1 + number) * param.sum() for param in params).backward()
            optimizer.step()
        hvd.join()
        return params[0][0].item()

    # Rank 2 takes its second step with rank 0, which has joined and contributes zeros.
    assert run_worlds(3, rank) == [-2.0, -2.0, -3.5]


def test_what_forbids_it_is_an_error_that_says_so():
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match=r"step_on_arrival=True does not work with op=hvd\.Adasum"):
            wrap(group, torch.optim.SGD([param], lr=1.0), op=hvd.Adasum, step_on_arrival=True)
        with pytest.raises(ValueError, match="step_on_arrival='yes' is neither True nor False"):
            wrap(group, torch.optim.SGD([param], lr=1.0), step_on_arrival="yes")
        optimizer = wrap(group, torch.optim.SGD([param], lr=1.0), step_on_arrival=True)
        with pytest.raises(
            ValueError, match=r"step\(closure\) does not work with step_on_arrival=True.* call the closure before"
        ):
            optimizer.step(lambda: 0.0)
        param.sum().backward()
        optimizer.step()
        assert param.tolist() == [-1.0, -1.0]

    run_ranks(2, rank)
    for outcome in attempt_ranks(
        2,
        lambda g: wrap(g, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), step_on_arrival=g.rank == 1).step(),
    ):
        assert isinstance(outcome, hvd.MismatchError)
        assert "step_on_arrival" in str(outcome)


def test_an_optimizer_that_keeps_count_in_its_groups_is_refused_by_name():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for entry in self.param_groups:
                entry["steps"] = entry.get("steps", 0) + 1
            return super().step(closure)

    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(2)]
        optimizer = wrap(group, Counting(params, lr=1.0), step_on_arrival=True)
        sum(param.sum() for param in params).backward()
        with pytest.raises(
            hvd.GradientError, match=r"does not work with Counting: its step changes param_groups\[0\]\['steps'\]"
        ):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == params

    run_ranks(2, rank)


def test_after_an_error_on_the_way_the_groups_are_whole_and_nothing_was_changed_too_early():
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        optimizer = wrap(group, torch.optim.SGD(params, lr=1.0), step_on_arrival=True)
        sum(param.sum() for param in params).backward()
        params[0].grad.mul_(2)
        with pytest.raises(hvd.GradientError, match=r"was changed while it was being averaged"):
            optimizer.step()
        assert [param[0].item() for param in params] == [0.0] * 3
        optimizer.zero_grad()
        sum(param.sum() for param in params).backward()
        with pytest.raises(hvd.GradientError, match="more than backward_passes_per_step"):
            sum(param.sum() for param in params).backward()
        with pytest.raises(hvd.GradientError, match="spoilt"):
            optimizer.step()
        assert [param[0].item() for param in params] == [0.0] * 3
        assert len(optimizer.param_groups[0]["params"]) == 3

    run_ranks(2, rank)


class EndsAtLeisure:
    """All-reduces of gradients after the first are not done until the test writes their results."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.holds = True
        self.under_way: list[Tensor] = []

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        work = self._engine.allreduce(tensors, options)
        if not (self.holds and tensors[0].is_floating_point()):
            return work
        self.under_way += tensors
        return work if len(self.under_way) == 1 else Unfinished(work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Unfinished:
    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._work.wait()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_what_is_in_flight_when_a_part_of_the_step_is_interrupted_writes_into_no_later_gradient(compression):
    class Interrupted(torch.optim.SGD):
        interrupts = True

        def step(self, closure=None):
            if self.interrupts:
                raise KeyboardInterrupt
            return super().step(closure)

    def rank(group: Group) -> list[list[float]]:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(4)]
        own = Interrupted(params, lr=1.0)
        optimizer = wrap(group, own, step_on_arrival=True, compression=compression)
        torch.cat(params).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        engine = optimizer._reducer.engine.group.engine
        late = engine.under_way[1:]
        assert late
        engine.holds = own.interrupts = False
        optimizer.zero_grad()
        (torch.cat(params).sum() * (2 + 2 * group.rank)).backward()
        for tensor in late:
            tensor.fill_(float("nan"))
        optimizer.step()
        return [param.unique().tolist() for param in params]

    assert run_ranks(2, rank, lambda: EndsAtLeisure) == [[[-3.0]] * 4] * 2


def test_where_a_part_of_the_step_fails_the_rest_still_comes_home_and_the_next_step_is_right():
    """The failing rank finishes the other ranks' step, or its next gradients would be averaged with that step's."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError("in the midst of it")
            return super().step(closure)

    def rank(group: Group) -> list[list[float]]:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(4)]
        own = Failing(params, lr=1.0)
        optimizer = wrap(group, own, step_on_arrival=True)
        own.fails = group.rank == 0
        sum(param.sum() for param in params).backward()
        if group.rank == 0:
            with pytest.raises(ArithmeticError, match="in the midst"):
                optimizer.step()
        else:
            optimizer.step()
        own.fails = False
        optimizer.zero_grad()
        (sum(param.sum() for param in params) * (2 + 2 * group.rank)).backward()
        optimizer.step()
        return [param.unique().tolist() for param in params]

    assert run_ranks(2, rank) == [[[-3.0]] * 4, [[-4.0]] * 4]
