"""Real ranks in shared memory: the errors when a rank has died, what is left behind, and too little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import lru_cache

import pytest
from e2e.conftest import TEARDOWN_S, ready, wait_until
from e2e.victims import run_plainly

from hvdlite.shm.control_block import CONTROL_BLOCK_BYTES
from hvdlite.shm.shm_operation import SLOTS_BYTES

pytestmark = pytest.mark.slow

MIB = 2**20
ENGINE_BYTES = CONTROL_BLOCK_BYTES + SLOTS_BYTES
IMPORTS = """
import os, signal, sys
import torch, torch.distributed as dist
import hvdlite as hvd
torch.set_num_threads(1)
"""
TRAIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
inputs, targets = torch.randn(16, 32), torch.randn(16, 1)
def train(model, optimizer, rank, size, steps=5, at_step=lambda step: None):
    for step in range(steps):
        at_step(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size]).backward()
        optimizer.step()
def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

# PyTorch 2.13 sometimes aborts if the interpreter ends before a thread of one of the program's own gloo groups has
# dropped its last tensor.
AT_ONCE = "os._exit(0)\n"


@lru_cache
def why_no_mounts() -> str | None:
    tried = subprocess.run(
        ["unshare", "-m", "-p", "-f", "--mount-proc", "mount", "-t", "tmpfs", "none", "/dev/shm"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr if tried.returncode else None


@pytest.fixture
def with_shm():
    """Provides ``with_shm("size=1m")``: a command prefix that gives the command a /dev/shm of its own."""
    if reason := why_no_mounts():
        pytest.skip(f"no /dev/shm can be made here: {reason}")

    def words(options: str) -> list[str]:
        script = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
        return ["unshare", "-m", "sh", "-c", script, "sh"]

    return words


def run(
    launch, program: str, *, size: int = 2, within=(), env=None, timeout_s: float = 200, **options
) -> tuple[int, str, str]:
    job = launch("-np", str(size), *within, sys.executable, "-c", IMPORTS + program, env=env, **options)
    code, out, err = job.ended(timeout_s)
    job.assert_gone()
    return code, out.decode(), err.decode()


# The launcher would end the others as soon as it knows of the first, before they can print their errors.
FAULT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def fail(step):
    if step == 3 and rank == 1: FAULT
def told(work):
    try: work()
    except Exception as error: print("told:", type(error).__name__, error, flush=True)
    else: print("told nothing", flush=True)
"""
DDP = (
    TRAIN
    + """
dist.init_process_group("cpu:hvdshm"); rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(model)
told(lambda: train(model, sgd(model), rank, 3, at_step=fail))
"""
)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os._exit(0)", 0)]
)
def test_a_rank_that_ends_at_a_step_of_ddp_is_named_by_all_others(tmp_path, end, code, rank_server):
    # Without the launcher, which ends the others within seconds.
    outcomes = run_plainly(rank_server.python(), 3, ["-c", IMPORTS + FAULT.replace("FAULT", end) + DDP], tmp_path)
    assert outcomes[1].exit_code == code, outcomes[1].output
    assert "told" not in outcomes[1].output
    for outcome in (outcomes[0], outcomes[2]):
        (line,) = [line for line in outcome.output.splitlines() if line.startswith("told")]
        assert "rank 1 of this group" in line
        assert "has died" in line
        assert "RuntimeError" in line or "PeerGoneError" in line


def test_a_rank_that_hangs_is_named_when_time_is_out(launch):
    # A timeout for this wait alone: that of the group is also the time in which the ranks must come to make it.
    end = (
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    if step == 3: dist.group.WORLD._engine._context.peers.timeout_s = 2.0\n"
    )
    code, out, _ = run(launch, FAULT.replace("FAULT", end) + DDP + "sys.exit(3)")
    assert code == 3
    assert "timed out after 2 s: rank 1 of this group" in out


ENGINES = """
from hvdlite.runtime.world import current_world
def kind(): return type(current_world().group.engine).__name__
"""


def test_shared_memory_is_used_unless_it_is_switched_off_on_all_ranks(launch):
    program = """
for os.environ["HVDLITE_SHM"] in "1", "0", os.environ["RANK"]:
    hvd.init()
    print(kind(), hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist(), flush=True)
    hvd.shutdown()
"""
    code, out, err = run(launch, ENGINES + program)
    assert out.count("ShmEngine [2.0, 2.0]") == 2
    assert out.count("TorchEngine [2.0, 2.0]") == 2
    assert code == 1
    assert "MismatchError" in err
    assert "HVDLITE_SHM" in err


# With 40 MiB of gradients in one bucket.
AVERAGE = (
    ENGINES
    + """
hvd.init()
param = torch.nn.Parameter(torch.zeros(10, 1024, 1024))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("fc.weight", param)])
for step in range(2):
    optimizer.zero_grad()
    (param * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
assert bool((param == -3).all())
print(kind(), "right", flush=True)
"""
)


