"""Process sets and SyncBatchNorm with CUDA tensors: ranks that share a GPU over gloo, and one rank over NCCL."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gpu.test_cuda import RANKS, SHARING, run

from hvdlite.comm.gloo import ConnectingRanks, InitTimeout
from hvdlite.comm.torch_engine import TorchEngineFactory
from hvdlite.signing import Signer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_a_sets_engine_factory_carry_cpu_and_cuda_tensors():
    ranks = ConnectingRanks(dist.HashStore(), Signer(b"alone"), 0, ("rank 0",), InitTimeout(timedelta(seconds=20)))
    engine_factory = TorchEngineFactory("cpu:gloo,cuda:nccl", ranks)
    engines = [engine_factory.open() for _ in range(2)]
    for engine in engines:
        for device in ("cpu", "cuda"):
            tensor = torch.ones(3, device=device)
            engine.allreduce([tensor], dist.AllreduceOptions()).wait()
            assert tensor.tolist() == [1, 1, 1]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("share", SHARING)
def test_collectives_and_optimizers_in_sets_that_share_a_rank(tmp_path, share):
    run(
        tmp_path,
        3,
        """
        hvd.init(process_sets=[first := hvd.ProcessSet([0, 2]), second := hvd.ProcessSet([1, 2])])
        for each in (first, second):
            weight = nn.Parameter(torch.zeros(3, device=device))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=each)
            (weight.sum() * hvd.rank()).backward()
            optimizer.step()
            mean = sum(each.ranks) / 2 if each.included() else hvd.rank()
            assert weight.eq(-mean).all(), weight
            if each.included():
                mine = torch.full((2,), float(hvd.rank()), device=device)
                assert hvd.allgather(mine, process_set=each).tolist() == [float(r) for r in each.ranks for _ in "ab"]
                assert hvd.broadcast(mine, 2, process_set=each).eq(2).all()
        hvd.barrier()
        """,
        share,
    )


@pytest.mark.parametrize(("size", "share"), RANKS)
def test_sync_batch_norm_is_one_process_on_the_whole_batch(tmp_path, size, share):
    run(
        tmp_path,
        size,
        """
        hvd.init()
        sizes = [7] if hvd.size() == 1 else [2, 5]
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 2e-3)):
            for layout in (torch.contiguous_format, torch.channels_last):
                torch.manual_seed(0)
                x, grad = (torch.randn(7, 3, 4, 5, device=device).to(dtype) for _ in range(2))
                plain = nn.BatchNorm2d(3).to(device, torch.float64)
                wide = x.double().clone().requires_grad_(True)
                wanted = plain(wide)
                wanted.backward(grad.double())
                layer = nn.BatchNorm2d(3).to(device, torch.float64 if dtype is torch.float64 else torch.float32)
                layer = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
                mine = x.split(sizes)[hvd.rank()].to(memory_format=layout).clone().requires_grad_(True)
                # On a stream of its own, which the operations have to follow.
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = layer(mine)
                    y.backward(grad.split(sizes)[hvd.rank()])
                torch.cuda.current_stream().wait_stream(stream)
                assert y.dtype == mine.grad.dtype == dtype and y.is_contiguous(memory_format=layout)
                for got, whole in ((y, wanted), (mine.grad, wide.grad)):
                    torch.testing.assert_close(
                        got.double(), whole.split(sizes)[hvd.rank()].double(), rtol=tolerance, atol=tolerance)
                for got, whole in zip(layer.buffers(), plain.buffers(), strict=True):
                    torch.testing.assert_close(got.double(), whole.double(), rtol=2e-6, atol=2e-6)
                total = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
                torch.testing.assert_close(total.double(), plain.weight.grad, rtol=1e-4, atol=1e-4)
        layer = hvd.SyncBatchNorm(4).to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            out = layer(nn.Linear(6, 4).to(device)(torch.randn(2 + hvd.rank(), 6, device=device)))
        assert out.dtype == torch.float16 and out.is_cuda
        out.float().square().sum().backward()
        empty = torch.empty(0 if hvd.rank() else 3, 4, device=device, requires_grad=True)
        layer(empty).sum().backward()
        assert empty.grad.shape == empty.shape
        """,
        share,
    )
