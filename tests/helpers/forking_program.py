"""A rank that forks children at many points of its training, each of which does what children do; run by hvdlite-run.

Afterwards every rank's parameters must be those of a twin that has been trained by hand, without hvdlite and children.
``argv[1]``: "elastic" to train within a function of `hvd.elastic.run`.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

import hvdlite as hvd

CHILD_S = 60
LR, MOMENTUM = 0.01, 0.9

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
twin = copy.deepcopy(model)
twins_optimizer = torch.optim.SGD(twin.parameters(), lr=LR, momentum=MOMENTUM)


def make_optimizer() -> hvd.DistributedOptimizer:
    made = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return hvd.DistributedOptimizer(made, named_parameters=model.named_parameters())


class Steps:
    """Trains the model with other ranks, and its twin on the batches of all ranks alone."""

    def __init__(self) -> None:
        self.count = 0
        self.optimizer = make_optimizer()

    def _batch(self, rank: int) -> torch.Tensor:
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * self.count + rank))

    def take(self, *, before: Callable[[], Any] = lambda: None, within: Callable[[], Any] = lambda: None) -> None:
        """Takes a step; calls ``before`` it, and ``within`` it between backward and the optimizer's step."""
        before()
        self.optimizer.zero_grad()
        model(self._batch(hvd.rank())).pow(2).mean().backward()
        within()
        self.optimizer.step()
        twins_optimizer.zero_grad()
        torch.stack([twin(self._batch(rank)).pow(2).mean() for rank in range(hvd.size())]).mean().backward()
        twins_optimizer.step()
        self.count += 1

    def check(self, what: str) -> None:
        own, truth = (parameters_to_vector(each.parameters()).detach() for each in (model, twin))
        torch.testing.assert_close(own, truth, msg=lambda words: f"after {what}: {words}")
        if hvd.rank() == 0:
            print(f"ok: {what}", flush=True)


# -- what children do


def backward_anew() -> None:
    model.zero_grad()
    model(torch.ones(4, 64)).sum().backward()


def backward_on_top() -> None:
    model(torch.ones(4, 64)).sum().backward()


def write_gradients() -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.fill_(float("nan"))


def zero_gradients() -> None:
    backward_anew()
    steps.optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in model.parameters())
    steps.optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def be_refused() -> None:
    for call in (steps.optimizer.step, steps.optimizer.synchronize, hvd.barrier):
        refused(call)
    with steps.optimizer.skip_synchronize():
        refused(steps.optimizer.step)
    refused(lambda: hvd.allreduce(torch.ones(2)))
    assert hvd.is_initialized()


def shut_down() -> None:
    rank = hvd.rank()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert not torch.distributed.is_initialized()
    hvd.shutdown()
    words = error_of(hvd.init, hvd.LaunchEnvironmentError)
    assert f"is a forked child of rank {rank} " in words, words
    assert "leave hvd.init() out here" in words, words
    assert "that rank's place" in words, words


def be_alone() -> None:
    hvd.shutdown()
    for name in list(os.environ):
        if name.startswith(("HVDLITE_", "HOROVOD_", "MASTER_", "LOCAL_", "CROSS_")) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    hvd.init()
    assert hvd.size() == 1
    assert hvd.allreduce(torch.ones(1)).item() == 1
    own = make_optimizer()
    before = parameters_to_vector(model.parameters()).clone()
    own.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    own.step()
    assert not torch.equal(before, parameters_to_vector(model.parameters()))
    refused(steps.optimizer.step)
    hvd.shutdown()


def have_children() -> None:
    backward_anew()
    end_well(fork(lambda: (backward_on_top(), be_refused())))


def refused(call: Callable[[], Any]) -> None:
    words = error_of(call, hvd.NotInitializedError)
    assert f"this process (pid {os.getpid()}) is a forked child of rank " in words, words


def error_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} was not refused")


# -- children