@pytest.mark.night(but=2)
@pytest.mark.parametrize(
    ("options", "engine", "lines"),
    [
        ("size=64k", "TorchEngine", ["use gloo instead of shared memory"]),
        # Enough for a first engine, but not for a second one.
        (f"size={ENGINE_BYTES + 4096}", "ShmEngine", ["use gloo instead of shared memory"]),
        # Enough for all engines, but not for the bucket.
        (f"size={6 * ENGINE_BYTES}", "ShmEngine", ["copies gradients to shared memory and back"] * 2),
        (f"size={6 * ENGINE_BYTES + 80 * MIB}", "ShmEngine", []),
        ("ro", "TorchEngine", ["use gloo instead of shared memory"]),
    ],
)
def test_too_little_shared_memory_is_told_in_a_line_and_the_result_is_right(launch, with_shm, options, engine, lines):
    code, out, err = run(launch, AVERAGE, within=with_shm(options), env={"HVDLITE_LOG_LEVEL": "warning"})
    assert code == 0, err
    assert out.count(f"{engine} right") == 2
    told = [line for line in err.splitlines() if "shared memory" in line]
    assert len(told) == len(lines), err
    for line, words in zip(told, lines, strict=True):
        assert words in line
        assert "/dev/shm" in line


@pytest.mark.night
def test_no_directory_for_shared_memory_at_all_is_told_too(launch, with_shm):
    hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && '
              'mknod -m 444 /dev/urandom c 1 9 && exec "$@"', "sh"]  # fmt: skip
    code, out, err = run(launch, AVERAGE, within=hidden, env={"HVDLITE_LOG_LEVEL": "warning"})
    assert code == 0, err
    assert out.count("TorchEngine right") == 2
    assert "/dev/shm: No such file or directory" in err


@pytest.mark.night
def test_ranks_that_cannot_see_each_others_processes_do_without_it(launch, with_shm):
    """As in separate containers, or on two machines."""
    apart = ["unshare", "-p", "-f", "--mount-proc", "--kill-child"]
    code, out, err = run(launch, AVERAGE, within=apart, env={"HVDLITE_LOG_LEVEL": "warning"})
    assert code == 0, err
    assert out.count("TorchEngine right") == 2
    assert err.count("use gloo instead of shared memory") == 1
    code, _, err = run(launch, 'dist.init_process_group("cpu:hvdshm")', within=apart)
    assert code == 1
    assert "RuntimeError: hvdshm needs ranks of one host that share memory: rank " in err


def test_nothing_is_left_of_ranks_that_are_killed_and_nothing_ever_had_a_name(launch, make_lan):
    desk = make_lan().desk
    shm = desk.seen("/dev/shm")

    def used() -> int:
        state = os.statvfs(shm)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    program = AVERAGE + 'print("ready", flush=True); signal.pause()'
    job = launch("-np", "2", sys.executable, "-c", IMPORTS + program, on=desk)
    ready(job)
    assert used() >= 2 * (2 * ENGINE_BYTES + 40 * MIB)
    assert list(shm.iterdir()) == []
    job.signal_all(signal.SIGKILL)
    job.ended()
    wait_until(lambda: used() == 0, TEARDOWN_S, lambda: f"{used()} bytes are left")


def test_optimizers_and_worlds_that_come_and_go_leave_no_memory(launch):
    program = """
import gc, time
def maps(): return sum(" /dev/shm/" in line for line in open("/proc/self/maps"))
def settle(count):
    # A thread of an engine's may hold it a moment longer.
    give_up_at = time.monotonic() + 60
    while maps() != count:
        assert time.monotonic() < give_up_at, (maps(), count)
        time.sleep(0.01)
        gc.collect()
opened = []
for world in range(3):
    hvd.init()
    before = maps()
    assert before > 0
    for number in range(3):
        param = torch.nn.Parameter(torch.zeros(500_000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("w", param)])
        param.sum().backward()
        optimizer.step()
        optimizer.close()
        del param, optimizer
        gc.collect()
        settle(before)
    hvd.shutdown()
    gc.collect()
    settle(0)
    opened.append(len(os.listdir("/proc/self/fd")))
    # A connection of the world before may be about to be closed.
    give_up_at = time.monotonic() + 60
    while opened[-1] > opened[0] and time.monotonic() < give_up_at:
        time.sleep(0.01)
        opened[-1] = len(os.listdir("/proc/self/fd"))
assert opened[0] >= opened[2], opened
print("steady")
"""
    code, out, err = run(launch, program, timeout_s=300)
    assert code == 0, err
    assert out.count("steady") == 2, out


