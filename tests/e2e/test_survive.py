"""``hvdlite-run --survive``: whoever is killed, wherever in a step, the others end it as a job of their own would.

Each worker writes down what it has trained. The test computes the same in one process: a step's average is that of the
workers whose gradients were in it when all had it.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from long_run import chosen

pytestmark = pytest.mark.slow

PATIENCE_S = 300
STEPS = 9

# `DIE` has items as worker:step:point, with the points of a step in order: begin, hook (within backward), reduce
# (before the last buckets are sent), vote (behind all averages), voted, end.
PROGRAM = """
import os, signal, sys
import torch
import hvdlite as hvd
from hvdlite import faults

hvd.init(process_sets=[hvd.ProcessSet([0, 1])] if "SETS" in os.environ else None)
worker = int(os.environ["HVDLITE_WORKER"])
deaths = {tuple(each.split(":")) for each in os.environ.get("DIE", "").split(",")}
number = -1


def maybe_die(point):
    if (str(worker), str(number), point) in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


def batch(step, of_pass=0):
    generator = torch.Generator().manual_seed(10_000 * of_pass + 100 * step + worker)
    return torch.randn(4, 12, generator=generator, dtype=torch.float64)


def made(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)]
    return torch.nn.Sequential(*layers).double()


class Points:
    # Also where --chaos has faults.
    chaos = faults._armed

    def pass_point(self, name):
        if self.chaos is not None:
            self.chaos.pass_point(name)
        maybe_die({"synchronize": "reduce"}.get(name, name))


faults._armed = Points()


def wrapped(model, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    next(iter(model[2].parameters())).register_post_accumulate_grad_hook(lambda _: maybe_die("hook"))
    # Several buckets, of which the first is sent within backward.
    named = model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, bucket_cap_mb=0.0005, **arguments)


def trained(model):
    torch.save([param.detach() for param in model.parameters()], os.environ["RESULTS"] + f"/{worker}.pt")
    print("end", worker, hvd.rank(), hvd.size(), flush=True)
"""

PLAIN = """
model = made()
optimizer = wrapped(model, compression=getattr(hvd.Compression, os.environ.get("COMPRESSION", "none")))
for number in range(9):
    maybe_die("begin")
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    model(batch(number)).square().mean().backward()
    optimizer.step()
    maybe_die("end")
trained(model)
"""

# Points at which the gradients of the worker that dies are still in the step's average.
IS_IN = {"voted", "end"}


def deaths_of(text: str) -> list[tuple[int, int, str]]:
    items = [each.split(":") for each in text.split(",")]
    return [(int(worker), int(step), point) for worker, step, point in items]


def survivors_of(launch, tmp_path, body: str, died: str, *, size: int = 3, flags=(), env=None):
    """Runs the program in a job of ``size`` workers; returns the survivors' parameters by worker, and what was told."""
    results = tmp_path / "results"
    results.mkdir()
    variables = {"DIE": died, "RESULTS": str(results), **(env or {})}
    flags = flags or ("--on-failure", "shrink")
    job = launch(
        *("-np", str(size), "--min-np", "1", "--survive", *flags), sys.executable, "-c", PROGRAM + body, env=variables
    )
    code, out, err = job.ended(PATIENCE_S)
    print(err.decode())  # which pytest shows with a failure
    job.assert_gone()
    assert code == 0
    return {int(each.stem): torch.load(each) for each in results.iterdir()}, out.decode(), err.decode()


def model_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)]
    return torch.nn.Sequential(*layers).double()


def batch(worker: int, step: int, of_pass: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * of_pass + 100 * step + worker)
    return torch.randn(4, 12, generator=generator, dtype=torch.float64)


def by_one_process(
    died: str, size: int = 3, passes: int = 1, lr=lambda alive: 0.1, make=model_of
) -> list[torch.Tensor]:
    """The parameters after training in one process, where each step has the batches of those whose gradients count."""
    deaths, steps = deaths_of(died), []
    for step in range(STEPS):
        gone = {worker for worker, at, point in deaths if at < step or (at == step and point not in IS_IN)}
        steps.append([worker for worker in range(size) if worker not in gone])
    return on_batches_of(steps, passes, lr, make)


