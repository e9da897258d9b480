"""Elastic jobs of hvdlite-run, with workers that speak the store's protocol and need neither torch nor a network."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from e2e.conftest import PATIENCE_S, assert_clean, wait_until

pytestmark = pytest.mark.slow

# Asks for its rank and meets the others, and says so. A rank with a file DIR/kill.GENERATION.RANK kills itself; rank 0
# leaves with the others when hosts have changed. The job is over in the generation of a file DIR/over.GENERATION, or
# when it has as many ranks as a file DIR/enough.SIZE says. With a number of ranks in its arguments, a worker that takes
# the place of a lost one asks only when a generation without that one has begun, so that none is left out. A worker
# with a file DIR/imports.NUMBER has not come as far as hvd.init() while the file is there.
WORKER = """
import os, signal, sys, time
from hvdlite_wire.store_requests import ANSWERS, Dismissal, assignment_key
from hvdlite_wire.store_requests import StoreRequest
from hvdlite.rendezvous.store_client import StoreClient

directory, me, after = sys.argv[1], os.environ["HVDLITE_WORKER"].encode(), 0
client = StoreClient.from_url(os.environ["HVDLITE_STORE"])
whole = int(sys.argv[2]) if len(sys.argv) > 2 else 0

def note_size(size):
    with open(f"{directory}/size.new", "w") as file:
        file.write(str(size))
    os.rename(file.name, f"{directory}/size")

while 0 < whole <= int(me) and int(open(f"{directory}/size").read()) == whole:
    time.sleep(0.01)
if os.path.exists(f"{directory}/imports.{me.decode()}"):
    print("imports", flush=True)
    while os.path.exists(f"{directory}/imports.{me.decode()}"):
        time.sleep(0.01)