def test_ddp_over_it_is_one_process_on_the_whole_batch_and_hvdlite_goes_along(launch):
    program = (
        TRAIN
        + """
import copy
alone, over_gloo = copy.deepcopy(model), copy.deepcopy(model)
train(alone, sgd(alone), 0, 1)
dist.init_process_group("cpu:hvdshm")
rank = dist.get_rank()
train(model_ := torch.nn.parallel.DistributedDataParallel(model), sgd(model_), rank, 2)
gloo = dist.new_group(backend="gloo")
train(model_ := torch.nn.parallel.DistributedDataParallel(over_gloo, process_group=gloo), sgd(model_), rank, 2)
for param, other, third in zip(model.parameters(), alone.parameters(), over_gloo.parameters()):
    torch.testing.assert_close(param, other)
    torch.testing.assert_close(param, third)
parts = [torch.empty_like(param) for _ in range(2)]
dist.all_gather(parts, param.detach())
assert torch.equal(*parts)
trio = dist.new_group([1], backend="hvdshm")
pair = dist.new_group([0, 1], backend="hvdshm")
value = torch.tensor([1.0 + rank])
dist.all_reduce(value, group=pair)
assert value.item() == 3
if rank == 1:
    dist.all_reduce(value, group=trio)
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
dist.destroy_process_group(pair)
dist.barrier()
hvd.init()
assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == hvd.size() == 2
hvd.shutdown()
dist.destroy_process_group()
print("done", flush=True)
"""
        + AT_ONCE
    )
    code, out, err = run(launch, program)
    assert code == 0, err
    assert out.count("done") == 2


@pytest.mark.night
def test_powersgd_over_it_is_what_it_is_over_gloo(launch):
    """PowerSGD's hook communicates and waits in callbacks of futures."""
    program = (
        TRAIN
        + """
import copy
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
models = {"cpu:hvdshm": model, "gloo": copy.deepcopy(model)}
dist.init_process_group("gloo")
for backend, each in models.items():
    group = dist.new_group(backend=backend)
    wrapped = torch.nn.parallel.DistributedDataParallel(each, process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, sgd(wrapped), dist.get_rank(), 2, steps=6)
for one, other in zip(*(each.parameters() for each in models.values())):
    torch.testing.assert_close(one, other)
print("done", flush=True)
"""
        + AT_ONCE
    )
    code, out, err = run(launch, program)
    assert code == 0, err
    assert out.count("done") == 2


def test_workers_of_a_data_loader_and_other_children_disturb_nothing(launch):
    program = (
        TRAIN
        + """
hvd.init(); rank = hvd.rank()
optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
def fork(step):
    if (child := os.fork()) == 0:
        globals().pop("optimizer"); model.zero_grad(); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
train(model, optimizer, rank, 2, steps=3, at_step=fork)
data = torch.utils.data.TensorDataset(inputs, targets)
for epoch in range(2):
    for features, target in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()
values = hvd.allgather(torch.nn.utils.parameters_to_vector(model.parameters())[None].detach())
assert torch.equal(values[0], values[1])
print("done")
"""
    )
    code, out, err = run(launch, program)
    assert code == 0, err
    assert out.count("done") == 2


# Each rank says what its call returned or raised; the one that dies does so at the named point of its second call.
DIES_IN_CALL = """
from hvdlite.shm.board import Board, VoteData
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
def dies(owner, name, after):
    method = getattr(owner, name)
    def die(*arguments, **named):
        if after: method(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, die)
print("began with", hvd.allreduce(torch.ones(8), op=hvd.Sum)[0].item(), flush=True)
hvd.barrier()
if hvd.rank() == VICTIM: dies(POINT)
try: print("got", hvd.allreduce(torch.ones(8), name="loss", op=hvd.Sum)[0].item(), flush=True)
except hvd.PeerLostError as error: print("lost", error, flush=True)
try: hvd.barrier()
except hvd.PeerLostError as error: print("lost", error, flush=True)
os._exit(3)
"""


@pytest.mark.night(but=2)
@pytest.mark.parametrize(
    ("victim", "point", "first"),
    [
        (1, "VoteData, 'write', False", "lost allreduce"),
        (1, "VoteData, 'write', True", "lost allreduce"),
        # Its data are there.
        (1, "Board, 'vote', True", ("got 2.0", "lost allreduce")),
        (0, "Board, 'vote', True", "lost allreduce"),
        (0, "Board, 'decide', False", "lost allreduce"),
        (0, "Board, 'decide', True", ("got 2.0", "lost allreduce")),
    ],
)
def test_a_rank_that_dies_in_a_small_call_is_told_or_its_data_are_used(launch, victim, point, first):
    code, out, err = run(launch, DIES_IN_CALL.replace("VICTIM", str(victim)).replace("POINT", point), timeout_s=60)
    assert code, err
    assert out.count("began with 2.0") == 2
    words = [line.partition(">:")[2] for line in out.splitlines()]
    got, barrier = (each for each in words if each.startswith(("got", "lost")))
    assert got.replace("Horovod has been shut down. ", "").startswith(first), out
    assert "barrier failed" in barrier, out
    assert f"rank {victim}" in barrier