def on_batches_of(steps: list[list[int]], passes: int = 1, lr=lambda alive: 0.1, make=model_of) -> list[torch.Tensor]:
    """The parameters after training in one process, where ``steps`` has the workers whose batches are in each step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, alive in enumerate(steps):
        optimizer.param_groups[0]["lr"] = lr(len(alive))
        optimizer.zero_grad()
        for worker in alive:
            for of_pass in range(passes):
                (model(batch(worker, step, of_pass)).square().mean() / len(alive)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def assert_all_have(expected: list[torch.Tensor], survivors: dict[int, list[torch.Tensor]], *, within=1e-12) -> None:
    first, *others = survivors.values()
    for other in others:
        assert all(torch.equal(own, its) for own, its in zip(first, other, strict=True)), "they differ in bits"
    for own, right in zip(first, expected, strict=True):
        assert torch.allclose(own, right, rtol=0, atol=within), (own - right).abs().max()


@pytest.mark.night(but=3)
@pytest.mark.parametrize(
    ("worker", "point"),
    chosen(
        [(worker, point) for worker in (0, 2) for point in ("begin", "hook", "reduce", "vote", "voted", "end")],
        [(0, "begin"), (2, "hook"), (2, "reduce"), (0, "reduce"), (0, "vote"), (2, "voted"), (0, "end")],
    ),
)
def test_the_others_finish_the_step_in_which_a_worker_is_killed(launch, tmp_path, worker, point):
    died = f"{worker}:4:{point}"
    survivors, _, err = survivors_of(launch, tmp_path, PLAIN, died)
    assert survivors.keys() == {0, 1, 2} - {worker}
    assert_all_have(by_one_process(died), survivors)
    assert "survive: now there are 2 ranks." in err
    assert "what it has made for 3 ranks stays as it is" in err


def test_workers_may_be_killed_one_after_the_other_until_one_is_left(launch, tmp_path):
    died = "0:2:reduce,3:4:vote,1:6:hook"
    survivors, _, err = survivors_of(launch, tmp_path, PLAIN, died, size=4)
    assert survivors.keys() == {2}
    assert_all_have(by_one_process(died, size=4), survivors)
    assert "generation 4: 1 rank" in err


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    "points",
    chosen(
        [("reduce", "reduce"), ("vote", "vote"), ("hook", "vote"), ("voted", "voted")],
        [("hook", "vote"), ("vote", "vote")],
    ),
)
def test_two_workers_may_be_killed_in_the_same_step(launch, tmp_path, points):
    died = f"0:4:{points[0]},2:4:{points[1]}"
    survivors, _, _ = survivors_of(launch, tmp_path, PLAIN, died, size=4)
    assert survivors.keys() == {1, 3}
    assert_all_have(by_one_process(died, size=4), survivors)


CANNOT_REPEAT = """
from hvdlite.shm.shm_engine import ShmEngine

ShmEngine.cannot_repeat = {"cpu": "the engine of this test"}
"""


# Worker 2 is lost when worker 1 has ended its last step, and before worker 0 has heard of the end of the vote.
LAST_VOTE = """
import time
from pathlib import Path
from hvdlite.comm.group import Group

there, all_reduce = Path(os.environ["THERE"]), Group.all_reduce


def wait_for(name):
    while not (there / name).exists():
        time.sleep(0.01)


def maybe_die(point):
    if point == "voted" and number == 8:
        if worker == 1:
            (there / "voted").touch()
        elif worker == 2:
            wait_for("voted")
            os.kill(os.getpid(), signal.SIGKILL)


def all_reduce_but_the_last_vote(group, tensor, what, *more):
    work = all_reduce(group, tensor, what, *more)
    if not what.startswith("the end of a step") or number < 8 or group.size < 3:
        return work
    work.wait()
    # Nobody joins this one, so it ends with the loss.
    try:
        all_reduce(group, tensor, what, *more).wait()
    finally:
        (there / "lost").touch()


if worker == 0:
    Group.all_reduce = all_reduce_but_the_last_vote
