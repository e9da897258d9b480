"""No call from backward to step waits for the GPU; a CUDA graph captures a whole step. One rank, in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import set_of
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.engine import EngineFactory, SingleRankFactory
from hvdlite.comm.gloo import ConnectingRanks, InitTimeout
from hvdlite.comm.group import Group
from hvdlite.comm.hierarchy import HierarchicalEngineFactory, HostGroups
from hvdlite.comm.torch_engine import TorchEngineFactory
from hvdlite.signing import Signer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GPU = torch.device("cuda", 0)


def alone() -> ConnectingRanks:
    return ConnectingRanks(dist.HashStore(), Signer(b"alone"), 0, ("rank 0",), InitTimeout(timedelta(seconds=60)))


def over_nccl() -> EngineFactory:
    return TorchEngineFactory("cpu:gloo,cuda:nccl", alone())


class OneRankOfEach(TorchEngineFactory):
    """Makes NCCL engines also for both levels of a hierarchy of one host with one rank."""

    def among(self, places: object, place: int, token: str, /) -> EngineFactory:
        return over_nccl()


def over_a_hierarchy() -> EngineFactory:
    flat = OneRankOfEach("cpu:gloo,cuda:nccl", alone())
    return HierarchicalEngineFactory(flat, None, HostGroups((0,), (0,), ((0,),)), 0, "test", {"cuda"})


CHANNELS = [SingleRankFactory, over_nccl, over_a_hierarchy]


class Net(nn.Module):
    """Many small layers, and a large one that is reduced in two levels; one is frozen, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.never = nn.Linear(2, 2)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.wide = nn.Linear(256, 333)
        self.small = nn.Sequential(*[nn.Sequential(nn.Linear(333, 333), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(333, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(self.frozen(x).unsqueeze(1)).flatten(1))
        return self.head(self.small(torch.tanh(self.wide(x))))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, capturable=True)


def wrapped(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], engine_factory: EngineFactory, compression: object
) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        make(list(model.parameters())),
        model.named_parameters(),
        compression=compression,
        bucket_cap_mb=0.5,
        process_set=set_of(Group(engine_factory, 0, 1, ["here"], signer=Signer(b"alone"))),
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def data(steps: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(steps, 16, 64, dtype=torch.float64, device=GPU), torch.randint(4, (steps, 16), device=GPU)


@pytest.mark.parametrize("make_engine_factory", CHANNELS)
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_from_backward_to_step_nothing_waits_for_the_gpu(make_engine_factory, compression, set_to_none):
    model, (x, y) = Net().to(GPU, torch.float64), data(6)
    optimizer = wrapped(model, sgd, make_engine_factory(), compression)
    for step in range(6):
        optimizer.zero_grad(set_to_none)
        loss = loss_of(model, x[step], y[step])
        # The first steps allocate memory, compile kernels and connect the ranks.
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_program_runs_ahead_of_the_gpu():
    """Backward and step return while the GPU is still busy with earlier work."""
    model, (x, y) = Net().to(GPU, torch.float64), data(4)
    optimizer = wrapped(model, sgd, over_nccl(), hvd.Compression.fp16)
    busy = torch.full((8192, 8192), 1 / 8192, device=GPU)
    for step in range(4):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        for _ in range(40):
            torch.mm(busy, busy)
        before = torch.cuda.Event()
        before.record()
        loss_of(model, x[step], y[step]).backward()
        optimizer.step()
        is_ahead = not before.query()
    assert is_ahead


@pytest.mark.parametrize("make_engine_factory", CHANNELS)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_captured_step_replays_as_training_goes_on(make_engine_factory, make, compression, set_to_none):
    start, (x, y) = Net().to(GPU, torch.float64), data(5)
    eager, graphed = copy.deepcopy(start), copy.deepcopy(start)
    twin = wrapped(eager, make, SingleRankFactory(), compression)
    optimizer = wrapped(graphed, make, make_engine_factory(), compression)
    static_x, static_y = x[0].clone(), y[0].clone()

    def step(model: nn.Module, its_optimizer: object) -> Tensor:
        its_optimizer.zero_grad(set_to_none)
        loss = loss_of(model, static_x, static_y)
        loss.backward()
        its_optimizer.step()
        return loss

    # As in PyTorch's notes on CUDA graphs.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(graphed, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(eager, twin)
    optimizer.zero_grad(set_to_none)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(graphed, optimizer)
    for number in range(5):
        static_x.copy_(x[number])
        static_y.copy_(y[number])
        graph.replay()
        expected = step(eager, twin)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    for got, wanted in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
        assert (got.grad is None) == (wanted.grad is None)
    # Goes on without the graph.
    torch.testing.assert_close(step(graphed, optimizer), step(eager, twin), rtol=0, atol=1e-9)


def test_two_levels_of_one_rank_leave_every_tensor_what_it_is():
    engine = over_a_hierarchy().open()
    works = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32):
        for numel in (1, 1000, 2**15 + 1, 2**20 + 7):
            values = torch.randint(0, 100, (numel,), device=GPU).to(dtype)
            tensor = values.clone()
            works.append((tensor, values, engine.allreduce([tensor], dist.AllreduceOptions())))
    for tensor, values, work in works:
        done = []
        work.get_future().add_done_callback(lambda _, done=done: done.append(True))
        work.wait()
        assert torch.equal(tensor, values)
        torch.cuda.synchronize()
        assert work.is_completed()
        assert done == [True]


def test_the_program_of_a_hierarchical_all_reduce_goes_on_at_once():
    engine = over_a_hierarchy().open()
    tensor = torch.ones(2**22, device=GPU)
    engine.allreduce([tensor], dist.AllreduceOptions()).wait()
    busy = torch.full((8192, 8192), 1 / 8192, device=GPU)
    torch.cuda.synchronize()
    for _ in range(40):
        torch.mm(busy, busy)
    tensor.fill_(2.0)
    work = engine.allreduce([tensor], dist.AllreduceOptions())
    assert not work.is_completed()
    # Neither the program nor its stream waits before it is asked to.
    after = torch.full((4,), 3.0, device=GPU)
    work.wait()
    tensor.add_(1.0)
    assert tensor.eq(3).all()
    assert after.eq(3).all()
