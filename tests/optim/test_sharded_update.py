"""``shard=``: each rank updates its part of the parameters, with the bits of ranks that update all of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from long_run import trials
from ranks import attempt_ranks, run_ranks, set_of
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OF_TORCH: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.01),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
}


class Uneven(nn.Module):
    """A model with parameters of many sizes, one of no elements, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 70)
        self.last = nn.Linear(70, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) * self.scale


MODEL = Uneven()


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 33, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    group: Group, make: Make, *, steps: int = 3, model: nn.Module = MODEL, **options: Any
) -> tuple[nn.Module, hvd.DistributedOptimizer]:
    model = copy.deepcopy(model)
    inner = make(list(model.parameters()))
    optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), bucket_cap_mb=0.003, **options)
    take_steps(group, model, optimizer, range(steps))
    return model, optimizer


def take_steps(group: Group, model: nn.Module, optimizer: hvd.DistributedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(group.rank, step)).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module) -> list[bytes]:
    return [param.detach().contiguous().numpy().tobytes() for param in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", OF_TORCH)
def test_every_optimizer_of_torch_has_the_bits_that_it_has_on_ranks_that_update_everything(name, size):
    def train(group: Group) -> None:
        whole, _ = trained(group, OF_TORCH[name])
        shared, optimizer = trained(group, OF_TORCH[name], shard="world")
        assert bits(shared) == bits(whole)
        updated = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(param.grad is None for param in updated) or size == 1
        optimizer.close()

    run_ranks(size, train, engine="shared memory")


class WithoutGaps(hvd.Exchange):
    """The sum of all ranks: buckets of a user's exchange have no gaps between parameters."""

    def begin(self, gradients: Any, links: Any) -> Any:
        return hvd.ExchangeWork(gradients, [links.all.all_reduce(gradients.flat, "gradients")])


def test_half_precision_in_buckets_without_gaps_has_the_bits_of_ranks_that_update_everything():
    """The last elements of a tensor, fewer than a vector has, are rounded otherwise than those within one."""
    model = nn.ParameterList([torch.linspace(-1, 1, 320).half(), torch.ones(1).half()])

    def train(group: Group) -> None:
        models = [copy.deepcopy(model), copy.deepcopy(model)]
        for each, shard in zip(models, [None, "world"], strict=True):
            inner = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), exchange=WithoutGaps, shard=shard)
            each[0].grad = torch.linspace(0.1, 2, 320).half() * (group.rank + 1)
            optimizer.step()
            optimizer.close()
        assert bits(models[0]) == bits(models[1])

    run_ranks(2, train, engine="shared memory")


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SGD nesterov"])
def test_a_consolidated_state_is_that_of_one_rank_that_updates_everything(name):
    def train(group: Group) -> tuple[dict[str, Any], dict[str, Any], float]:
        _, plain = trained(group, OF_TORCH[name])
        _, optimizer = trained(group, OF_TORCH[name], shard="world")
        optimizer.consolidate_state_dict(to=1)
        return optimizer.state_dict(), plain.state_dict(), nbytes_of(optimizer) / nbytes_of(plain)

    outcomes = run_ranks(3, train, engine="shared memory")
    assert_equal_states(*outcomes[1][:2])
    assert sum(part for *_, part in outcomes) < 1.05


def nbytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor))