"""


def test_a_worker_in_the_last_step_uses_the_averages_with_which_another_has_ended(launch, tmp_path):
    body = LAST_VOTE + PLAIN + "if worker == 1: wait_for('lost')"
    params, out, _ = survivors_of(launch, tmp_path, body, "", env={"THERE": str(tmp_path)})
    assert params.keys() == {0, 1}
    assert "end 0 0 1" in out
    assert all(torch.equal(own, others) for own, others in zip(params[0], params[1], strict=True))


def test_where_the_engine_cannot_average_gradients_again_the_others_discard_the_step(launch, tmp_path):
    """As over NCCL. The second to die has voted, so that it is the next step that is discarded."""
    died = "1:3:reduce,0:5:voted"
    survivors, _, err = survivors_of(launch, tmp_path, CANNOT_REPEAT + PLAIN, died, size=4)
    assert survivors.keys() == {2, 3}
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in [0, 1, 2, 4, 5, 7, 8]:
        optimizer.zero_grad()
        alive = (0, 1, 2, 3) if step < 3 else (0, 2, 3) if step < 6 else (2, 3)
        for worker in alive:
            (model(batch(worker, step)).square().mean() / len(alive)).backward()
        optimizer.step()
    assert_all_have([param.detach() for param in model.parameters()], survivors)
    assert "is discarded on all ranks, and changes no parameter: the engine of this test cannot average" in err
    assert "The batches of 2 ranks are lost" in err


# Each worker has a batch of another size.
WEIGHTED = """
model = made()
optimizer = wrapped(model)
for number in range(9):
    maybe_die("begin")
    optimizer.zero_grad()
    rows = batch(number)[: worker + 1]
    optimizer.weighted(model(rows).square().mean(), len(rows)).backward()
    optimizer.step()
    maybe_die("end")
trained(model)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("point", ["hook", "vote", "voted"])
def test_averages_by_weight_are_those_of_the_samples_of_the_workers_that_are_left(launch, tmp_path, point):
    died = f"2:4:{point}"
    survivors, _, _ = survivors_of(launch, tmp_path, WEIGHTED, died)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        alive = (0, 1, 2) if step < 4 or (step == 4 and point in IS_IN) else (0, 1)
        optimizer.zero_grad()
        model(torch.cat([batch(worker, step)[: worker + 1] for worker in alive])).square().mean().backward()
        optimizer.step()
    assert_all_have([param.detach() for param in model.parameters()], survivors)


SECOND_DEATH = """
from hvdlite.runtime import survival

point = os.environ["SECOND"]
whole = survival.Survival.begin


def begin(self, group, seat):
    last = int(os.environ.get("LAST", "1"))
    is_its_turn = worker == seat.generation - 1 and 1 <= worker <= last
    if is_its_turn and point == "before the reports":
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, group, seat)
    if is_its_turn and point == "after the reports":
        os.kill(os.getpid(), signal.SIGKILL)


survival.Survival.begin = begin
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("second", ["before the reports", "after the reports"])
@pytest.mark.parametrize("first", ["reduce", "voted"])
def test_a_second_worker_may_be_killed_while_the_others_settle_what_became_of_the_step(launch, tmp_path, first, second):
    """Where all had the averages before the second death, both are in the step's average."""
    died = f"0:4:{first}"
    body = SECOND_DEATH + PLAIN
    survivors, _, _ = survivors_of(launch, tmp_path, body, died, size=4, env={"SECOND": second})
    assert survivors.keys() == {2, 3}
    # The first died after its own vote, and so all others had the averages of step 4 and were in step 5.
    of_second = "1:4:begin" if first == "reduce" else "1:5:begin"
    assert_all_have(by_one_process(f"{died},{of_second}", size=4), survivors)


# While the ranks of a new world connect, the last worker kills the first of the others at a request to hvdlite-run's
# store: in each generation at the next one. It waits until hvdlite-run has seen that, since all others' requests fail
# then.
LOST_WHILE_CONNECTING = """
import threading
from hvdlite.rendezvous.store_client import StoreClient
from hvdlite.rendezvous.elastic_store import KeyListener
from hvdlite.runtime import bootstrap

own = os.environ["RESULTS"] + "/../pid."
with open(own + f"{worker}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(own + f"{worker}.new", own + str(worker))
last, requests, kills_at = hvd.size() - 1, 0, None
request, connect_all = StoreClient.request, bootstrap.connect_all


def request_or_kill(client, operation, *arguments):
    global requests, kills_at
    if threading.current_thread() is threading.main_thread():
        if requests == kills_at:
            victim = seat.generation - 2 + int(os.environ.get("FIRST_VICTIM", "1"))
            print("killed", victim, "at request", requests, operation.name, flush=True)
            with open(own + str(victim)) as file:
                os.kill(int(file.read()), signal.SIGKILL)
            kills_at = None
            assert has_ended.wait(60)
        requests += 1
    return request(client, operation, *arguments)


def connect_and_kill(placement, client, given, *arguments):
    global requests, kills_at, seat, has_ended
    seat, has_ended, requests = given, threading.Event(), 0
    may_kill = given.size > 2 and given.generation <= int(os.environ.get("LAST_GENERATION", "100"))
    kills_at = int(os.environ["FIRST"]) + given.generation - 2 if may_kill else None
    listener = KeyListener(
        StoreClient.from_url(os.environ["HVDLITE_STORE"]), given.prefix + "/end", str, lambda _: has_ended.set()
    )
    try:
        return connect_all(placement, client, given, *arguments)
    finally:
        kills_at = None
        listener.close()


if worker == last:
    StoreClient.request, bootstrap.connect_all = request_or_kill, connect_and_kill
"""


