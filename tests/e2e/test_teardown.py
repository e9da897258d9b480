"""Whatever dies, and however: soon nothing of the job is left, and the exit code is right.

Those of the launcher's promise are tried several times with TEST_HVDLITE_LONG=1.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from e2e.conftest import PATIENCE_S, ready, wait_until
from long_run import trials

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.new_processes("any process of a job is killed, and each that is left is found"),
]

TIMES = pytest.mark.parametrize("time", range(trials(1, 3)), ids="try{}".format)

SLEEP = "echo ready; exec sleep 1000"
# Each worker has a child in its process group, and one in a session of its own.
WITH_CHILDREN = "sleep 1000 & setsid sleep 1000 & echo ready; wait"
DEAF = "trap '' TERM INT; echo ready; while :; do sleep 1000; done"
# A daemon: forked twice, in its own session, with its own streams; a child of init, if nobody adopts it.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        time.sleep(1000)
    os._exit(0)
os.wait()
print('ready', flush=True)
"""


def _worker(job, rank):
    """Returns the process of this rank, once it has started, found by its environment among the agent's children."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for process in job.agent().children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HVDLITE_RANK") == str(rank):
                    return process
        time.sleep(0.01)
    raise AssertionError(f"no process of rank {rank}")


def _states_of_threads(process):
    """Returns the letter of the state of each thread: a signal stops them one after another."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in threads]