def assert_equal_states(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for number, each in expected["state"].items():
        assert got["state"][number].keys() == each.keys()
        for key, value in each.items():
            assert torch.equal(torch.as_tensor(got["state"][number][key]), torch.as_tensor(value)), (number, key)


# -- beside everything else that an optimizer can do


class Embedded(Uneven):
    """Has a parameter that is frozen at first, one in channels_last, and one of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.full((20, 5), 0.5), requires_grad=False)
        self.image = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.full((40,), 0.5 + 0.1j))

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(x[:, :27].reshape(-1, 3, 3, 3)).flatten(1).mean(dim=1, keepdim=True)
        return super().forward(x) @ self.late.t() + image + (self.phase.abs().sum())


EMBEDDED = Embedded()


def scaled(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1))
    scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def weighted(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    optimizer.weighted(loss, 3 + step).backward()
    optimizer.step()


def accumulated(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    with optimizer.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def with_closure(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    def closure() -> float:
        loss.backward()
        return 7.0

    assert optimizer.step(closure) == 7.0


def thawed(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    loss.backward()
    optimizer.step()
    if step == 1:
        model.late.requires_grad_(True)


def grown(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    loss.backward()
    optimizer.step()
    if step == 1:
        model.added = nn.Parameter(torch.ones(50))
        optimizer.add_param_group({"params": [model.added], "lr": 0.01})
    if step >= 1:
        model.added.grad = None


def shrunk(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    if step == 2:
        # All buckets are planned anew, so that states move between ranks.
        params = optimizer.param_groups[0]["params"]
        params[:] = [param for param in params if param is not model.last.weight]
    loss.backward()
    optimizer.step()


def left_and_back(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    params = optimizer.param_groups[0]["params"]
    if step == 1:
        params[:] = [param for param in params if param is not model.last.weight]
    if step == 3:
        params.append(model.last.weight)
        # Its memory may be another by then.
        model.first.weight.data = model.first.weight.data.clone()
    loss.backward()
    optimizer.step()
    model.last.weight.grad = None


def moved(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    loss.backward()
    optimizer.step()
    for param in model.parameters():
        param.data = param.data.clone(memory_format=torch.preserve_format)


def scheduled(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    if step == 0:
        model.__dict__["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
    loss.backward()
    optimizer.step()
    model.scheduler.step()


def reloaded(optimizer: hvd.DistributedOptimizer, model: nn.Module, loss: Tensor, step: int) -> None:
    loss.backward()
    optimizer.step()
    # Each rank its own part.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


WAYS = [
    scaled,
    clipped,
    weighted,
    accumulated,
    with_closure,
    thawed,
    grown,
    shrunk,
    left_and_back,
    moved,
    scheduled,
    reloaded,
]


def steps_in(way: Callable[..., None], group: Group, make: Make, **options: Any) -> nn.Module:
    model = copy.deepcopy(EMBEDDED)
    # PyTorch's GradScaler has no complex numbers.
    model.phase.requires_grad_(way is not scaled)
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())), process_set=set_of(group), bucket_cap_mb=0.003, **options
    )
    for step in range(5):
        optimizer.zero_grad()
        way(optimizer, model, model(batch_of(group.rank, step)).square().mean(), step)
    optimizer.close()
    return model


@pytest.mark.parametrize(("size", "engine"), [(3, "shared memory"), (2, "gloo")])
@pytest.mark.parametrize("way", WAYS)
def test_it_has_the_same_bits_beside_what_else_a_program_does(way, size, engine):
    def train(group: Group) -> None:
        for make in (torch.optim.AdamW, PerParameter):
            assert bits(steps_in(way, group, make, shard="world")) == bits(steps_in(way, group, make)), make

    run_ranks(size, train, engine=engine)


def test_a_parameter_that_comes_under_the_name_of_one_that_has_gone_has_its_own_update_and_state():
    def train(group: Group, shard: str | None) -> list[float]:
        stays, goes, comes = (nn.Parameter(torch.full((40,), value)) for value in (1.0, 2.0, 3.0))
        inner = torch.optim.SGD([stays, goes], lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), bucket_cap_mb=0.0001, shard=shard)

        def step(*params: Tensor) -> None:
            optimizer.zero_grad()
            sum(param.square().sum() for param in params).backward()
            optimizer.step()

        step(stays, goes)
        step(stays, goes)
        params = optimizer.param_groups[0]["params"]
        params[:] = [stays]
        optimizer.zero_grad()
        params.append(comes)
        step(stays, comes)
        step(stays, comes)
        return [param.detach()[0].item() for param in (stays, goes, comes)]

    for shard in ("world", None):
        assert run_ranks(2, lambda group, shard=shard: train(group, shard), engine="shared memory")[1] == pytest.approx(
            [-0.30860, 0.92, 1.38]
        )


def test_a_rank_loads_its_own_part_right_after_a_step_in_which_parameters_went():
    def train(group: Group) -> None:
        model, optimizer = trained(group, torch.optim.AdamW, shard="world")
        params = optimizer.param_groups[0]["params"]
        optimizer.zero_grad()
        # Within the step, at whose end it is let go: the state is divided anew in the next one.
        params[:] = [param for param in params if param is not model.last.weight]
        model(batch_of(group.rank, 3)).square().mean().backward()
        optimizer.step()
        own = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(own)
        take_steps(group, model, optimizer, range(4, 5))
        assert all(int(each["step"]) == 5 for each in optimizer.state.values())

    run_ranks(2, train, engine="shared memory")


def test_a_state_has_nothing_of_a_parameter_that_has_just_gone():
    def train(group: Group) -> int:
        stays, goes = (nn.Parameter(torch.ones(100)) for _ in range(2))
        inner = torch.optim.AdamW([("stays", stays), ("goes", goes)])
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), shard="world")
        ((stays + goes) * (group.rank + 1)).sin().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["params"][:] = [stays]
        optimizer.param_groups[0]["param_names"][:] = ["stays"]
        parts = optimizer.state_dict()["hvdlite"]["shard"]["parts"]
        assert set(parts) <= {"stays"}
        optimizer.consolidate_state_dict(to=None)
        assert list(optimizer.state_dict()["state"]) == [0]
        return len(parts)

    assert sum(run_ranks(2, train, engine="shared memory")) > 0


def test_an_optimizer_whose_parameters_have_all_gone_takes_steps():
    def train(group: Group) -> None:
        model, optimizer = trained(group, torch.optim.AdamW, steps=1, shard="world", max_norm=1.0)
        optimizer.param_groups[0]["params"].clear()
        before = bits(model)
        take_steps(group, model, optimizer, range(1, 3))
        assert bits(model) == before
        assert optimizer.grad_norm == 0.0

    run_ranks(2, train, engine="shared memory")


class PerParameter(torch.optim.SGD):
    """Divides each gradient by its norm, as LARS does: a part of a parameter would give something else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.5)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(param.grad.norm())
        super().step()
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 1, "compression": hvd.Compression.int8},
        {"groups": 2},
    ],
    ids=str,
)
def test_it_has_the_same_bits_with_other_arguments(options):
    def train(group: Group) -> None:
        whole, _ = trained(group, torch.optim.AdamW, **options)
        assert bits(trained(group, torch.optim.AdamW, shard="host", **options)[0]) == bits(whole)

    run_all(2, train, ["node", "node"])
    run_all(4, train, ["a", "a", "b", "b"], "gloo")