def fork(does: Callable[[], Any], end: Callable[[int], Any] = os._exit) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            does()
        except BaseException:  # noqa: BLE001 - the parent sees that it failed
            traceback.print_exc()
            os._exit(1)
        end(0)
    return child


def end_well(child: int) -> None:
    until_s = time.monotonic() + CHILD_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            raise SystemExit("a child hangs")
        time.sleep(0.005)
    if ended[1]:
        raise SystemExit(f"a child ended with {os.waitstatus_to_exitcode(ended[1])}")


def child(does: Callable[[], Any], end: Callable[[int], Any] = os._exit) -> Callable[[], None]:
    return lambda: end_well(fork(does, end))


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Saliency(torch.utils.data.Dataset):
    """Items are gradients of the model."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        backward_anew()
        return next(model.parameters()).grad[0]


def gradient_of(index: int) -> list[float]:
    return Saliency()[index].tolist()


def pool(method: str, function: Callable[[int], Any], numbers: list[int]) -> list[Any]:
    with multiprocessing.get_context(method).Pool(2) as workers:
        return workers.map(function, numbers)


def fork_while(training: Callable[[], None]) -> None:
    """Forks in another thread, at any point of the steps of ``training``.

    A child does not go backward: autograd may hold a lock of the parameters at that point, with and without hvdlite.
    """
    is_over = threading.Event()
    children: list[int] = []

    def run() -> None:
        while not (is_over.is_set() and children):
            children.append(fork(lambda: (write_gradients(), be_refused())))
            time.sleep(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    training()
    is_over.set()
    thread.join()
    for each in children:
        end_well(each)


def train() -> None:
    steps.take()
    steps.take(before=child(backward_on_top))
    steps.check("a child's backward on top of the averages")
    steps.take(within=child(backward_anew))
    steps.take(within=child(backward_on_top))
    steps.take(within=child(write_gradients))
    steps.check("children between backward and step")
    steps.take(within=child(zero_gradients))
    steps.check("zero_grad in a child")
    steps.take(within=child(be_refused))
    steps.check("refused calls")
    handle = hvd.allreduce_async(torch.ones(3), name="pending") if hvd.rank() == 0 else None
    if handle is not None:
        end_well(fork(lambda: [refused(call) for call in (handle.wait, lambda: hvd.poll(handle))]))
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(3), name="pending"))
    for does in (backward_anew, shut_down, be_alone):
        steps.take(within=child(does))
        steps.take(within=child(does, sys.exit))
        steps.check(f"{does.__name__} in children that end by os._exit and sys.exit")
    steps.take(within=lambda: in_thread(child(backward_anew)))
    steps.take(within=child(have_children))
    steps.check("children of threads and of children")
    many = [fork(backward_anew) for _ in range(3)]
    steps.take()
    for each in many:
        end_well(each)
    steps.check("children at once")
    for batch in torch.utils.data.DataLoader(Saliency(), batch_size=2, num_workers=2):
        steps.take()
        assert torch.isfinite(batch).all()
    steps.take(within=lambda: pool("fork", gradient_of, [0, 1, 2]))
    steps.check("a DataLoader and a pool of workers")
    steps.take(within=lambda: pool("spawn", abs, [-1, 2]))
    steps.check("a pool of spawned workers")
    fork_while(lambda: [steps.take() for _ in range(20)])
    steps.check("forks at any point")


if __name__ == "__main__":
    hvd.init()
    steps = Steps()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if sys.argv[1:] == ["elastic"]:
        state = hvd.elastic.TorchState(model=model, optimizer=steps.optimizer, batch=0)

        @hvd.elastic.run
        def run(state: hvd.elastic.TorchState) -> None:
            train()
            # They leave the function, and with it what listens for changed hosts.
            end_well(fork(backward_anew, sys.exit))
            end_well(fork(lambda: refused(state.commit)))
            state.commit()

        run(state)
    else:
        train()
    print("done", flush=True)
