"""``hvdlite-run --survive`` over several hosts, by shared memory and gloo: a worker is lost, or a whole host.

The parameters that are left are those of one process, as in `test_survive`. With codecs they are not: there they are
equal on all hosts, and what has not come into them is kept.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from e2e.conftest import assert_clean
from e2e.machines import kill_all
from e2e.test_survive import (
    IS_IN,
    LOST_WHILE_CONNECTING,
    PATIENCE_S,
    PLAIN,
    PROGRAM,
    STEPS,
    assert_all_have,
    by_one_process,
)

pytestmark = pytest.mark.slow

# At its point a worker says so, and waits for what the test does to its host.
WAITS = """
import time


def maybe_die(point):
    if (str(worker), str(number), point) in deaths:
        print("is at", point, flush=True)
        while True:
            time.sleep(1000)
"""


def start(make_lan, launch, tmp_path, body: str, died: str, *more_flags: str):
    """Starts a job with workers 0 and 1 on the first host, and 2 and 3 on the second."""
    lan = make_lan("b", "c")
    results = tmp_path / "results"
    results.mkdir()
    hosts = ",".join(f"{host.spec}:2" for host in lan.hosts)
    flags = (*more_flags, "--survive", "--min-np", "1", "--on-failure", "shrink", "-H", hosts)
    env = {"DIE": died, "RESULTS": str(results)}
    return lan, launch(*flags, sys.executable, "-c", PROGRAM + body, env=env, on=lan.desk)


def survivors_of(job, tmp_path) -> tuple[dict[int, list[torch.Tensor]], str]:
    """Returns the parameters of the workers that ended with the job, by their numbers, and what was said."""
    code, _, err = job.ended(PATIENCE_S)
    print(err.decode())  # which pytest shows with a failure
    assert code == 0
    return {int(each.stem): torch.load(each) for each in (tmp_path / "results").iterdir()}, err.decode()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("died", ["0:4:reduce", "1:3:hook,2:6:voted", "0:4:vote,1:4:vote"])
def test_workers_on_two_hosts_finish_the_step_in_which_others_are_killed(make_lan, launch, tmp_path, died):
    lan, job = start(make_lan, launch, tmp_path, PLAIN, died)
    survivors, _ = survivors_of(job, tmp_path)
    assert survivors.keys() == {0, 1, 2, 3} - {int(each[0]) for each in died.split(",")}
    assert_all_have(by_one_process(died, size=4), survivors)
    assert_clean(lan)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("how", "lost"), [("power", 0), ("power", 1), ("link", 0)])
def test_workers_finish_the_step_in_which_the_other_host_is_lost(make_lan, launch, tmp_path, how, lost):
    first, second = (0, 1) if lost == 0 else (2, 3)
    lan, job = start(make_lan, launch, tmp_path, WAITS + PLAIN, f"{second}:4:reduce")
    line = job.process.stdout.readline()
    assert b"is at reduce" in line, job.process.stderr.read().decode()
    host = lan.hosts[lost]
    if how == "power":
        kill_all(host.processes())
    else:
        lan.cut(host)
    survivors, err = survivors_of(job, tmp_path)
    assert f"hvdlite-run: lost {host.spec}: " in err
    assert survivors.keys() == {0, 1, 2, 3} - {first, second}
    assert_all_have(by_one_process(f"{first}:4:reduce,{second}:4:reduce", size=4), survivors)
    if how == "link":
        lan.restore(host)
        assert_clean(lan, 90)


# At its point a worker says so, and goes on when the test has made a file.
GOES_ON = """
import time


def maybe_die(point):
    if (str(worker), str(number), point) in deaths:
        print("is at", point, flush=True)
        while not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.01)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("slots", "lost"), [((2, 2), 1), ((1, 2), 0)])
