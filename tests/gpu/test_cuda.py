"""hvdlite with CUDA tensors: one rank, and several that share a GPU, over NCCL and over gloo. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import hvdlite as hvd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

PRELUDE = """
import copy, os, torch, torch.nn as nn, torch.distributed as dist
import hvdlite as hvd

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
device = torch.device("cuda", 0)

def share_one_gpu_over_gloo():
    store = dist.FileStore(os.environ["HVDLITE_JOB_DIR"] + "/own", int(os.environ["HVDLITE_SIZE"]))
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", store=store, rank=int(os.environ["HVDLITE_RANK"]),
        world_size=int(os.environ["HVDLITE_SIZE"]),
    )

def share_one_gpu_over_nccl():
    # NCCL refuses two ranks that are on one GPU of the same host: each calls itself a host of its own.
    os.environ["NCCL_HOSTID"] = "rank " + os.environ["HVDLITE_RANK"]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
    def forward(self, x, part):
        x = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(torch.tanh(self.sometimes(x)) if part % 2 else x)

def loss_of(model, x, y, part, parts):
    return nn.functional.cross_entropy(model(x.chunk(parts)[part], part), y.chunk(parts)[part])

torch.manual_seed(0)
start = Net().double().to(device)
x = torch.randn(5, 8, 3, 6, 6, dtype=torch.float64, device=device)
y = torch.randint(4, (5, 8), device=device)

def alone(parts):
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        torch.stack([loss_of(model, x[step], y[step], part, parts) for part in range(parts)]).mean().backward()
        optimizer.step()
    return model

def together(**options):
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.001, **options)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, x[step], y[step], hvd.rank(), hvd.size()).backward()
        optimizer.step()
    return model

def same(a, b, tolerance=1e-10):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
        assert (p.grad is None) == (q.grad is None)
"""

SHARING = ["share_one_gpu_over_gloo()", "share_one_gpu_over_nccl()"]
# How many ranks, and how they share a GPU.
RANKS = [(1, ""), *((2, share) for share in SHARING)]


def run(tmp_path, size: int, body: str, share: str = "") -> None:
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + share + "\n" + textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite_launcher", "-np", str(size), sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_rank_over_nccl_trains_as_without_hvdlite(tmp_path):
    run(
        tmp_path,
        1,
        """
        hvd.init()
        assert "nccl" in str(dist.get_backend_config())
        same(together(), alone(1))
        same(together(compression=hvd.Compression.fp16), alone(1), 0.05)
        """,
    )


@pytest.mark.parametrize("share", SHARING)
def test_two_ranks_on_one_gpu_match_one_process_on_the_whole_batch(tmp_path, share):
    run(
        tmp_path,
        2,
        """
        hvd.init()
        same(together(), alone(2))
        same(together(gradient_predivide_factor=2.0), alone(2))
        same(together(compression=hvd.Compression.bf16), alone(2), 0.1)
        """,
        share,
    )


@pytest.mark.parametrize(("size", "share"), RANKS)
def test_autocast_and_grad_scaler_skip_the_same_steps_on_every_rank(tmp_path, size, share):
    run(
        tmp_path,
        size,
        """
        hvd.init()
        model = nn.Linear(6, 4).to(device)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict())
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(2, 6, device=device)).float().square().mean()
            if step == 2 and hvd.rank() == hvd.size() - 1: loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        weights = hvd.allgather_object(model.weight.detach().cpu())
        assert all(torch.equal(w, weights[0]) for w in weights)
        """,
        share,
    )


@pytest.mark.parametrize("share", SHARING)
def test_sparse_gradients_are_gathered_on_the_gpu(tmp_path, share):
    run(
        tmp_path,
        2,
        """
        hvd.init()
        torch.manual_seed(0)
        table = nn.Embedding(7, 3, sparse=True).double().to(device)
        twin = copy.deepcopy(table)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        words = [torch.tensor([1, 2], device=device), torch.tensor([2, 5], device=device)]
        for step in range(3):
            optimizer.zero_grad(); plain.zero_grad()
            table(words[hvd.rank()]).square().sum().backward()
            (sum(twin(w).square().sum() for w in words) / 2).backward()
            optimizer.step(); plain.step()
        same(table, twin)
        """,
        share,
    )


EVERY_COLLECTIVE = """
rank, size = hvd.rank(), hvd.size()
dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64, torch.complex128, torch.bool]

def sample(rank, dtype, shape):
    return ((torch.arange(torch.Size(shape).numel()) + rank) % 3 + 1).reshape(shape).to(dtype)

