"""Calls everything that a program calls, with tensors that name their device and dtype, and checks the values.

`run_all` is for tests of what holds for all of it at once, such as PyTorch's defaults. All ranks call it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.elastic import ElasticSampler, TorchState
from hvdlite.runtime.world import current_world

F32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


def ones(*shape: int, dtype: torch.dtype = torch.float32, times: float = 1) -> Tensor:
    return torch.full(shape, times, dtype=dtype, device="cpu")


def is_close(found: Tensor, expected: float, tolerance: float = 1e-6) -> bool:
    assert found.device.type == "cpu", found.device
    return bool((found.double() - expected).abs().max() <= tolerance)


def collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean, total = (size - 1) / 2, size * (size - 1) / 2
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
    for dtype in dtypes:
        own = ones(5, dtype=dtype, times=rank)
        assert is_close(hvd.allreduce(own, op=hvd.Sum), total)
        if dtype.is_floating_point:
            assert is_close(hvd.allreduce(own, prescale_factor=2.0, postscale_factor=0.5), mean)
        for op, expected in ((hvd.Min, 0), (hvd.Max, size - 1), (hvd.Product, 0)):
            assert is_close(hvd.allreduce(own, op=op), expected)
        assert is_close(hvd.allgather(own).view(size, 5)[rank], rank)
        assert is_close(hvd.broadcast(own, 1), 1)
        assert is_close(hvd.reducescatter(ones(size, 3, dtype=dtype), op=hvd.Sum), size)
        assert is_close(hvd.alltoall(ones(size, dtype=dtype)), 1)
    assert is_close(hvd.allreduce(ones(5, times=rank), compression=hvd.Compression.fp16), mean)
    assert is_close(hvd.allreduce(ones(5), op=hvd.Adasum), 1)
    assert is_close(hvd.allreduce(ones(3, dtype=torch.int64, times=rank)), int(mean))
    for each in hvd.grouped_allreduce([ones(2), ones(3, dtype=torch.float64)], op=hvd.Sum):
        assert is_close(each, size)
    # Ragged: rank r has r + 1 rows, and sends r + 1 rows to each.
    assert len(hvd.allgather(ones(rank + 1, 2))) == size * (size + 1) // 2
    for each in hvd.grouped_allgather([ones(rank + 1), ones(2)]):
        assert is_close(each, 1)
    rows, received = hvd.alltoall(ones((rank + 1) * size, 2), splits=[rank + 1] * size)
    assert received.tolist() == list(range(1, size + 1))
    assert len(rows) == sum(received.tolist())
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32, device="cpu")
    assert len(hvd.alltoall(ones((rank + 1) * size), splits)[0]) == size * (size + 1) // 2
    assert len(hvd.reducescatter(ones(size + 1), op=hvd.Sum)) == (2 if rank == 0 else 1)
    for each in hvd.grouped_reducescatter([ones(size), ones(size)]):
        assert is_close(each, 1)
    in_place = ones(4, times=rank)
    assert hvd.allreduce_(in_place) is in_place
    assert is_close(in_place, mean)
    hvd.grouped_allreduce_([in_place])
    assert is_close(hvd.broadcast_(in_place, 0), mean)
    assert is_close(hvd.synchronize(hvd.allreduce_async(ones(2))), 1)
    indices = torch.tensor([[0, rank]], dtype=torch.int64, device="cpu")
    sparse = torch.sparse_coo_tensor(indices, ones(2, 3), (size, 3), **F32)
    dense = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
    assert is_close(dense.sum(), 6 * size)
    values = ones(3).requires_grad_()
    hvd.allreduce(values, op=hvd.Sum).sum().backward()
    hvd.allgather(values).sum().backward()
    hvd.broadcast(values, 0).sum().backward()
    assert is_close(values.grad, size + 1 + (rank == 0))
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object("x" * rank) == ["x" * each for each in range(size)]
    hvd.barrier()
    odd = hvd.add_process_set([1])
    if rank == 1:
        assert is_close(hvd.allreduce(ones(2), process_set=odd), 1)
    hvd.remove_process_set(odd)
    assert len(hvd.stragglers()) in (0, size)


def model_of(kind: str = "plain") -> nn.Module:
    generator = torch.Generator(device="cpu").manual_seed(1)
    if kind == "sparse":
        model: nn.Module = nn.Sequential(nn.Embedding(6, 4, sparse=True, **F32), nn.Linear(4, 1, **F32))
    else:
        model = nn.Sequential(nn.Linear(4, 3, **F32), nn.Tanh(), nn.Linear(3, 1, **F32))
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=generator)
    return model


def batch(kind: str, step: int, rank: int, size: int) -> Tensor:
    if kind == "sparse":
        return torch.tensor([step % 6, 0], dtype=torch.int64, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(step)
    return torch.randn(4 * size, 4, generator=generator, **F32)[rank::size]


@contextlib.contextmanager
def on_hosts(*names: str) -> Any:
    """Has the ranks of the world take themselves to be on these hosts."""
    group = current_world().group
    earlier, group.hosts = group.hosts, names
    try:
        yield
    finally:
        group.hosts = earlier


def train(kind: str, *, weigh: bool = False, tolerance: float | None = 1e-6, **options: Any) -> float:
    """Trains three steps, and compares with one process on the whole batch unless ``tolerance`` is None.

    Returns the greatest difference.
    """
    rank, size = hvd.rank(), hvd.size()
    model = model_of(kind)
    truth = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model.named_parameters(), **options
    )
    alone = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(kind, step, rank, size)).square().mean()
        (optimizer.weighted(loss, 4) if weigh else loss).backward()
        optimizer.step()
        alone.zero_grad()
        torch.stack([truth(batch(kind, step, each, size)).square().mean() for each in range(size)]).mean().backward()
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(truth.parameters(), options["max_norm"])
        alone.step()
    difference = 0.0
    with optimizer.averaged():
        for found, expected in zip(model.parameters(), truth.parameters(), strict=True):
            all_found = hvd.allgather(found.detach().reshape(1, -1))
            assert torch.equal(all_found[0], all_found[-1])
            difference = max(difference, float((found.detach() - expected.detach()).abs().max()))
            if tolerance is not None:
                assert is_close(found.detach() - expected.detach(), 0, tolerance), options
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.consolidate_state_dict(to=0)
    optimizer.load_state_dict(saved)
    optimizer.close()
    return difference


class Halved(hvd.Compressor):
    """A compression of the program's own."""

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer.half()

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire)


