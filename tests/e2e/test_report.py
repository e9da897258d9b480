"""``hvdlite-run --report``: jobs that stand still in a known way, and what the report says of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from e2e.conftest import wait_until
from e2e.machines import why_there_are_none
from hvdlite_launcher.status.console import ask_for_report, running_jobs

pytestmark = pytest.mark.slow

PATIENCE_S = 240

PROGRAM = """
import os, re, signal, sys, threading, time
import torch
import hvdlite as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
is_odd = hvd.rank() == 2

def loads(how):
    if not is_odd:
        return
    if how == "sleep":
        time.sleep(10000)  # HERE
    if how == "lock":
        re.match("(a+)+b", "a" * 60)  # HERE
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "alone":
        hvd.allreduce(torch.ones(3), name="mine")  # HERE
    if how == "loader":
        next(iter(torch.utils.data.DataLoader(Hangs(), num_workers=1)))  # HERE
    if how == "mutex":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # HERE

class Hangs(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        time.sleep(10000)

for step in range(3):
    if step == 2:
        loads(sys.argv[1])
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def hung(launch, tmp_path):
    """Provides a function that starts a job, and returns it, its reports' directory, and the program's file."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)

    def start(how: str, **env: str):
        reports = tmp_path / "reports"
        words = ("-np", "4", "--grace", "0", "--report-dir", str(reports), sys.executable, str(file), how)
        return launch(*words, env={"OMP_NUM_THREADS": "1", **env}), reports, file

    return start


def line_of(how: str) -> int:
    before, _, after = PROGRAM.partition(f'if how == "{how}":')
    return 1 + (before + after.partition("# HERE")[0]).count("\n")


def report_of(launch, job, reports, *, until) -> tuple[str, dict]:
    """Asks for reports until one shows that the job stands still, and returns that: ranks take time to come there."""
    give_up_at = time.monotonic() + PATIENCE_S
    number = 0
    while True:
        code, out, err = launch("--report", str(job.launcher().pid)).ended(PATIENCE_S)
        if code == 2 and number == 0 and time.monotonic() < give_up_at:
            continue  # it does not listen yet
        assert (code, err) == (0, b"")
        number += 1
        data = json.loads((reports / f"report-{number}.json").read_text())
        assert (reports / f"report-{number}.txt").read_bytes() == out
        if until(data) or time.monotonic() > give_up_at:
            return out.decode(), data


def stands_still(data: dict) -> bool:
    """Whether rank 2 has come to where it stays, and all others wait in that step."""
    others = [data["ranks"][rank] for rank in (0, 1, 3)]
    waits = all(each["waits"] and [one["step"] for one in each["optimizers"]] == [2] for each in others)
    odd = data["ranks"][2]
    return waits and (odd["state"] == "stopped" or (odd["place"] or {}).get("function") == "loads")


@pytest.mark.night(but=1)
@pytest.mark.parametrize("how", ["sleep", "lock", "alone", "loader", "mutex"])
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(launch, hung, how):
    job, reports, file = hung(how)
    source = "signal" if how == "lock" else "answer"
    text, data = report_of(
        # On a busy machine it may have no time to answer.
        launch,
        job,
        reports,
        until=lambda data: stands_still(data) and data["ranks"][2]["source"] == source,
    )
    assert data["cause"]["ranks"] == [2], text
    odd = data["ranks"][2]
    assert (odd["place"]["file"], odd["place"]["line"], odd["place"]["function"]) == (str(file), line_of(how), "loads")
    assert odd["source"] == source
    assert f"cause: rank 2 (worker 2 on localhost, pid {odd['pid']})" in text
    assert "ranks 0-1, 3 wait for others" in text
    code, out, _ = launch("--diagnose", str(job.launcher().pid)).ended(PATIENCE_S)
    ranks = json.loads(out)["ranks"]
    waits_s = max(wait["waited_s"] for each in ranks for wait in each["waits"])
    all_answer = all(each["source"] == "answer" for each in ranks)  # on a busy machine one may have no time to
    assert code == (0 if all_answer and waits_s < 10 else 3)
    assert f"{job.launcher().pid} " in launch("--ps").ended(PATIENCE_S)[1].decode()
    assert [each["step"] for rank in (0, 1, 3) for each in data["ranks"][rank]["optimizers"]] == [2, 2, 2]
    job.process.send_signal(signal.SIGTERM)
    job.ended(PATIENCE_S)
    job.assert_gone()


@pytest.mark.night
def test_a_stopped_rank_is_named(launch, hung):
    job, reports, _ = hung("stop")
    text, data = report_of(launch, job, reports, until=stands_still)
    assert data["cause"]["ranks"] == [2], text
    assert "is stopped: its process does not run (SIGSTOP, debugger)" in text
    assert data["ranks"][2]["state"] == "stopped"
    job.process.send_signal(signal.SIGTERM)
    job.ended(PATIENCE_S)
    job.assert_gone()


def test_a_job_that_stalls_is_reported_without_being_asked(hung):
    job, reports, _ = hung("sleep", HVDLITE_STALL_CHECK_TIME_S="2")
    wait_until((reports / "report-1.json").exists, PATIENCE_S)
    job.process.send_signal(signal.SIGTERM)
    _, _, err = job.ended(PATIENCE_S)
    assert b" s for others\n  cause: rank 2 (worker 2 on localhost" in err
    job.assert_gone()


@pytest.mark.night
def test_sigquit_has_a_program_that_knows_nothing_of_hvdlite_reported_by_its_processes(launch, tmp_path):
    there = tmp_path / "there"
    ignored = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a script's background job
    program = f"[ $HVDLITE_RANK = 2 ] && exit; touch {there}.$HVDLITE_RANK; sleep 1000"
    job = launch("-np", "3", "--grace", "0", "--verbose", "sh", "-c", program)
    signal.signal(signal.SIGQUIT, ignored)
    wait_until(lambda: len(list(tmp_path.glob("there.*"))) == 2, PATIENCE_S)
    while b"rank 2 ended with exit code 0" not in (line := job.process.stderr.readline()):
        assert line, "the job ended before rank 2 was seen to end"
    job.launcher().send_signal(signal.SIGQUIT)
    code, out, _ = launch("--report", str(job.launcher().pid)).ended(PATIENCE_S)
    assert code == 0
    assert b"it has not called hvd.init() in any worker" in out
    assert b"\n  rank 2 has ended\n" in out
    job.process.send_signal(signal.SIGTERM)
    _, _, err = job.ended(PATIENCE_S)
    assert b"report 1 on 2 ranks, asked for by SIGQUIT\n  rank 2 has ended\n" in err
    job.assert_gone()


PLAIN = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)

def load(step):
    if step == 2 and dist.get_rank() == 1:
        time.sleep(10000)  # HERE
    return torch.ones(1, 4)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for step in range(3):
    x = load(step)
    if sys.argv[1] == "collective":
        dist.all_reduce(x)
    model(x).sum().backward()
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("how", ["collective", "ddp"])
def test_a_program_of_plain_torch_distributed_is_reported_with_the_rank_that_others_wait_for(launch, tmp_path, how):
    file = tmp_path / "train.py"
    file.write_text(PLAIN)
    job = launch("-np", "3", "--grace", "0", sys.executable, str(file), how, env={"OMP_NUM_THREADS": "1"})
    wait_until(lambda: job.launcher().pid in running_jobs(), PATIENCE_S)
    found: list[tuple[str, dict]] = []
    line = 1 + PLAIN.partition("# HERE")[0].count("\n")

    def is_named() -> bool:
        found[:] = [ask_for_report(str(job.launcher().pid))]
        cause, ranks = found[0][1]["cause"], found[0][1]["ranks"]
        # While they connect, and in the steps before, the others may wait for rank 1 elsewhere.
        is_there = len(ranks) == 3 and (ranks[1]["place"] or {}).get("line") == line
        return is_there and cause["ranks"] == [1] and cause["waiting"] == [0, 2]

    wait_until(is_named, PATIENCE_S, message=lambda: found[0][0])
    ((text, data),) = found
    assert data["ranks"][1]["place"] == {"file": str(file), "line": line, "function": "load"}, text
    assert [each["source"] for each in data["ranks"]] == ["signal"] * 3
    # Nothing says for how long they have waited.
    assert launch("--diagnose", str(job.launcher().pid)).ended(PATIENCE_S)[0] == 4
    job.process.send_signal(signal.SIGTERM)
    job.ended(PATIENCE_S)
    job.assert_gone()


LATE = """
import os, sys, time
import torch
import hvdlite as hvd

def download():
    time.sleep(10000)  # HERE

# So that no rank still imports torch while the others wait.
open("there." + os.environ["RANK"], "w").close()
while not all(os.path.exists(f"there.{rank}") for rank in range(3)):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    download()
hvd.init()
"""


def test_a_rank_that_does_not_come_to_init_is_reported_with_its_line_before_the_job_ends(launch, tmp_path):
    (tmp_path / "train.py").write_text(LATE)
    words = ("-np", "3", "--start-timeout", "20", "--report-dir", "reports", sys.executable, "train.py")
    job = launch(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    code, _, err = job.ended(PATIENCE_S)
    shown = err.decode()
    assert code == 1, shown
    assert "rank 1 on localhost did not call hvd.init() within 20 s" in shown
    assert "hvdlite-run: report 1 on 3 ranks, since ranks have waited 15 s in hvd.init() for others\n" in shown
    line = 1 + LATE.partition("# HERE")[0].count("\n")
    assert re.search(rf"  cause: rank 1 \(.*\) is at .*train.py:{line} in download\n", shown), shown
    waiting = r"  ranks 0, 2 wait for others, for 1\d s, in hvd.init\(\), at .*train.py:\d+ in <module>\n"
    assert re.search(waiting, shown), shown
    data = json.loads((tmp_path / "reports" / "report-1.json").read_text())
    assert (data["verdict"], data["cause"]["ranks"]) == ("stands still", [1])
    job.assert_gone()


def test_a_job_that_is_gone_is_refused(launch):
    code, out, err = launch("--report", "1").ended(PATIENCE_S)
    assert (code, out) == (2, b"")
    assert err.startswith(b"hvdlite-run: --report: no hvdlite-run with the process number 1 runs here")


# Answers with an encoded `OwnStatus` as `hvdlite.runtime.hang_report` does, but without torch, of which 64 processes
# need much memory. Rank 37 sleeps.
ANSWERS = """
import json, os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(os.environ["HVDLITE_JOB_DIR"], f"r{os.getpid()}"))
listener.listen()
library = [["/usr/lib/python3/library.py", line, "function"] for line in range(40)]
is_odd = os.environ["HVDLITE_RANK"] == "37"
own = [["train.py", 41 if is_odd else 60, "load" if is_odd else "train"]]
threads = [["MainThread", True, own + library], *[[f"hvdlite-{number}", False, library] for number in range(6)]]
waits = [] if is_odd else [["the all-reduce of the gradients of 0.weight", 60.0]]
answer = [0, {}, None, None, waits, [], threads, ["/usr/lib"], [], {}, ""]
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(16)
        connection.sendall(json.dumps(answer).encode())