def test_workers_finish_the_step_in_which_the_network_to_the_other_host_is_cut(make_lan, launch, tmp_path, slots, lost):
    lan = make_lan("b", "c")
    results, go_on = tmp_path / "results", tmp_path / "go on"
    results.mkdir()
    hosts = ",".join(f"{host.spec}:{count}" for host, count in zip(lan.hosts, slots, strict=True))
    flags = ("--survive", "--min-np", "1", "--on-failure", "shrink", "--hang-timeout", "12", "-H", hosts)
    env = {"DIE": "1:4:reduce", "RESULTS": str(results), "GO_ON": str(go_on)}
    job = launch(*flags, sys.executable, "-c", PROGRAM + GOES_ON + PLAIN, env=env, on=lan.desk)
    line = job.process.stdout.readline()
    assert b"is at reduce" in line, job.process.stderr.read().decode()
    lan.cut_between(*lan.hosts)
    go_on.touch()
    survivors, err = survivors_of(job, tmp_path)
    gone, other = lan.hosts[lost].spec, lan.hosts[1 - lost].spec
    assert f"hvdlite-run: lost {gone}: the network between it and {other} is cut: nothing came over it for " in err
    numbers = [range(slots[0]), range(slots[0], sum(slots))]
    assert survivors.keys() == set(numbers[1 - lost])
    died = ",".join(f"{worker}:4:reduce" for worker in numbers[lost])
    assert_all_have(by_one_process(died, size=sum(slots)), survivors)
    assert_clean(lan)


# When the ranks of the second generation have met, and before they connect, worker 0 waits until the test has made a
# file. They would wait for each other for as long as the test waits for them.
CONNECTS_LATER = """
from datetime import timedelta
import time
from hvdlite.runtime import bootstrap, make_world

bootstrap._GENERATION_LIMIT = timedelta(hours=1)
exchange = make_world.exchange_rank_info


def exchange_and_wait(store, own, *arguments):
    exchanged = exchange(store, own, *arguments)
    if own.placement.worker == 0 and own.placement.size == 3:
        print("connects", flush=True)
        while not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.01)
    return exchanged


make_world.exchange_rank_info = exchange_and_wait
"""


@pytest.mark.night
def test_a_network_that_is_cut_before_the_ranks_that_are_left_have_connected_is_a_loss_too(make_lan, launch, tmp_path):
    lan = make_lan("b", "c")
    results, go_on = tmp_path / "results", tmp_path / "go on"
    results.mkdir()
    hosts = ",".join(f"{host.spec}:2" for host in lan.hosts)
    flags = ("--survive", "--min-np", "1", "--on-failure", "shrink", "--hang-timeout", "12", "-H", hosts)
    env = {"DIE": "1:4:reduce", "RESULTS": str(results), "GO_ON": str(go_on)}
    program = PROGRAM.replace("hvd.init(", CONNECTS_LATER + "\nhvd.init(", 1) + PLAIN
    job = launch(*flags, sys.executable, "-c", program, env=env, on=lan.desk)
    line = job.process.stdout.readline()
    assert b"connects" in line, job.process.stderr.read().decode()
    lan.cut_between(*lan.hosts)
    go_on.touch()
    survivors, err = survivors_of(job, tmp_path)
    gone, other = lan.hosts[0].spec, lan.hosts[1].spec
    assert f"hvdlite-run: lost {gone}: the network between it and {other} is cut: nothing came over it for " in err
    assert survivors.keys() == {2, 3}
    assert_all_have(by_one_process("0:4:reduce,1:4:reduce", size=4), survivors)
    assert_clean(lan)