def check(got, expected):
    assert got.is_cuda and got.dtype == expected.dtype and torch.equal(got.cpu(), expected), (got, expected)

for dtype in dtypes:
    for shape in [(), (0,), (4,), (2, 3), (2, 0), (3, 1, 2)]:
        mine = sample(rank, dtype, shape).to(device)
        every = [sample(r, dtype, shape) for r in range(size)]
        total = sum(every[1:], every[0]) if dtype != torch.bool else every[0] | every[-1]
        name = f"{dtype}{shape}"
        handle = hvd.allreduce_async(mine, name=name, op=hvd.Sum)
        check(hvd.broadcast(mine, size - 1), every[-1])
        check(hvd.allgather(mine, name), torch.cat([part.reshape(1) if not shape else part for part in every]))
        check(hvd.synchronize(handle), total)
        pair = hvd.grouped_allreduce([mine, mine.float() if not dtype.is_complex else mine], op=hvd.Product)
        check(pair[0], torch.stack(every).prod(0).to(dtype))
        if not dtype.is_complex:
            check(hvd.allreduce(mine, op=hvd.Max), torch.stack(every).amax(0))
        if shape:
            rows = [len(range(r, shape[0], size)) for r in range(size)]
            check(hvd.reducescatter(mine, op=hvd.Sum), total.split(rows)[rank])
            got, received = hvd.alltoall(mine, torch.tensor(rows, dtype=torch.int32, device=device))
            assert received.is_cuda and received.tolist() == [rows[rank]] * size
            check(got, torch.cat([part.split(rows)[rank] for part in every]))
        check(hvd.allreduce_(mine, op=hvd.Min) if not dtype.is_complex else mine,
              torch.stack(every).amin(0) if not dtype.is_complex else every[rank])

# On streams of the program's own, with work before and after that the operation has to wait for, and be waited for.
with torch.cuda.stream(torch.cuda.Stream()):
    slow = torch.full((4096, 4096), 1 / 4096, device=device)
    for _ in range(20):
        slow = slow @ slow
    handle = hvd.allreduce_async(slow, op=hvd.Sum)
with torch.cuda.stream(torch.cuda.Stream()):
    torch.testing.assert_close(hvd.synchronize(handle).sum().item(), size * 4096.0)

a = torch.tensor([1.0, 0.0, 2.0] if rank == 0 else [0.0, 1.0, 2.0], device=device)
expected = torch.tensor([[1.0, 0.0, 2.0], [0.6, 0.6, 2.4]][size - 1])
torch.testing.assert_close(hvd.allreduce(a, op=hvd.Adasum).cpu(), expected)
x = torch.tensor([rank + 1.0], device=device, requires_grad=True)
(hvd.allgather(x).sum() * (rank + 1) + hvd.allreduce(x, op=hvd.Product).sum()).backward()
# As in Horovod: this rank's part of the gradients' average, and the product of the gradients.
assert x.grad.tolist() == [(1 + size) / 2 + 1]
table = torch.eye(3, device=device).to_sparse()
assert hvd.sparse_allreduce_async(table, "table", hvd.Sum)().to_dense().equal(torch.eye(3, device=device) * size)
hvd.barrier()
"""


@pytest.mark.parametrize(("size", "share"), RANKS)
def test_every_collective_takes_gpu_tensors(tmp_path, size, share):
    run(tmp_path, size, "hvd.init()" + EVERY_COLLECTIVE, share)


def test_the_build_questions_name_the_nccl_that_torch_has():
    assert hvd.cuda_built() or hvd.rocm_built()
    assert hvd.nccl_built() > 20000


TIMELINE = """
import json
hvd.start_timeline(os.environ["HVDLITE_JOB_DIR"] + "/t.json")
together()
hvd.stop_timeline()
events = json.load(open(os.environ["HVDLITE_JOB_DIR"] + "/t.json"))["traceEvents"]
for rank in range(hvd.size()):
    of_rank = {name: [event for event in events if event["pid"] == rank and event["name"] == name]
               for name in ("ready", "wire", "all-reduce", "wait", "synchronize")}
    assert len(of_rank["synchronize"]) == 5
    counts = {len(of_rank[name]) for name in ("ready", "wire", "all-reduce", "wait")}
    assert len(counts) == 1 and counts.pop() >= 5
    assert all(event["dur"] > 0 for event in of_rank["all-reduce"])
"""


@pytest.mark.parametrize("share", SHARING)
def test_a_timeline_has_every_bucket(tmp_path, share):
    run(tmp_path, 2, "hvd.init()" + TIMELINE, share)


ADASUM = """
model = together(op=hvd.Adasum)
assert not any(torch.equal(p, q) for p, q in zip(model.head.parameters(), start.head.parameters()))
for param in model.parameters():
    first, *others = hvd.allgather(param.detach().unsqueeze(0))
    assert all(torch.equal(first, other) for other in others)