def optimizers() -> None:
    compression = hvd.Compression
    train("plain")
    train("plain", weigh=True)
    train("plain", compression=compression.fp16, tolerance=1e-2)
    train("plain", compression=compression.bf16, tolerance=3e-2)
    train("plain", compression=Halved(), tolerance=1e-2)
    train("plain", op=hvd.Adasum, tolerance=None)
    train("plain", max_norm=0.1)
    train("plain", autotune=True)
    train("plain", step_on_arrival=True, bucket_cap_mb=1e-5)
    train("plain", gradient_predivide_factor=2.0, groups=2)
    train("sparse")
    train("sparse", sparse_as_dense=True)
    with on_hosts(*(f"host{rank}" for rank in range(hvd.size()))):
        for each in (compression.int8, compression.int4, compression.topk(), compression.powersgd(start_step=1)):
            train("plain", compression=each, tolerance=None)
            train("sparse", compression=each, tolerance=None)
        train("plain", outer=hvd.LocalSGD(2), tolerance=None)
        train("plain", outer=hvd.DiLoCo(2, compression=compression.topk()), tolerance=None)
        train("plain", op=hvd.Adasum, tolerance=None)


def batch_norm() -> None:
    rank, size = hvd.rank(), hvd.size()
    data = torch.arange(size * 6, **F32).view(size * 3, 2)
    layer, truth = hvd.SyncBatchNorm(2, **F32), nn.BatchNorm1d(2, **F32)
    found, expected = layer(data[rank * 3 : rank * 3 + 3]), truth(data)
    assert is_close(found.detach() - expected.detach()[rank * 3 : rank * 3 + 3], 0)
    found.sum().backward()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2, **F32)))
    converted.eval()
    assert is_close(converted(data).detach() - nn.BatchNorm1d(2, **F32).eval()(data).detach(), 0)


def states() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    sampler = ElasticSampler(range(8))
    assert len(list(sampler)) == -(-8 // size)
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=rank, rate=ones(1, times=rank))
    state.sync()
    assert state.epoch == 0
    assert is_close(state.rate, 0)
    sampler.record_batch(0, 1)
    state.commit()
    state.restore()


def uneven(folder: Path) -> None:
    hvd.start_timeline(folder / "timeline.json")
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(1 + (hvd.rank() == 0)):
        optimizer.zero_grad()
        model(batch("plain", step, 0, 1)).square().mean().backward()
        optimizer.step()
    hvd.join()
    hvd.stop_timeline()


def run_all(folder: Path) -> None:
    """Makes all calls; ``folder`` is for the timeline's file."""
    calls: list[Callable[[], None]] = [collectives, optimizers, batch_norm, states, lambda: uneven(folder)]
    if not current_world().environment.check:
        calls.pop()  # hvd.join() is refused
    if current_world().survival is not None:
        # The others are refused.
        calls = [collectives, lambda: train("plain"), lambda: train("sparse"), batch_norm, states]
    for call in calls:
        call()