@pytest.mark.parametrize("first", [0, 9])
def test_a_worker_may_be_killed_at_each_request_with_which_the_others_connect(launch, tmp_path, first):
    """There are 18 of them; at the last one all others have connected already."""
    size = 12
    body = LOST_WHILE_CONNECTING + PLAIN
    survivors, out, err = survivors_of(launch, tmp_path, body, "0:4:hook", size=size, env={"FIRST": str(first)})
    killed = [int(each) for each in re.findall("killed (.*) at request", out)]
    assert [int(each) for each in re.findall("at request (.*) ", out)] == list(range(first, first + len(killed)))
    assert killed == list(range(1, 1 + len(killed)))
    assert len(killed) >= 8
    assert survivors.keys() == set(range(1 + len(killed), size))
    assert_all_have(by_one_process("0:4:hook," + ",".join(f"{each}:4:begin" for each in killed), size=size), survivors)
    assert "the same ranks again" not in err


STOPS_OR_HANGS = """
import ctypes


def maybe_die(point):
    if (str(worker), str(number), point) in deaths:
        if os.environ["HOW"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            ctypes.PyDLL(None).pause()  # with the interpreter's lock
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("died", "how"),
    chosen(
        [("0:4:reduce", "stop"), ("2:4:vote", "stop"), ("0:4:hook", "hang"), ("2:4:voted", "hang")],
        [("2:4:vote", "stop"), ("0:4:hook", "hang")],
    ),
)
def test_a_worker_that_no_longer_responds_is_ended_and_the_others_finish_the_step(launch, tmp_path, died, how):
    flags = ["--on-failure", "shrink", "--hang-timeout", "14"]
    survivors, _, err = survivors_of(launch, tmp_path, STOPS_OR_HANGS + PLAIN, died, flags=flags, env={"HOW": how})
    assert survivors.keys() == {0, 1, 2} - {int(died[0])}
    assert_all_have(by_one_process(died), survivors)
    assert (
        f"worker {died[0]} (rank {died[0]} on localhost) was ended by hvdlite-run: it did not respond for 14 s "
        "(--hang-timeout)" in err
    )
    # Before that a report says where it stands.
    assert re.search(rf"report 1 on 3 ranks, since rank {died[0]} has not responded for \d+ s\n", err), err
    assert re.search(rf"  cause: rank {died[0]} .*{'in maybe_die' if how == 'hang' else 'is stopped'}", err), err


@pytest.mark.night
def test_one_worker_after_the_other_may_be_killed_in_the_same_settlement(launch, tmp_path):
    died = "0:4:reduce"
    env = {"SECOND": "before the reports", "LAST": "4"}
    survivors, _, err = survivors_of(launch, tmp_path, SECOND_DEATH + PLAIN, died, size=7, env=env)
    assert survivors.keys() == {5, 6}
    assert_all_have(by_one_process(f"{died},1:4:begin,2:4:begin,3:4:begin,4:4:begin", size=7), survivors)
    assert "generation 6: 2 ranks" in err


# Buckets that the ranks sum where they lie: each reduces a part, and writes it into the memory of all. A worker may be
# killed when another has half of its part, when it has written all, and when all have all.
LARGE = """
import hvdlite.shm.collectives as collectives
from hvdlite.shm.control_block import REDUCED

made = lambda: torch.nn.Sequential(torch.nn.Linear(12, 300), torch.nn.Tanh(), torch.nn.Linear(300, 90)).double()
usual = collectives.SharedAllReduce._sum_where_they_lie