"""


@pytest.mark.parametrize("share", SHARING)
def test_adasum_leaves_the_same_parameters_on_two_ranks_that_share_a_gpu(tmp_path, share):
    run(tmp_path, 2, "hvd.init()" + ADASUM, share)


TWO_HOSTS = """
# As on two hosts with half of the ranks each.
rank, per_host = int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"]) // 2
os.environ.update(
    HVDLITE_HOST="ab"[rank // per_host], HVDLITE_LOCAL_RANK=str(rank % per_host), HVDLITE_LOCAL_SIZE=str(per_host),
    HVDLITE_CROSS_RANK=str(rank // per_host), HVDLITE_CROSS_SIZE="2",
)
hvd.init()
def equal_on_all_ranks(model):
    for param in model.parameters():
        first, *others = hvd.allgather(param.detach().unsqueeze(0))
        assert all(torch.equal(first, other) for other in others)
    return model
"""


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize("size", [2, 4])
def test_compressions_for_slow_links_on_two_hosts(tmp_path, size, share):
    body = """
    exact = alone(hvd.size())
    same(together(), exact)
    rough = hvd.Compression.int4, hvd.Compression.topk(0.2), hvd.Compression.powersgd(start_step=1, min_ratio=1.0)
    for compression, tolerance in ((hvd.Compression.int8, 0.05), *((each, 0.2) for each in rough)):
        same(equal_on_all_ranks(together(compression=compression)), exact, tolerance)
    """
    run(tmp_path, size, TWO_HOSTS + textwrap.dedent(body), share)


@pytest.mark.parametrize("share", SHARING)
def test_averages_in_two_levels_are_those_of_one_process_on_the_whole_batch(tmp_path, share):
    body = """
    exact = alone(4)
    same(together(), exact)
    same(together(compression=hvd.Compression.fp16), exact, 0.05)
    big = torch.randint(0, 100, (2**18 + 5,), device=device).float() + hvd.rank()
    total = hvd.allreduce(big, op=hvd.Sum)
    assert torch.equal(total, 4 * big + 6 - 4 * hvd.rank())
    """
    levels = 'os.environ["HVDLITE_HIERARCHICAL_ALLREDUCE"] = "1"'
    run(tmp_path, 4, levels + TWO_HOSTS + textwrap.dedent(body), share)


@pytest.mark.parametrize("share", SHARING)
def test_outer_steps_end_with_equal_parameters_on_all_ranks(tmp_path, share):
    body = """
    in_int4 = hvd.DiLoCo(sync_every=2, compression=hvd.Compression.int4)
    for outer in (hvd.LocalSGD(sync_every=2), hvd.DiLoCo(sync_every=2), in_int4):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), outer=outer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, x[step], y[step], hvd.rank(), hvd.size()).backward()
            optimizer.step()
        equal_on_all_ranks(model)
    """
    run(tmp_path, 2, TWO_HOSTS + textwrap.dedent(body), share)


@pytest.mark.parametrize("share", SHARING)
def test_weights_and_clipping_are_those_of_one_process_on_the_whole_batch(tmp_path, share):
    body = """
    hvd.init()
    model, twin = copy.deepcopy(start), copy.deepcopy(start)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), max_norm=0.01, bucket_cap_mb=0.001)
    own = [slice(0, 3), slice(3, 8)][hvd.rank()]
    for step in range(4):
        optimizer.zero_grad(); plain.zero_grad()
        loss = nn.functional.cross_entropy(model(x[step][own], 1), y[step][own])
        optimizer.weighted(loss, own.stop - own.start).backward()
        optimizer.step()
        nn.functional.cross_entropy(twin(x[step], 1), y[step]).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        plain.step()
    same(model, twin)
    """
    run(tmp_path, 2, body, share)


@pytest.mark.parametrize("share", SHARING)
def test_a_rank_that_has_joined_sits_out_the_others_steps(tmp_path, share):
    body = """
    hvd.init()
    weight = nn.Parameter(torch.zeros(3, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(2 + 2 * hvd.rank()):
        optimizer.zero_grad()
        (weight.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
    # No rank waits for the end of a step, so either may be the last to join.
    assert hvd.join() in (0, 1)
    # Averages of 1 and 2, and later of 0 and 2.
    assert weight.eq(-(2 * 1.5 + 2 * hvd.rank() * 1.0)).all(), weight
    """
    run(tmp_path, 2, body, share)
