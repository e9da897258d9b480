"""A training that hangs as its first argument says, each time until it is told to go on: see `hangs`."""

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data._utils import signal_handling

import hvdlite as hvd


class Enough(BaseException):
    """The end of a hang."""


class Job:
    """Where this rank is."""

    plan = {hang["step"]: hang for hang in json.loads(sys.argv[1])}  # noqa: RUF012  # never changed
    directory = Path(sys.argv[2])
    step = 0
    may_end = False


class Stands(torch.utils.data.Dataset):
    """A data set whose worker stands still."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(10000)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

    def forward(self, x):
        visit("forward")  # HERE place forward
        hidden = self.layers[0](x)
        hidden.register_hook(on_gradient)
        return self.layers[1](hidden)


def on_gradient(gradient):
    visit("backward")  # HERE place backward


def load():
    visit("data")  # HERE place data
    return torch.ones(1, 4)


def loss_of(output):
    visit("loss")  # HERE place loss
    return output.sum()


def call(collective):
    x = torch.ones(hvd.size())
    if collective == "allreduce":
        hvd.allreduce(x, name="odd")  # HERE collective allreduce
    if collective == "allgather":
        hvd.allgather(x, name="odd")  # HERE collective allgather
    if collective == "broadcast":
        hvd.broadcast(x, root_rank=1, name="odd")  # HERE collective broadcast
    if collective == "alltoall":
        hvd.alltoall(x, name="odd")  # HERE collective alltoall
    if collective == "reducescatter":
        hvd.reducescatter(x, name="odd")  # HERE collective reducescatter
    if collective == "grouped_allreduce":
        hvd.grouped_allreduce([x, x], name="odd")  # HERE collective grouped_allreduce


def visit(place):
    """Hangs, if this rank is to hang here in this step."""
    hang = Job.plan.get(Job.step)
    if hang is None or hang["place"] != place:
        return
    is_odd = hang["rank"] == hvd.rank()
    if is_odd:
        (Job.directory / f"there.{hang['number']}").touch()
    if calls_by_itself(hang):
        try:  # noqa: SIM105  # the kind is an exception that is swallowed
            int("no number" if hang["kind"] == "swallowed" else "1")
        except ValueError:
            pass  # as of a bad sample, after which this rank takes its epoch to be over
        call(hang["collective"])
    elif is_odd and hang["kind"] == "cut":
        while not (Job.directory / f"end.{hang['number']}").exists():  # until the test has cut the link
            time.sleep(0.05)
    elif is_odd and hang["kind"] in KINDS:
        stand(KINDS[hang["kind"]])


def calls_by_itself(hang):
    """Whether this rank calls the hang's collective, and others do not."""
    if hang["kind"] == "left out":
        return hang["rank"] != hvd.rank()
    return hang["kind"] in ("alone", "swallowed") and hang["rank"] == hvd.rank()


def call_what_others_wait_in():
    """Calls each collective that this rank leaves out, once the test says so."""
    for hang in Job.plan.values():
        if hang["kind"] in ("alone", "swallowed", "left out") and not calls_by_itself(hang):
            while not (Job.directory / f"end.{hang['number']}").exists():
                time.sleep(0.05)
            call(hang["collective"])


def stand(hangs):
    """Calls a function that does not return, until the test sends SIGUSR1."""
    try:
        Job.may_end = True
        hangs()
    except Enough:
        pass
    finally:
        Job.may_end = False


def end(signum, frame):
    if Job.may_end:
        raise Enough


def sleep():
    time.sleep(10000)  # HERE kind sleep


def hold_the_lock():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # HERE kind extension


def match():
    re.match("(a+)+b", "a" * 60)  # HERE kind regular expression


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def load_with_a_worker():
    iterator = iter(torch.utils.data.DataLoader(Stands(), num_workers=1))
    try:
        next(iterator)  # HERE kind loader
    finally:
        # PyTorch's handler of SIGCHLD would raise an error for a worker that was killed, wherever this thread is then.
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()  # so that the iterator's end does not wait for it


def lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # HERE kind mutex


def deadlock():
    first, second, holds = threading.Lock(), threading.Lock(), threading.Event()

    def take_both():
        with second:
            holds.set()
            with first:  # HERE the other thread
                pass

    with first:
        threading.Thread(target=take_both, name="other", daemon=True).start()
        holds.wait()
        second.acquire()  # HERE kind threads


def read_from_a_pipe():
    os.read(os.pipe()[0], 1)  # HERE kind pipe


KINDS = {
    "sleep": sleep,
    "extension": hold_the_lock,
    "regular expression": match,
    "stop": stop,
    "loader": load_with_a_worker,
    "mutex": lock_twice,
    "threads": deadlock,
    "pipe": read_from_a_pipe,
}

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
signal.signal(signal.SIGUSR1, end)
model = Model()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
partner = threading.Thread(target=call_what_others_wait_in, name="partner", daemon=True)
partner.start()
for Job.step in range(max(Job.plan) + 2):  # noqa: B020  # an attribute of it
    optimizer.zero_grad()
    loss = loss_of(model(load()))
    loss.backward()
    visit("between")  # HERE place between
    optimizer.step()  # HERE step
partner.join()