"""


@pytest.mark.night
def test_of_64_ranks_all_answer_before_a_report_is_closed(launch):
    job = launch("-np", "64", "--grace", "0", sys.executable, "-ISc", ANSWERS)
    wait_until(lambda: job.launcher().pid in running_jobs())
    pid, data = str(job.launcher().pid), {"ranks": []}
    # Ranks that take long to begin, or to answer, are known by less than that.
    wait_until(lambda: data.update(ask_for_report(pid)[1]) or all(each["source"] == "answer" for each in data["ranks"]))
    assert [each["rank"] for each in data["ranks"]] == list(range(64))
    assert data["cause"]["ranks"] == [37]
    assert len(data["cause"]["waiting"]) == 63
    job.process.send_signal(signal.SIGTERM)
    job.ended(PATIENCE_S)
    job.assert_gone()


@pytest.mark.night
@pytest.mark.skipif(why_there_are_none() is not None, reason="only root can mount a small file system")
def test_a_full_directory_is_told_once_and_the_job_goes_on(launch, tmp_path):
    reports, over = tmp_path / "reports", tmp_path / "over"
    reports.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(reports)], check=True)
    try:
        (reports / "full").write_bytes(b"x" * 4096)
        wait_for_the_end = f"while [ ! -e {over} ]; do sleep 0.1; done"
        job = launch("-np", "1", "--report-dir", str(reports), "sh", "-c", wait_for_the_end)
        wait_until(lambda: job.launcher().pid in running_jobs())
        answers = [ask_for_report(str(job.launcher().pid)) for _ in range(2)]
        assert [data["report"] for _, data in answers] == [1, 2]
        over.touch()
        code, _, err = job.ended(PATIENCE_S)
    finally:
        subprocess.run(["umount", "--lazy", str(reports)], check=True)
    assert code == 0
    (said,) = err.decode().splitlines()
    assert said.startswith(f"hvdlite-run: --report-dir {reports}: reports are not written: no space or no inodes left")
    assert said.endswith(". The job goes on")