class Dies:
    def __init__(self, arithmetic):
        self.arithmetic = arithmetic

    def into(self, terms, total):
        self.arithmetic.into(terms, total)
        terms[1][: len(total) // 2].copy_(total[: len(total) // 2])
        maybe_die("sum")


def sum_and_maybe_die(self):
    arithmetic, peers = self._arithmetic, self._operation.peers
    self._arithmetic = Dies(arithmetic)
    usual(self)
    self._arithmetic = arithmetic
    maybe_die("written")
    advance = peers.advance

    def advance_and_maybe_die(counter, value):
        advance(counter, value)
        vars(peers).pop("advance", None)  # unless another operation has wrapped it, too
        maybe_die("reduced")

    peers.advance = advance_and_maybe_die


collectives.SharedAllReduce._sum_where_they_lie = sum_and_maybe_die
torch.manual_seed(0)
model = made()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number in range(9):
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()
trained(model)
"""


def large() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 300), torch.nn.Tanh(), torch.nn.Linear(300, 90)).double()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("point", ["sum", "written", "reduced"])
def test_a_worker_may_be_killed_while_it_writes_sums_into_the_memory_of_the_others(launch, tmp_path, point):
    survivors, _, err = survivors_of(launch, tmp_path, LARGE, f"1:4:{point}")
    assert survivors.keys() == {0, 2}
    assert "worker 1 (rank 1 on localhost) was killed by SIGKILL" in err
    assert_all_have(by_one_process(f"1:4:{point}", make=large), survivors)


# In the second generation worker 1 is killed when it has told the others its address, and before gloo connects it to
# them. They would wait for it for as long as the test waits for them.
DIES_AS_IT_CONNECTS = """
import os, signal
from datetime import timedelta
import hvdlite.runtime.bootstrap as bootstrap
from hvdlite.rendezvous.launcher_store import LauncherStore
from hvdlite_wire.store_requests import StoreRequest

bootstrap._GENERATION_LIMIT = timedelta(hours=1)
ask = LauncherStore._ask


def ask_or_die(store, operation, keys, *arguments):
    is_gloo = operation is StoreRequest.GET and keys[0].startswith(os.environ.get("CONNECTS", "world2/0//cpu/"))
    if is_gloo and os.environ["HVDLITE_WORKER"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return ask(store, operation, keys, *arguments)


LauncherStore._ask = ask_or_die
"""


@pytest.mark.night
@pytest.mark.parametrize("first", ["reduce", "voted"])
def test_a_second_worker_may_be_killed_while_the_others_connect_to_it(launch, tmp_path, first):
    body = DIES_AS_IT_CONNECTS + PLAIN
    survivors, _, err = survivors_of(launch, tmp_path, body, f"3:4:{first}", size=4)
    assert survivors.keys() == {0, 2}
    # Its gradients are in the step's average, if all had the averages.
    died = f"3:4:{first},1:4:{'voted' if first == 'voted' else 'reduce'}"
    assert_all_have(by_one_process(died, size=4), survivors)
    assert "generation 3: 2 ranks; worker 1 (rank 1 on localhost) was killed by SIGKILL" in err


def test_a_worker_may_be_killed_while_the_others_connect_to_it_in_the_first_step(launch, tmp_path):
    """Gloo group 0 is opened by hvd.init(), and group 1 by the optimizer."""
    env = {"HVDLITE_SHM": "0", "CONNECTS": "world1/engines/channel1/cpu/"}
    survivors, _, _ = survivors_of(launch, tmp_path, DIES_AS_IT_CONNECTS + PLAIN, "", size=4, env=env)
    assert survivors.keys() == {0, 2, 3}
    assert_all_have(by_one_process("1:0:begin", size=4), survivors)


@pytest.mark.night
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_gradients_sent_in_16_bits_are_cast_anew_for_the_ranks_that_are_left(launch, tmp_path, wire):
    survivors, _, _ = survivors_of(launch, tmp_path, PLAIN, "1:4:reduce", env={"COMPRESSION": wire})
    assert_all_have(by_one_process("1:4:reduce"), survivors, within=2e-2)


def test_over_gloo_the_others_finish_the_step_too(launch, tmp_path):
    died = "0:3:reduce,2:6:vote"
    survivors, _, _ = survivors_of(launch, tmp_path, PLAIN, died, size=4, env={"HVDLITE_SHM": "0"})
    assert survivors.keys() == {1, 3}
    assert_all_have(by_one_process(died, size=4), survivors)


ACCUMULATING = """
model = made()
optimizer = wrapped(model, backward_passes_per_step=2)
for number in range(9):
    optimizer.zero_grad()
    for of_pass in range(2):
        model(batch(number, of_pass)).square().mean().backward()
    optimizer.step()
    maybe_die("end")
trained(model)
"""


@pytest.mark.night
@pytest.mark.parametrize("point", ["reduce", "vote"])
def test_sums_of_several_passes_are_kept_too(launch, tmp_path, point):
    died = f"1:4:{point}"
    survivors, _, _ = survivors_of(launch, tmp_path, ACCUMULATING, died)
    assert_all_have(by_one_process(died, passes=2), survivors)


UNUSED_AND_SPARSE = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(10, 6, sparse=True, dtype=torch.float64)
        self.even = torch.nn.Linear(6, 2).double()
        self.odd = torch.nn.Linear(6, 2).double()
        self.never = torch.nn.Linear(6, 2).double()

    def forward(self, rows, step):
        return (self.odd if step % 2 else self.even)(self.rows(rows))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number in range(9):
    optimizer.zero_grad()
    # Which of the two is used depends on the worker, too.
    model(torch.tensor([number, worker]), number + worker).square().mean().backward()
    optimizer.step()
assert model.never.weight.grad is None
trained(model)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("point", ["reduce", "vote"])
def test_sparse_and_unused_parameters_are_averaged_over_those_that_are_left(launch, tmp_path, point):
    survivors, _, _ = survivors_of(launch, tmp_path, UNUSED_AND_SPARSE, f"1:4:{point}")
    torch.manual_seed(0)
    rows = torch.nn.Embedding(10, 6, dtype=torch.float64)
    even, odd, never = (torch.nn.Linear(6, 2).double() for _ in range(3))
    params = [*rows.parameters(), *even.parameters(), *odd.parameters(), *never.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(STEPS):
        alive = [0, 1, 2] if step < 4 else [0, 2]
        optimizer.zero_grad()
        for worker in alive:
            chosen = odd if (step + worker) % 2 else even
            (chosen(rows(torch.tensor([step, worker]))).square().mean() / len(alive)).backward()
        optimizer.step()
    assert_all_have([param.detach() for param in params], survivors)


TWO_OPTIMIZERS = """
first, second = made(0), made(1)
of_first, of_second = wrapped(first), wrapped(second)
for number in range(9):
    of_first.zero_grad()
    first(batch(number)).square().mean().backward()
    of_first.step()
    number += 100
    of_second.zero_grad()
    (second(batch(number - 100)) - first(batch(number - 100)).detach()).square().mean().backward()
    of_second.step()
    number -= 100
trained(torch.nn.ModuleList([first, second]))
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("died", ["0:4:vote", "0:4:voted", "0:104:hook", "0:104:vote", "0:104:voted"])
def test_each_of_two_optimizers_knows_how_far_its_step_is(launch, tmp_path, died):
    survivors, _, _ = survivors_of(launch, tmp_path, TWO_OPTIMIZERS, died)
    ((_, at, point),) = deaths_of(died)
    models = [model_of(0), model_of(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for turn, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            # The number of this step in the order of all steps, and of the one in which worker 0 died.
            now, then = 2 * step + turn, 2 * (at % 100) + at // 100
            is_gone = now > then or (now == then and point not in IS_IN)
            alive = [1, 2] if is_gone else [0, 1, 2]
            optimizer.zero_grad()
            for worker in alive:
                out = model(batch(worker, step))
                out = out - models[0](batch(worker, step)).detach() if turn else out
                (out.square().mean() / len(alive)).backward()
            optimizer.step()
    assert_all_have([param.detach() for model in models for param in model.parameters()], survivors)


CLIPPED = """
model = made()
optimizer = wrapped(model)
for number in range(9):
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        optimizer.step()
trained(model)
"""


@pytest.mark.night
@pytest.mark.parametrize("point", ["hook", "vote", "voted"])
def test_averages_that_are_clipped_between_synchronize_and_step_are_those_of_one_process(launch, tmp_path, point):
    died = f"1:4:{point}"
    survivors, _, _ = survivors_of(launch, tmp_path, CLIPPED, died)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        alive = [0, 1, 2] if step < 4 or (step == 4 and point in IS_IN) else [0, 2]
        optimizer.zero_grad()
        for worker in alive:
            (model(batch(worker, step)).square().mean() / len(alive)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert_all_have([param.detach() for param in model.parameters()], survivors)


ELASTIC = """
import hvdlite.elastic

model = made()
optimizer = wrapped(model)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
calls = 0


def scale():
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * hvd.size() / 3


state.register_reset_callbacks([scale])


@hvd.elastic.run
def train(state):
    global calls, number
    calls += 1
    while state.batch < 9:
        number = state.batch
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
        state.batch += 1
        if number == 1:
            state.commit()


train(state)
assert calls == 1, calls
trained(model)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("point", ["hook", "vote", "voted"])
def test_an_elastic_function_goes_on_without_being_called_again_and_its_callbacks_run(launch, tmp_path, point):
    died = f"1:4:{point}"
    survivors, _, err = survivors_of(launch, tmp_path, ELASTIC, died)
    assert_all_have(by_one_process(died, lr=lambda alive: 0.1 * alive / 3), survivors)
    assert "going back to the last commit" not in err
    assert "stays as it is" not in err


GROWS_AGAIN = """
import time
import hvdlite.elastic

model = made()
optimizer = wrapped(model)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, sizes=[])


@hvd.elastic.run
def train(state):
    global number
    while len(state.sizes) < 9 or hvd.size() < 3:
        number = state.batch
        optimizer.zero_grad()
        model(torch.ones(2, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        state.batch += 1
        state.sizes.append(hvd.size())
        time.sleep(0.05)
        state.commit()


train(state)
assert state.batch == len(state.sizes), state.batch
if worker == 0:
    print("sizes", *dict.fromkeys(zip(state.sizes, state.sizes[1:])), flush=True)
trained(model)
"""


def test_a_replacement_joins_at_a_commit_with_the_state_of_the_others(launch, tmp_path):
    flags = ("--on-failure", "replace")
    survivors, out, err = survivors_of(launch, tmp_path, GROWS_AGAIN, "1:4:reduce", flags=flags)
    assert survivors.keys() == {0, 2, 3}
    assert "worker 3 joins as rank 2" in err
    assert re.search(r"sizes \(3, 3\) \(3, 2\) (\(2, 2\) )?\(2, 3\)", out), out
    first, *others = survivors.values()
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert "going back to the last commit" not in err


COUNTS_BATCHES = """
import hvdlite.elastic

model = made()
optimizer = wrapped(model)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
computed = 0


@hvd.elastic.run
def train(state):
    global number, computed
    while state.batch < 9:
        number = state.batch
        model(batch(number)).square().mean().backward()
        computed += 1
        optimizer.step()
        optimizer.zero_grad()
        state.batch += 1
        state.commit()


train(state)
print("computed", worker, computed, flush=True)
trained(model)
"""


def test_below_min_np_the_others_keep_their_gradients_until_replacements_are_there_to_join_after_the_step(
    launch, tmp_path
):
    flags = ("--min-np", "3", "--on-failure", "replace")
    survivors, out, err = survivors_of(launch, tmp_path, COUNTS_BATCHES, "0:4:hook,1:4:reduce", flags=flags)
    assert survivors.keys() == {2, 3, 4}
    assert "waiting 600 s (--elastic-timeout) for at least 3 workers (--min-np): so far 3 workers" in err
    # The step has the average of the one that is left, computed once; the others train from the next on.
    assert_all_have(on_batches_of([[0, 1, 2]] * 4 + [[2]] + [[2, 3, 4]] * 4), survivors)
    assert sorted(re.findall("computed (.*)", out)) == ["2 9", "3 4", "4 4"]


@pytest.mark.night
def test_below_min_np_the_step_is_begun_again_with_replacements_where_process_sets_need_them(launch, tmp_path):
    flags = ("--min-np", "3", "--on-failure", "replace")
    env = {"SETS": "1"}
    survivors, out, _ = survivors_of(launch, tmp_path, COUNTS_BATCHES, "1:4:reduce", flags=flags, env=env)
    assert survivors.keys() == {0, 2, 3}
    assert_all_have(on_batches_of([[0, 1, 2]] * 4 + [[0, 2, 3]] * 5), survivors)
    assert sorted(re.findall("computed (.*)", out)) == ["0 10", "2 10", "3 5"]


OWN_COLLECTIVE = """
from hvdlite.comm.group import Group

def with_death(method):
    def die_or_begin(group, *arguments):
        if os.environ["WHERE"] == "in it" and any("of the program" in str(each) for each in arguments):
            maybe_die("end")
        return method(group, *arguments)

    return die_or_begin

Group.all_reduce, Group.all_reduce_into = map(with_death, [Group.all_reduce, Group.all_reduce_into])
model = made()
optimizer = wrapped(model)
raised = 0
for number in range(9):
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()
    if os.environ["WHERE"] == "before it":
        maybe_die("end")
    try:
        hvd.allreduce(torch.ones(3000), name="of the program")
    except hvd.PeerLostError:
        raised += 1
assert raised == 1, raised
trained(model)
"""


# In it: all ranks have called it, so that the others wait in their engines, which smaller tensors do not use.
@pytest.mark.parametrize("where", ["before it", "in it"])
def test_a_collective_of_the_program_raises_once_on_every_rank_and_the_next_step_goes_on(launch, tmp_path, where):
    died = "1:4:end"
    survivors, _, _ = survivors_of(launch, tmp_path, OWN_COLLECTIVE, died, env={"WHERE": where})
    assert_all_have(by_one_process(died), survivors)


REFUSED = """
model = made()
plain = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
for name, arguments in {
    "step_on_arrival": {"step_on_arrival": True},
    "Adasum": {"op": hvd.Adasum},
    "exchange=": {"exchange": hvd.Exchange},
    "process_set": {"process_set": hvd.add_process_set([0])},
}.items():
    try:
        hvd.DistributedOptimizer(plain(), named_parameters=model.named_parameters(), **arguments)
    except ValueError as error:
        assert name in str(error) and "--survive" in str(error), error
    else:
        raise AssertionError(name)
try:
    hvd.join()
except ValueError as error:
    assert "--survive" in str(error), error
else:
    raise AssertionError("join")
trained(model)
"""


def test_what_cannot_survive_is_refused_by_name(launch, tmp_path):
    survivors, _, _ = survivors_of(launch, tmp_path, REFUSED, "9:9:none", size=2)
    assert len(survivors) == 2


@pytest.mark.night(but=1)
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_job_whose_ranks_cannot_change_is_told_how_to_start_it(launch, how):
    flags, env = (["--survive"], {}) if how == "flag" else ([], {"HVDLITE_SURVIVE": "1"})
    job = launch(*flags, "-np", "2", sys.executable, "-c", "import hvdlite as hvd; hvd.init()", env=env)
    code, _, err = job.ended(PATIENCE_S)
    assert code != 0
    told = err.decode()
    assert "--survive has no meaning here" in told if how == "flag" else "hvdlite-run --survive --min-np N" in told
    job.assert_gone()


@pytest.mark.night
def test_a_bug_on_all_ranks_ends_the_job_with_its_traceback(launch, tmp_path):
    body = PLAIN.replace('maybe_die("begin")', "1 / (3 - number)")
    program = PROGRAM + body
    variables = {"RESULTS": str(tmp_path), "DIE": ""}
    job = launch("-np", "3", "--min-np", "1", "--survive", sys.executable, "-c", program, env=variables)
    code, _, err = job.ended(PATIENCE_S)
    assert code == 1
    assert "ZeroDivisionError" in err.decode()
    job.assert_gone()


# Each step tells how much shared memory has been mapped since the one before, apart from the control blocks.
COUNTS_MEMORY = """
from hvdlite.shm import segment
from hvdlite.shm.control_block import CONTROL_BLOCK_BYTES

mapped, usual = [], segment._map


def counting(fd, offset, length, **more):
    mapped.append(length)
    return usual(fd, offset, length, **more)


segment._map = counting
model = made()
optimizer = wrapped(model)
for number in range(6):
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()
    print("mapped", worker, number, [each for each in mapped if each > CONTROL_BLOCK_BYTES + 4096], flush=True)
    places = [param.grad.data_ptr() for param in model.parameters()]
    print("places", worker, number, hash(tuple(places)), flush=True)
    mapped.clear()
trained(model)
"""


@pytest.mark.night
def test_the_ranks_that_are_left_use_the_memory_that_they_have(launch, tmp_path):
    _, out, _ = survivors_of(launch, tmp_path, COUNTS_MEMORY, "1:3:reduce", size=4)
    lines = re.findall(r"(mapped|places) (\d+) (\d+) (.*)", out)
    told = {(kind, int(worker), int(number)): rest for kind, worker, number, rest in lines}
    for worker in (0, 2, 3):
        assert told["mapped", worker, 0] != "[]"
        assert [told["mapped", worker, number] for number in (3, 4)] == ["[]", "[]"]
        assert len({told["places", worker, number] for number in (2, 3, 4, 5)}) == 1