while True:
    client.request(StoreRequest.INIT_STARTED, [me, b"%d" % after])
    given = ANSWERS.decode(client.get([assignment_key(int(me), after)])[0])
    if isinstance(given, Dismissal):
        print("dismissed:", given.why, flush=True)
        sys.exit()
    world, rank, size = f"{given.prefix}/".encode(), given.rank, given.size
    try:
        if rank == 0:
            note_size(size)
        client.set({world + b"%d" % rank: me})
        members = b" ".join(client.get([world + b"%d" % each for each in range(size)])).decode()
        client.request(StoreRequest.INIT_DONE, [me, b"%d" % after])
        print(f"generation {given.generation}: {members} at {os.environ['LOCAL_RANK']}", flush=True)
        if os.path.exists(f"{directory}/kill.{given.generation}.{rank}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.path.exists(f"{directory}/over.{given.generation}") or os.path.exists(f"{directory}/enough.{size}"):
            client.set({world + b"over%d" % rank: b""})
            client.get([world + b"over%d" % each for each in range(size)])
            sys.exit()
        if rank == 0:
            client.set({world + b"leave": client.get([world + b"hosts/0"])[0]})
        client.get([world + b"leave"])
    except ValueError as error:
        print("released:", error, flush=True)
    after = given.generation
"""


def generations(out: bytes) -> dict[int, str]:
    """The members of each generation, as its ranks have said."""
    said = re.findall(r"generation (\d+): ([\d ]+) at", out.decode())
    members = {}
    for number, each in said:
        assert members.setdefault(int(number), each) == each, "two ranks of a generation know different members"
    return members


def reads(job) -> Callable[[bytes], None]:
    """A function that reads what the workers write until a line contains its argument."""

    def until(text: bytes) -> None:
        line = b""
        while text not in line:
            line = job.process.stdout.readline()
            assert line, f"the job ended without {text!r}: {job.process.stderr.read().decode()}"

    return until


def says(job, text: str) -> None:
    """Reads what hvdlite-run writes itself until a line contains the text."""
    line = b""
    while text.encode() not in line:
        line = job.process.stderr.readline()
        assert line, f"the job ended without {text!r}"


def _number(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("HVDLITE_WORKER")
    except psutil.Error:  # it has just ended
        return None


def test_killed_ranks_are_replaced_and_rank_0_is_the_oldest_that_is_left(launch, tmp_path):
    for name in ("kill.1.1", "kill.3.0", "over.7"):
        (tmp_path / name).touch()
    job = launch("-np", "3", "--min-np", "2", "python", "-c", WORKER, tmp_path, "3", env={"PYTHONUNBUFFERED": "1"})
    read = reads(job)
    read(b"generation 5: 2 3 4")
    (worker,) = [each for each in job.processes() if _number(each) == "3"]
    worker.send_signal(signal.SIGKILL)
    code, out, err = job.ended()
    told = err.decode()
    assert code == 0, told
    assert generations(out)[7] == "2 4 5"
    assert "hvdlite-run: generation 2: 2 ranks; worker 1 (rank 1 on localhost) was killed by SIGKILL\n" in told
    assert "hvdlite-run: generation 3: 3 ranks; worker 3 joins as rank 2 on localhost\n" in told
    assert "hvdlite-run: generation 4: 2 ranks; worker 0 (rank 0 on localhost) was killed by SIGKILL\n" in told
    assert re.search(r"\n +7 +[\d.]+ s +3  \+ worker 5 joins as rank 2 on localhost\n", told)
    job.assert_gone()


@pytest.mark.night
def test_a_joiner_gets_the_slot_of_the_one_that_was_lost_and_output_the_rank_that_its_worker_has(launch, tmp_path):
    (tmp_path / "kill.1.0").touch()
    (tmp_path / "over.3").touch()
    job = launch("-np", "2", "--min-np", "1", "python", "-c", WORKER, tmp_path, "2")
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert b"[0]<stdout>:generation 3: 1 2 at 1\n" in out
    assert b"[1]<stdout>:generation 3: 1 2 at 0\n" in out


@pytest.mark.night
def test_output_files_are_named_by_workers(launch, tmp_path):
    (tmp_path / "kill.1.0").touch()
    (tmp_path / "over.3").touch()
    files = tmp_path / "files"
    job = launch("-np", "2", "--min-np", "1", "--output-filename", files, "python", "-c", WORKER, tmp_path, "2")
    assert job.ended()[0] == 0
    assert sorted(path.name for path in files.iterdir()) == ["worker.0", "worker.1", "worker.2"]
    assert (files / "worker.2" / "stdout").read_bytes() == b"generation 3: 1 2 at 0\n"


@pytest.mark.night
def test_a_job_whose_ranks_all_fail_ends_as_one_that_is_not_elastic(launch):
    program = "import sys; sys.exit('bad config')"
    job = launch("-np", "2", "--min-np", "1", "python", "-c", program)
    code, _, err = job.ended()
    assert code == 1
    assert err.decode().endswith("failed first, with exit code 1. The end of its stderr:\n    bad config\n")
    job.assert_gone()


@pytest.mark.night
def test_a_signal_ends_an_elastic_job_and_nothing_is_left(launch, tmp_path):
    job = launch("-np", "2", "--min-np", "1", "python", "-c", WORKER, tmp_path)
    reads(job)(b"generation 1: 0 1")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended()[0] == 143
    job.assert_gone()


@pytest.mark.new_processes("it kills the agent and its parent")
@pytest.mark.night
def test_the_agent_of_the_only_host_killed_ends_the_job_and_nothing_is_left(launch, tmp_path):
    job = launch("-np", "2", "--min-np", "1", "python", "-c", WORKER, tmp_path)
    reads(job)(b"generation 1: 0 1")
    parent, agent = job.remote_parent(), job.agent()
    for process in (parent, agent):
        process.send_signal(signal.SIGKILL)
    code, _, err = job.ended()
    assert code == 1
    assert b"lost localhost: its hvdlite agent was killed by SIGKILL" in err
    job.assert_gone()


def test_the_launcher_killed_leaves_nothing_of_an_elastic_job(launch, tmp_path):
    job = launch("-np", "2", "--min-np", "1", "python", "-c", WORKER, tmp_path)
    reads(job)(b"generation 1: 0 1")
    job.launcher().send_signal(signal.SIGKILL)
    job.ended()
    job.assert_gone()


@pytest.mark.night
def test_standard_input_goes_to_rank_0(launch):
    program = "import os, sys; print(os.environ['HVDLITE_WORKER'], sys.stdin.read())"
    job = launch("-np", "2", "--min-np", "1", "python", "-c", program, stdin=subprocess.PIPE)
    out, _ = job.process.communicate(b"word", timeout=PATIENCE_S)
    assert sorted(out.splitlines()) == [b"[worker 0]<stdout>:0 word", b"[worker 1]<stdout>:1 "]


LIMITS = {
    "flags": ["--min-num", "1", "--num-p=2", "--host-disc", "echo localhost", "--slots-per", "2", "--reset-l", "1"],
    "a config file": ["--config", "job.yaml"],
}


@pytest.mark.night
@pytest.mark.parametrize("flags", LIMITS.values(), ids=LIMITS)
def test_a_job_whose_ranks_change_more_often_than_the_reset_limit_allows_ends(launch, tmp_path, flags):
    (tmp_path / "job.yaml").write_text(
        "min-num-proc: 1\nnum-proc: 2\nhost-discovery-script: echo localhost\nslots: 2\nreset-limit: 1\n"
    )
    (tmp_path / "kill.1.1").touch()
    job = launch(*flags, "python", "-c", WORKER, tmp_path, "2", cwd=tmp_path)
    code, out, err = job.ended()
    assert code == 1, err.decode()
    assert generations(out) == {1: "0 1", 2: "0"}
    told = "\nhvdlite-run: --reset-limit 1: the ranks have changed more often. rank 1 on localhost (pid "
    assert told in err.decode()
    assert b" was the last to fail, killed by SIGKILL" in err
    job.assert_gone()


@pytest.mark.night
def test_a_worker_whose_slot_is_removed_before_it_has_a_rank_ends_well_and_the_others_take_no_notice(launch, tmp_path):
    write(tmp_path, "localhost:1")
    (tmp_path / "imports.1").touch()
    (tmp_path / "enough.2").touch()
    flags = ["--verbose", "--min-np", "1", "--host-discovery-script", f"cat {tmp_path}/hosts"]
    job = launch(*flags, "python", "-c", WORKER, tmp_path)
    read = reads(job)
    read(b"generation 1: 0 at 0")
    write(tmp_path, "localhost:2")
    read(b"[worker 1]<stdout>:imports")
    says(job, "hosts: localhost:2")
    write(tmp_path, "localhost:1")
    says(job, "hosts: localhost:1")
    (tmp_path / "imports.1").unlink()
    read(b"[worker 1]<stdout>:dismissed: slot 1 of localhost has been removed from the job\n")
    says(job, "worker 1 ended with exit code 0")
    write(tmp_path, "localhost:2")
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert generations(out) == {2: "0 2"}
    assert b"generation 2: 2 ranks; worker 2 joins as rank 1 on localhost\n" in err
    job.assert_gone()


# ------------------------------------------------------------------------ hosts


def discovery(lan, tmp_path, *hosts: str) -> list[str]:
    """Flags for discovery by a file, which has these hosts now."""
    write(tmp_path, *hosts)
    return ["--host-discovery-script", f"cat {tmp_path}/hosts"]


def write(tmp_path, *hosts: str) -> None:
    (tmp_path / "new").write_text("".join(f"{host}\n" for host in hosts))
    (tmp_path / "new").rename(tmp_path / "hosts")


IMPORTS_NOTHING_LATER = """
import sys
import torch
import hvdlite as hvd

hvd.init()
before = set(sys.modules)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
print("imported later:", len(set(sys.modules) - before), flush=True)
"""


@pytest.mark.night
def test_a_worker_imports_what_optimizers_need_before_the_others_wait_for_it(launch):
    code, out, err = launch("-np", "1", "--min-np", "1", "python", "-c", IMPORTS_NOTHING_LATER).ended()
    assert code == 0, err.decode()
    assert b"imported later: 0" in out


def test_a_host_comes_goes_and_comes_again(make_lan, launch, tmp_path):
    lan = make_lan("b", "c")
    b, c = (host.spec for host in lan.hosts)
    flags = discovery(lan, tmp_path, f"{b}:1")
    job = launch("--min-np", "1", *flags, "python", "-c", WORKER, tmp_path, on=lan.desk)
    read = reads(job)
    read(b"generation 1: 0 at 0")
    write(tmp_path, f"{b}:1", f"{c}:2")
    read(b"generation 2: 0 ")
    write(tmp_path, f"{b}:1")
    wait_until(lambda: not lan.hosts[1].processes())
    (tmp_path / "enough.2").touch()
    write(tmp_path, f"{b}:1", f"{c}:1")
    read(f"dismissed: {c} has been removed from the job".encode())
    code, out, err = job.ended()
    assert code == 0, err.decode()
    *_, last = sorted(generations(out).items())
    assert re.fullmatch(r"0 \d", last[1])
    assert f"has left: {c} has been removed from the job".encode() in err
    assert_clean(lan)


def test_a_host_whose_link_is_cut_is_lost_and_its_ranks_with_it(make_lan, launch, tmp_path):
    lan = make_lan("b", "c")
    b, c = (host.spec for host in lan.hosts)
    (tmp_path / "over.2").touch()
    job = launch("--min-np", "1", "-H", f"{b}:1,{c}:1", "python", "-c", WORKER, tmp_path, on=lan.desk)
    read = reads(job)
    read(b"generation 1: 0 1")
    lan.cut(lan.hosts[1])
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert generations(out)[2] == "0"
    assert f"hvdlite-run: lost {c}: ".encode() in err
    lan.restore(lan.hosts[1])
    assert_clean(lan, 90)


@pytest.mark.night
def test_a_host_that_cannot_be_reached_is_done_without(make_lan, launch, tmp_path):
    lan = make_lan("b", "c")
    lan.hosts[1].refuse_keys()
    b, c = (host.spec for host in lan.hosts)
    (tmp_path / "over.1").touch()
    job = launch("--min-np", "1", "-H", f"{b}:1,{c}:1", "python", "-c", WORKER, tmp_path, on=lan.desk)
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert generations(out) == {1: "0"}
    assert f"hvdlite-run: {c}: ".encode() in err
    assert_clean(lan)


@pytest.mark.night
def test_a_host_that_had_a_failure_gets_workers_again_once_its_cooldown_is_over_and_not_before(
    make_lan, launch, tmp_path
):
    lan = make_lan("b", "c")
    b, c = (host.spec for host in lan.hosts)
    (tmp_path / "kill.1.1").touch()
    (tmp_path / "over.2").touch()
    cooldown_s = 8  # a worker that is started at once is there much earlier
    flags = ["--on-failure", "blacklist", "--blacklist-cooldown-range", str(cooldown_s), str(cooldown_s)]
    hosts = ["--min-np", "2", "-H", f"{b}:1,{c}:1"]
    began_s = time.monotonic()
    job = launch(*flags, *hosts, "python", "-c", WORKER, tmp_path, on=lan.desk)
    reads(job)(b"generation 2: 0 2")
    assert time.monotonic() - began_s >= cooldown_s
    code, _, err = job.ended()
    assert code == 0, err.decode()
    assert (
        f"generation 2: 2 ranks; worker 1 (rank 1 on {c}) was killed by SIGKILL; worker 2 joins as rank 1 on {c}\n"
        in (err.decode())
    )
    assert_clean(lan)