# Each worker writes down, before and after each step, its parameters and what it has not sent of its gradients.
CODED = """
form = {
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4,
    "topk": hvd.Compression.topk(0.1),
    "powersgd": hvd.Compression.powersgd(rank=2, start_step=2),
}[os.environ["FORM"]]
model = made()
params = list(model.parameters())
next(iter(model[2].parameters())).register_post_accumulate_grad_hook(lambda _: maybe_die("hook"))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(params, lr=1.0), model.named_parameters(), bucket_cap_mb=0.0005, compression=form)


def flat():
    return torch.cat([param.view(-1) for param in params])


def found():
    kept = []
    residuals = optimizer.state_dict().get("hvdlite", {}).get("exchange", {}).get("residuals", {})
    for name, param in model.named_parameters():
        kept.append(torch.zeros(param.numel(), dtype=param.dtype))
        for start, scale, values in residuals.get(name, {}).values():
            kept[-1][start : start + len(values)] += values / scale
    return flat().detach(), torch.cat(kept)


steps = []
for number in range(9):
    before = found()
    maybe_die("begin")
    optimizer.zero_grad()
    gradient = torch.randn(len(flat()), generator=torch.Generator().manual_seed(100 * number + worker))
    (flat() * gradient).sum().backward()
    optimizer.step()
    steps.append((before, found(), hvd.size()))
    maybe_die("end")
torch.save(steps, os.environ["RESULTS"] + f"/{worker}.pt")
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("slots", "form", "died"),
    [
        ((2, 2), "int8", "1:4:hook"),
        ((2, 2), "int4", "0:4:vote"),
        ((2, 2), "powersgd", "3:4:reduce"),
        ((2, 2), "topk", "2:4:voted"),
        ((1, 1, 1), "int8", "1:4:vote"),
        ((1, 1, 1), "powersgd", "0:4:hook"),
        ((2, 3), "int4", "4:4:vote"),
    ],
)
def test_with_a_codec_the_others_finish_the_step_with_what_they_had_kept_before_it(
    make_lan, launch, tmp_path, slots, form, died
):
    lan = make_lan(*"bcd"[: len(slots)])
    results = tmp_path / "results"
    results.mkdir()
    hosts = ",".join(f"{host.spec}:{count}" for host, count in zip(lan.hosts, slots, strict=True))
    flags = ("--survive", "--min-np", "1", "--on-failure", "shrink", "-H", hosts)
    env = {"DIE": died, "RESULTS": str(results), "FORM": form}
    job = launch(*flags, sys.executable, "-c", PROGRAM + CODED, env=env, on=lan.desk)
    code, _, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    survivors = {int(each.stem): torch.load(each) for each in results.iterdir()}
    lost, point = int(died[0]), died[4:]
    assert survivors.keys() == set(range(sum(slots))) - {lost}
    assert f"survive: the residual of rank {lost} (" in err.decode()
    for step in range(4 + (point in IS_IN), STEPS):
        before, after, sizes = zip(*(each[step] for each in survivors.values()), strict=True)
        assert set(sizes) == {len(survivors)}
        assert all(torch.equal(params, after[0][0]) for params, _ in after), "they differ in bits"
        sent = (before[0][0] - after[0][0]) * len(survivors)
        given = sum(
            torch.randn(len(sent), generator=torch.Generator().manual_seed(100 * step + worker)) for worker in survivors
        )
        kept_before, kept_after = (sum(kept for _, kept in found) for found in (before, after))
        assert kept_before.any()
        assert torch.allclose(sent + kept_after, given + kept_before, rtol=0, atol=1e-5)
    assert_clean(lan)


@pytest.mark.night
@pytest.mark.parametrize("first", range(0, 12, 4))
def test_a_worker_may_be_killed_at_each_request_with_which_the_others_on_two_hosts_connect(
    make_lan, launch, tmp_path, first
):
    """Workers 2 to 5 are killed at four requests in a row, by worker 7 on their host, and worker 0 before them."""
    lan = make_lan("b", "c")
    results = tmp_path / "results"
    results.mkdir()
    hosts = f"{lan.hosts[0].spec}:2,{lan.hosts[1].spec}:6"
    flags = ("--survive", "--min-np", "1", "--on-failure", "shrink", "-H", hosts)
    env = {"DIE": "0:4:hook", "RESULTS": str(results), "FIRST": str(first), "FIRST_VICTIM": "2", "LAST_GENERATION": "5"}
    job = launch(*flags, sys.executable, "-c", PROGRAM + LOST_WHILE_CONNECTING + PLAIN, env=env, on=lan.desk)
    out = job.process.stdout.read().decode()
    survivors, err = survivors_of(job, tmp_path)
    print(out)
    killed = [int(each) for each in re.findall("killed (.*) at request", out)]
    assert killed == list(range(2, 2 + len(killed)))
    assert survivors.keys() == set(range(1, 8)) - set(killed)
    assert_all_have(by_one_process("0:4:hook" + "".join(f",{each}:4:begin" for each in killed), size=8), survivors)
    assert "the same ranks again" not in err
    assert_clean(lan)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("kind", "point"), [("agent", "vote"), ("host", "vote"), ("link", "begin")])
def test_chaos_loses_the_whole_host_of_a_worker(make_lan, launch, tmp_path, kind, point):
    flags = (f"--chaos={kind}@{point}:worker=2:step=4", "--hang-timeout", "12")
    lan, job = start(make_lan, launch, tmp_path, PLAIN, "", *flags)
    survivors, err = survivors_of(job, tmp_path)
    assert survivors.keys() == {0, 1}, err
    assert_all_have(by_one_process("2:4:vote,3:4:vote", size=4), survivors)
    assert f"{kind}@{point}" in err
    assert ("the network between it and " in err) is (kind == "link")
    assert_clean(lan)