@TIMES
def test_a_worker_killed_with_9_ends_the_others_and_is_named(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    worker = _worker(job, 1)
    worker.kill()
    code, _, err = job.ended()
    assert code == 137
    assert f"rank 1 on localhost (pid {worker.pid})".encode() in err
    job.assert_gone()


@TIMES
def test_a_worker_that_ignores_sigterm_is_gone_in_time(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", f"[ $HVDLITE_RANK = 1 ] || {{ {DEAF}; }}; {SLEEP}"))
    _worker(job, 1).kill()
    job.assert_gone()
    assert job.ended()[0] == 137


def test_a_worker_that_ignores_sigterm_and_floods_the_screen_is_killed(launch):
    flood = "trap '' TERM; echo ready; while :; do echo y; done"
    job = ready(launch("--grace", "1", "-np", "2", "sh", "-c", flood))
    _worker(job, 1).kill()
    assert job.ended()[0] == 137
    job.assert_gone()


@TIMES
def test_ctrl_c_ends_the_job(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    job.process.send_signal(signal.SIGINT)
    job.assert_gone()
    assert job.ended()[0] == 130


@TIMES
def test_a_launcher_killed_with_9_takes_all_along(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    job.process.kill()
    job.assert_gone()


@TIMES
@LINUX_ONLY
def test_an_agent_killed_with_9_is_named_and_takes_all_along(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    job.agent().kill()
    code, _, err = job.ended()
    assert code == 1
    assert err.splitlines()[-1].startswith(b"hvdlite-run: lost localhost: its hvdlite agent was killed by SIGKILL")
    job.assert_gone()


@TIMES
@LINUX_ONLY
def test_launcher_and_agent_killed_with_9_together_leave_nothing(launch, time):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    agent = job.agent()
    job.process.kill()
    agent.kill()
    job.assert_gone()


@pytest.mark.night(but=1)
@LINUX_ONLY
@pytest.mark.parametrize("and_launcher", [False, True], ids=["remote parent", "remote parent and launcher"])
def test_a_remote_parent_killed_with_9_takes_all_along(launch, and_launcher):
    job = ready(launch("-np", "2", "sh", "-c", WITH_CHILDREN))
    job.remote_parent().kill()
    if and_launcher:
        job.process.kill()
    job.assert_gone()
    assert job.ended()[0] == (-9 if and_launcher else 1)


@LINUX_ONLY
def test_what_is_left_when_all_that_could_clear_up_is_killed_at_once_the_next_job_clears(launch):
    job = ready(launch("-np", "2", "sh", "-c", '"$@"; exec sleep 1000', "sh", sys.executable, "-c", DAEMON))
    others = [job.agent(), job.remote_parent()]
    # All are stopped before the first one is killed, so that none reacts to another's end.
    for process in (*others, psutil.Process(job.process.pid)):
        process.suspend()
        wait_until(lambda process=process: all(state == "T" for state in _states_of_threads(process)))
    for process in (*others, psutil.Process(job.process.pid)):
        process.kill()
    # The daemon of each worker lives on, since nobody is there that has adopted it.
    wait_until(lambda: len(job.processes()) == 2)
    (left,) = job.leftovers()
    living = ready(launch("-np", "1", "sh", "-c", SLEEP, env={"TMPDIR": str(job.tmp)}), 1)
    assert not left.exists()
    assert job.processes() == []
    (held,) = job.leftovers()
    # Another job does not remove the directory either.
    assert launch("-np", "1", "true", env={"TMPDIR": str(job.tmp)}).ended()[0] == 0
    assert job.leftovers() == [held]
    living.process.send_signal(signal.SIGTERM)
    assert living.ended()[0] == 143
    assert job.leftovers() == []


@TIMES
@LINUX_ONLY
def test_a_daemon_that_a_worker_leaves_ends_with_the_job(launch, time):
    job = ready(launch("-np", "2", sys.executable, "-c", DAEMON))
    assert job.ended()[0] == 0
    job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_term_and_hup_end_the_job(launch, signum, code):
    job = ready(launch("-np", "2", "sh", "-c", SLEEP))
    job.process.send_signal(signum)
    assert job.ended()[0] == code
    job.assert_gone()


def test_ctrl_c_lets_workers_end_their_own_way(launch):
    job = ready(
        launch("-np", "2", "sh", "-c", "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.01; done")
    )
    job.process.send_signal(signal.SIGINT)
    code, out, _ = job.ended()
    assert code == 130
    assert out.count(b"saved") == 2


def test_an_ignored_hangup_stays_ignored(launch, tmp_path):
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like nohup
    try:
        job = launch("-np", "1", "sh", "-c", 'echo ready; read line <"$0"; exit 6', str(go_on))
    finally:
        signal.signal(signal.SIGHUP, previous)
    ready(job, size=1).process.send_signal(signal.SIGHUP)
    go_on.write_text("now\n")
    assert job.ended()[0] == 6


def test_a_screen_that_stands_still_does_not_keep_the_job(launch):
    # Its output is read up to its first lines only: all pipes fill up.
    job = ready(launch("--grace", "1", "-np", "2", "sh", "-c", "echo ready; exec yes"))
    job.process.send_signal(signal.SIGINT)
    job.assert_gone()
    assert job.process.wait(PATIENCE_S) == 130


def test_who_says_it_lost_a_peer_is_not_the_cause(launch, tmp_path):
    program = (
        "if [ $HVDLITE_RANK = 0 ]; then echo $$ >0.new; mv 0.new 0; else until [ -e 0 ]; do sleep 0.01; done; fi;"
        "echo ready; until [ -e go ]; do sleep 0.01; done;"
        'if [ $HVDLITE_RANK = 0 ]; then touch "$HVDLITE_JOB_DIR/worker.0.peer-lost"; exit 9; fi;'
        "while kill -0 $(cat 0); do sleep 0.01; done; exit 3"
    )
    job = ready(launch("-np", "2", "sh", "-c", program, cwd=tmp_path))
    # It waits for another failure, but not for long. While it is stopped, its agent tells of both, rank 0 first.
    job.process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_until(lambda: not job.agent().children())
    job.process.send_signal(signal.SIGCONT)
    code, _, err = job.ended()
    assert code == 3
    assert b"rank 1 on localhost" in err
    job.assert_gone()


def test_who_lost_a_peer_that_does_not_fail_is_the_cause(launch):
    program = 'if [ $HVDLITE_RANK = 0 ]; then touch "$HVDLITE_JOB_DIR/worker.0.peer-lost"; exit 9; fi; sleep 1000'
    job = launch("-np", "2", "sh", "-c", program)
    code, _, err = job.ended()
    assert code == 9
    assert b"rank 0 on localhost" in err
    job.assert_gone()
