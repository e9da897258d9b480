"""``hvdlite-run --survive`` over two hosts, by shared memory and gloo: a worker is lost, or a whole host.

The parameters that are left are those of one process, as in `test_survive`.
"""

from __future__ import annotations

import sys

import pytest
import torch
from e2e.conftest import assert_clean
from e2e.machines import kill_all
from e2e.test_survive import PATIENCE_S, PLAIN, PROGRAM, assert_all_have, by_one_process

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
    assert code == 0, err.decode()
    return {int(each.stem): torch.load(each) for each in (tmp_path / "results").iterdir()}, err.decode()


@pytest.mark.parametrize("died", ["0:4:reduce", "1:3:hook,2:6:voted", "0:4:vote,1:4:vote"])
def test_workers_on_two_hosts_finish_the_step_in_which_others_are_killed(make_lan, launch, tmp_path, died):
    lan, job = start(make_lan, launch, tmp_path, PLAIN, died)
    survivors, _ = survivors_of(job, tmp_path)
    assert survivors.keys() == {0, 1, 2, 3} - {int(each[0]) for each in died.split(",")}
    assert_all_have(by_one_process(died, size=4), survivors)
    assert_clean(lan)


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
        assert_clean(lan, 30)


# At its point a worker says so, and goes on when the test has made a file.
GOES_ON = """
import time


def maybe_die(point):
    if (str(worker), str(number), point) in deaths:
        print("is at", point, flush=True)
        while not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.01)
"""


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


@pytest.mark.parametrize("kind", ["agent", "host"])
def test_chaos_loses_the_whole_host_of_a_worker(make_lan, launch, tmp_path, kind):
    lan, job = start(make_lan, launch, tmp_path, PLAIN, "", f"--chaos={kind}@vote:worker=2:step=4")
    survivors, err = survivors_of(job, tmp_path)
    assert survivors.keys() == {0, 1}
    assert_all_have(by_one_process("2:4:vote,3:4:vote", size=4), survivors)
    assert f"{kind}@vote" in err
    assert "nothing: finished within the step" in err
    assert_clean(lan)