def run_all(size: int, train: Callable[[Group], Any], hosts: list[str], engine: str = "shared memory") -> list[Any]:
    outcomes = attempt_ranks(size, train, engine=engine, hosts=hosts)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "b"], ["a", "b", "c"]], ids=str)
def test_ranks_of_several_hosts_share_a_state_within_each_host_or_all_together(hosts):
    def train(group: Group) -> tuple[int, int]:
        whole, plain = trained(group, torch.optim.AdamW)
        sizes = []
        for shard in ("host", "world"):
            shared, optimizer = trained(group, torch.optim.AdamW, shard=shard)
            for param, expected in zip(shared.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(param, expected)
            optimizer.consolidate_state_dict()
            sizes.append(nbytes_of(optimizer) / nbytes_of(plain))
        return sizes

    sizes = run_all(len(hosts), train, hosts, "gloo")
    of_host, of_world = (sum(of) for of in zip(*sizes, strict=True))
    assert of_world < 1.1
    assert of_host == pytest.approx(2 if len(hosts) == 4 else len(hosts), rel=0.05)


def test_the_norm_of_all_parts_is_that_of_the_gradients():
    def train(group: Group) -> None:
        whole, plain = trained(group, torch.optim.SGD, max_norm=0.01)
        shared, optimizer = trained(group, torch.optim.SGD, max_norm=0.01, shard="world")
        torch.testing.assert_close(optimizer.grad_norm, plain.grad_norm)
        for param, expected in zip(shared.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param, expected)
        return optimizer.grad_norm

    norms = run_ranks(3, train, engine="shared memory")
    assert norms[0] == norms[1] == norms[2] > 0.01


SHAPES = st.one_of(
    *(st.just(shape) for shape in ((), (0, 3), (3000,))),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
)


@settings(max_examples=trials(12, 500))
@given(
    name=st.sampled_from(list(OF_TORCH)),
    shapes=st.lists(SHAPES, min_size=1, max_size=7),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    hosts=st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
    shard=st.sampled_from(["world", "host"]),
    cap_mb=st.sampled_from([0.0001, 0.003, 1.0]),
)
def test_any_parameters_have_the_same_bits_after_each_step_on_any_ranks(name, shapes, dtype, hosts, shard, cap_mb):
    if name == "Muon":
        shapes = [shape for shape in shapes if len(shape) == 2] + [(5, 7)]
    if name in ("Muon", "Adafactor"):
        # Neither can update a parameter without elements, and no optimizer can be made without parameters.
        shapes = [shape for shape in shapes if 0 not in shape] or [(5, 7)]

    def is_used(at: int, step: int, rank: int) -> bool:
        # The fused SGD of PyTorch wants all gradients in the first step.
        return name == "SGD fused" or ((at + step + rank) % 4 > 0 and (at + step) % 5 > 0)

    def train(group: Group) -> None:
        def made(**options: Any) -> tuple[list[nn.Parameter], hvd.DistributedOptimizer]:
            params = [nn.Parameter(torch.full(shape, 0.5 + at, dtype=dtype)) for at, shape in enumerate(shapes)]
            # Sums of whole numbers are the same in any order, as they come between hosts.
            return params, hvd.DistributedOptimizer(
                OF_TORCH[name](params), process_set=set_of(group), bucket_cap_mb=cap_mb, op=hvd.Sum, **options
            )

        both = [made(), made(shard=shard)]
        for step in range(3):
            for params, optimizer in both:
                optimizer.zero_grad()
                numbers = torch.Generator().manual_seed(10 * step + group.rank)
                for at, param in enumerate(params):
                    factors = torch.randint(-8, 8, param.shape, generator=numbers)
                    if is_used(at, step, group.rank):
                        (param * factors).sum().backward()
                optimizer.step()
            assert all(map(torch.equal, both[0][0], both[1][0])), step

    run_all(len(hosts), train, hosts)


# -- checkpoints


def equal_batches(group: Group, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes a step in which all ranks have the same batch, so that averages of 1, 2 and 4 ranks have the same bits."""
    optimizer.zero_grad()
    model(batch_of(0, 50)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor"])
def test_a_consolidated_state_goes_on_at_any_number_of_ranks_and_without_them(name):
    def save(group: Group) -> Any:
        model = copy.deepcopy(MODEL)
        inner = OF_TORCH[name](list(model.parameters()))
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), bucket_cap_mb=0.003, shard="world")
        for _ in range(2):
            equal_batches(group, model, optimizer)
        optimizer.consolidate_state_dict()
        return model.state_dict(), copy.deepcopy(optimizer.state_dict())

    def load(group: Group, shard: str | None) -> None:
        model = copy.deepcopy(MODEL)
        inner = OF_TORCH[name](list(model.parameters()))
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), bucket_cap_mb=0.003, shard=shard)
        model.load_state_dict(saved[0])
        # What PyTorch's own load_state_dict is given becomes the optimizer's.
        before = copy.deepcopy(saved[1])
        optimizer.load_state_dict(saved[1] if shard else before)
        equal_batches(group, model, optimizer)
        optimizer.consolidate_state_dict()
        if group.rank == 0:
            assert_equal_states(optimizer.state_dict(), expected)
        assert_equal_states(saved[1], original)
        assert bits(model) == bits(goes_on)

    results = [run_ranks(size, save, engine="shared memory")[0] for size in (1, 2, 4)]
    saved = results[0]
    original = copy.deepcopy(saved[1])
    for other in results[1:]:
        assert_equal_states(other[1], saved[1])
    goes_on = copy.deepcopy(MODEL)
    goes_on.load_state_dict(saved[0])
    plain = OF_TORCH[name](list(goes_on.parameters()))
    plain.load_state_dict(copy.deepcopy(saved[1]))
    equal_batches(None, goes_on, plain)
    expected = plain.state_dict()
    for size in (1, 2, 4):
        for shard in (None, "world", "host"):
            run_ranks(size, lambda group, shard=shard: load(group, shard), engine="shared memory")


def test_torchs_distributed_checkpoint_gets_whole_states_or_an_error_and_loads_them():
    def train(rank: int) -> None:
        def make() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = copy.deepcopy(MODEL)
            # It wants a state of every parameter that requires a gradient.
            model.unused.requires_grad_(False)
            model.nothing.requires_grad_(False)
            inner = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
            return model, hvd.DistributedOptimizer(inner, model.named_parameters(), shard="world")

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            optimizer.zero_grad()
            model(batch_of(rank, number)).square().mean().backward()
            optimizer.step()

        model, optimizer = make()
        step(model, optimizer, 0)
        with pytest.raises(ValueError, match=r"consolidate_state_dict\(to=None\) on all ranks"):
            dcp.get_optimizer_state_dict(model, optimizer)
        optimizer.consolidate_state_dict(to=None)
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
        assert saved["state"]["first.weight"]["exp_avg"].shape == (70, 33)
        other, again = make()
        # It takes a step of its own on an optimizer without state.
        dcp.set_optimizer_state_dict(other, again, saved)
        other.load_state_dict(model.state_dict())
        step(model, optimizer, 1)
        step(other, again, 1)
        assert bits(model) == bits(other)

    run_worlds(2, train)


def test_a_rank_loads_its_own_part_and_no_other():
    def train(group: Group) -> None:
        _, optimizer = trained(group, torch.optim.AdamW, shard="world")
        own = optimizer.state_dict()
        assert own["state"] == {}
        _, other = trained(group, torch.optim.AdamW, shard="host", steps=0)
        with pytest.raises(ValueError, match=r"of rank \d of 2 with shard='world'.*consolidate_state_dict"):
            other.load_state_dict(own)
        with pytest.raises(ValueError, match="one rank's part of an optimizer's state, saved with shard='world'"):
            trained(group, torch.optim.AdamW, steps=0)[1].load_state_dict(own)

    run_ranks(2, train, engine="shared memory")


def test_a_state_of_adafactor_whose_parameters_have_different_kinds_of_it_is_loaded():
    def train(group: Group) -> None:
        _, plain = trained(group, torch.optim.Adafactor)
        _, optimizer = trained(group, torch.optim.Adafactor, shard="world", steps=0)
        optimizer.load_state_dict(plain.state_dict())
        optimizer.consolidate_state_dict(to=None)
        assert_equal_states(optimizer.state_dict(), plain.state_dict())

    run_ranks(2, train, engine="shared memory")


def test_a_state_with_something_missing_or_of_another_model_is_refused():
    def train(group: Group) -> None:
        _, plain = trained(group, torch.optim.AdamW)
        _, optimizer = trained(group, torch.optim.AdamW, shard="world", steps=0)
        state = plain.state_dict()
        cut = copy.deepcopy(state)
        del cut["state"][3]["exp_avg_sq"]
        with pytest.raises(ValueError, match=r"parameter 3 has no 'exp_avg_sq'.*incomplete"):
            optimizer.load_state_dict(cut)
        wrong = copy.deepcopy(state)
        wrong["state"][3]["exp_avg"] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=r"'exp_avg' of parameter 3 has shape \(3, 3\).*another model"):
            optimizer.load_state_dict(wrong)
        assert not optimizer.state

    run_ranks(1, train)


def test_ranks_that_have_counted_different_steps_say_so_when_they_consolidate():
    def train(group: Group) -> None:
        _, optimizer = trained(group, torch.optim.AdamW, shard="world")
        for each in optimizer.state.values():
            each["step"] += group.rank
        optimizer.consolidate_state_dict()

    first, second = attempt_ranks(2, train, engine="shared memory")
    assert isinstance(first, hvd.GradientError)
    assert "different values of 'step'" in str(first)
    assert "different values of 'step'" in str(second)


def test_the_state_of_a_root_is_sent_before_the_first_step_and_refused_after_it():
    def train(rank: int) -> None:
        params = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(30))]
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(params), shard="world")
        if rank == 0:
            state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(100), "exp_avg_sq": torch.ones(100)}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
        hvd.broadcast_optimizer_state(optimizer, 0)
        params[0].sum().backward()
        optimizer.step()
        assert [int(each["step"]) for each in optimizer.state.values()] == [4]
        for consolidates in (False, True):
            if consolidates:
                # Only for the next state_dict().
                optimizer.consolidate_state_dict(to=None)
            with pytest.raises(TypeError, match="each rank has a part alone"):
                hvd.broadcast_optimizer_state(optimizer, 0)

    run_worlds(2, train)


@pytest.mark.parametrize("make", [lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.optim.Adafactor])
def test_an_elastic_state_may_be_sent_again_to_ranks_that_have_parts_of_it(make):
    def train(rank: int, shard: str | None) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(30))]
        optimizer = hvd.DistributedOptimizer(make(params), shard=shard)
        state = hvd.elastic.TorchState(optimizer=optimizer, batch=0)
        for step in range(6):
            optimizer.zero_grad()
            sum((param * (rank + step)).sin().sum() for param in params).backward()
            optimizer.step()
            if step == 2:
                state.commit()
            if step in (2, 3):
                # As where the training function is called again, after a commit and without one.
                state.sync()
            if step == 4:
                # With the state of the last sync.
                state.restore()
        if shard:
            with pytest.raises(ValueError, match=r"call state\.commit\(\) on all ranks"):
                state.save()
        return [param.detach() for param in params]

    whole = run_worlds(2, lambda rank: train(rank, None))[0]
    for got in run_worlds(2, lambda rank: train(rank, "world")):
        assert all(map(torch.equal, got, whole))


def test_each_rank_has_the_whole_state_before_hosts_change():
    def train(rank: int) -> None:
        params = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(30))]
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(params), shard="world")
        state = hvd.elastic.TorchState(optimizer=optimizer)
        sum(param.sum() for param in params).backward()
        optimizer.step()
        state.check_host_updates()
        assert "shard" in optimizer.state_dict()["hvdlite"]
        if rank == 0:
            state.on_hosts_updated(1.0, hvd.elastic.HostUpdates.ADDED)
        with pytest.raises(hvd.elastic.HostsUpdatedInterrupt):
            state.check_host_updates()
        saved = optimizer.state_dict()
        assert "hvdlite" not in saved
        assert [saved["state"][number]["exp_avg"].shape for number in range(2)] == [(100,), (30,)]

    run_worlds(2, train)


# -- what does not work


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": "node"}, "shard='node' is neither \"world\""),
        ({"shard": True}, 'shard=True is neither "world"'),
        ({"shard": "world", "op": hvd.Adasum}, "shard='world' does not work with op=hvd.Adasum"),
        ({"shard": "host", "outer": hvd.LocalSGD(4)}, "shard='host' does not work with outer="),
        ({"shard": "host", "step_on_arrival": True}, "shard='host' does not work with step_on_arrival=True"),
        ({"shard": "host", "autotune": True}, "autotune=True: it measures all-reduces, which shard='host' replaces"),
    ],
    ids=str,
)
def test_what_does_not_work_beside_it_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        run_worlds(1, lambda _: hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters()), **options))


def test_ranks_with_different_arguments_get_an_error_on_all_of_them():
    outcomes = attempt_ranks(
        2, lambda group: trained(group, torch.optim.SGD, shard=("world", None)[group.rank]), engine="shared memory"
    )
    assert all(isinstance(each, hvd.MismatchError) and "shard" in str(each) for each in outcomes), outcomes


def test_no_rank_may_join():
    def train(rank: int) -> None:
        params = [nn.Parameter(torch.ones(100))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params), shard="world")
        params[0].sum().backward()
        optimizer.step()
        with pytest.raises(hvd.GradientError, match=r"hvd\.join\(\) does not work with shard='world'"):
            hvd.join()

    run_worlds(2, train)


def test_sparse_gradients_are_refused_on_all_ranks_unless_they_are_sent_as_dense_ones():
    def train(group: Group, **options: Any) -> None:
        model = nn.Embedding(50, 8, sparse=True)
        nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), shard="world", **options)
        model(torch.tensor([group.rank, 3])).sum().backward()
        optimizer.step()
        return model.weight.detach()

    for each in attempt_ranks(2, train, engine="shared memory"):
        assert isinstance(each, hvd.GradientError)
        assert "sparse gradient, which shard='world' does not divide" in str(each)
    first, second = run_ranks(2, lambda group: train(group, sparse_as_dense=True), engine="shared memory")
    assert torch.equal(first, second)
    assert first[3, 0] == pytest.approx(0.9)
    assert first[1, 0] == pytest.approx(0.95)


def test_a_parameter_with_gaps_in_its_memory_is_refused():
    def train(group: Group) -> None:
        param = nn.Parameter(torch.ones(64, 4)[:, ::2])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), process_set=set_of(group), shard="world")
        param.sum().backward()
        optimizer.step()

    for each in attempt_ranks(2, train, engine="shared memory"):
        assert isinstance(each, hvd.GradientError)
        assert "has gaps in its memory" in str(each)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_model_that_is_converted_to_other_strides_is_an_error(make, max_norm):
    def train(group: Group) -> None:
        model = copy.deepcopy(EMBEDDED.image).to(memory_format=torch.contiguous_format)
        inner = make(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), shard="world", max_norm=max_norm)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3, 5, 5)).sum().backward()
            optimizer.step()
            model.to(memory_format=torch.channels_last)

    for each in attempt_ranks(2, train, engine="shared memory"):
        assert isinstance(each, hvd.GradientError), each
        assert "had shape (16, 3, 3, 3) and strides (27, 9, 3, 1) when the optimizer was wrapped" in str(each)


def test_an_error_of_one_ranks_own_step_is_one_of_all_ranks():
    def train(group: Group) -> None:
        params = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(100, dtype=torch.complex64))]
        inner = torch.optim.Adafactor(params)
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), shard="world")
        sum(param.abs().sum() for param in params).backward()
        optimizer.step()

    told = [str(each) for each in attempt_ranks(2, train, engine="shared memory")]
    assert sum("Adafactor does not support complex parameters" in each for each in told) == 2, told
    assert sum("failed to update its part of" in each for each in told) == 1, told


def test_what_cannot_be_sent_is_an_error_of_all_ranks():
    def train(group: Group) -> None:
        _, optimizer = trained(group, torch.optim.AdamW, shard="world")
        if group.rank == 1:
            next(iter(optimizer.state.values()))["a lock"] = threading.Lock()
        optimizer.consolidate_state_dict()

    told = [str(each) for each in attempt_ranks(2, train, engine="shared memory")]
    assert all("a lock" in each or "lock" in each for each in told), told


def test_what_one_host_cannot_send_is_an_error_of_all_hosts():
    def train(group: Group) -> None:
        _, optimizer = trained(group, torch.optim.AdamW, shard="host")
        if group.rank == 1:
            next(iter(optimizer.state.values()))["a lock"] = threading.Lock()
        optimizer.consolidate_state_dict()

    told = [str(each) for each in attempt_ranks(4, train, engine="gloo", hosts=["a", "a", "b", "b"])]
    assert all("cannot be pickled" in each for each in told), told


def test_a_rank_without_a_part_of_the_state_says_so_in_its_own():
    def train(group: Group) -> None:
        def make() -> hvd.DistributedOptimizer:
            params = [nn.Parameter(torch.ones(3))]
            return hvd.DistributedOptimizer(torch.optim.AdamW(params), process_set=set_of(group), shard="world")

        def step(optimizer: hvd.DistributedOptimizer) -> float:
            (param,) = optimizer.param_groups[0]["params"]
            (param * (1 + group.rank)).sin().sum().backward()
            optimizer.step()
            return param.sum().item()

        optimizer, again = make(), make()
        step(optimizer)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            again.param_groups[0]["params"][0].copy_(optimizer.param_groups[0]["params"][0])
        assert step(again) == step(optimizer)

    run_ranks(2, train, engine="shared memory")


def test_a_state_that_was_only_asked_for_changes_nothing():
    def train(group: Group) -> None:
        model, optimizer = trained(group, torch.optim.AdamW, shard="world", steps=2)
        assert [optimizer.state[param] for param in model.parameters()]
        assert "shard" in optimizer.state_dict()["hvdlite"]
        whole, _ = trained(group, torch.optim.AdamW)
        take_steps(group, model, optimizer, range(2, 3))
        assert bits(model) == bits(whole)

    run_ranks(2, train, engine="shared memory")


def test_gradients_that_the_program_sets_on_what_is_frozen_are_used_on_all_ranks():
    def train(group: Group, **options: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(40), requires_grad=False), nn.Parameter(torch.ones(50))]
        optimizer = hvd.DistributedOptimizer(
            PerParameter(params), process_set=set_of(group), bucket_cap_mb=0.0001, **options
        )
        for _ in range(2):
            params[1].sum().backward()
            optimizer.synchronize()
            params[0].grad = torch.full((40,), 2.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return [param.detach() for param in params]

    whole = run_ranks(2, train, engine="shared memory")[0]
    for got in run_ranks(2, lambda group: train(group, shard="world"), engine="shared memory"):
        assert all(map(torch.equal, got, whole))


def test_a_checkpoint_is_the_state_also_of_a_parameter_that_comes_back_later():
    def train(group: Group, **options: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(60))]
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(params), process_set=set_of(group), **options)
        own = optimizer.param_groups[0]["params"]

        def step() -> None:
            optimizer.zero_grad()
            sum((param * (group.rank + 1)).sin().sum() for param in params).backward()
            optimizer.step()

        step()
        own[:] = params[:1]
        step()
        params[1].grad = None
        optimizer.consolidate_state_dict(to=None)
        saved = copy.deepcopy(optimizer.state_dict())
        step()
        optimizer.load_state_dict(saved)
        own.append(params[1])
        params[1].grad = None
        step()
        return [param.detach() for param in params]

    shared = run_ranks(2, lambda group: train(group, shard="world"), engine="shared memory")
    assert all(map(torch.equal, *shared))


def test_an_optimizer_that_keeps_state_elsewhere_is_refused():
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "own": 1}

    with pytest.raises(ValueError, match=r"shard='world': Own has its own state_dict"):
        run_worlds(1, lambda _: hvd.DistributedOptimizer(Own(MODEL.parameters()), shard="world"))


def test_an_optimizer_in_parts_cannot_be_copied():
    def train(group: Group) -> None:
        _, optimizer = trained(group, torch.optim.SGD, shard="world", steps=0)
        with pytest.raises(TypeError, match="with shard= cannot be pickled or copied"):
            copy.deepcopy(optimizer)

    run_ranks(1, train)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (torch.optim.AdamW, [3]),
        (torch.optim.AdamW, [100000, 1, 2]),
        (torch.optim.AdamW, [0, 5]),
        (torch.optim.Adafactor, [100000, 1, 2]),
    ],
)
def test_there_may_be_fewer_parameters_than_ranks_or_one_that_is_much_larger(sizes, make):
    def train(group: Group, **options: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = hvd.DistributedOptimizer(make(params), process_set=set_of(group), **options)
        for step in range(2):
            optimizer.zero_grad()
            sum((param * (group.rank + step + 1)).sin().sum() for param in params).backward()
            optimizer.step()
        return [param.detach() for param in params]

    whole = run_ranks(4, train, engine="shared memory")
    for got, expected in zip(
        run_ranks(4, lambda g: train(g, shard="world"), engine="shared memory"), whole, strict=True
    ):
        assert all(map(torch.equal, got, expected))
