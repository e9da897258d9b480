"""A job whose command is started anew after a failure, with real processes."""

import os
import re
import signal

import pytest
from e2e.conftest import ready, wait_until

pytestmark = pytest.mark.slow

RESTART = ("--on-failure", "restart")
# Ends well in the second restart. No rank ends before both have written.
TWICE = (
    "n=$TORCHELASTIC_RESTART_COUNT; echo count $n; touch there.$n.$HVDLITE_RANK; "
    "until [ -e there.$n.0 ] && [ -e there.$n.1 ]; do sleep 0.01; done; test $n = 2 || exit 5"
)


def test_a_command_that_fails_twice_is_started_three_times_and_the_job_ends_well(launch, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "restart.2").touch()
    job = launch("-np", "2", *RESTART, "--output-filename", "logs", "sh", "-c", TWICE, cwd=tmp_path)
    code, out, err = job.ended()
    assert code == 0, err
    # Files that a restart cannot create do not end the job.
    assert (tmp_path / "logs" / "restart.1" / "rank.1" / "stdout").read_text() == "count 1\n"
    assert f"--output-filename: cannot write {tmp_path}/logs/restart.2: " in err.decode()
    assert set(out.decode().splitlines()) == {f"[{r}]<stdout>:count {n}" for r in (0, 1) for n in (0, 1, 2)}
    restarts = [line for line in err.decode().splitlines() if ": restart " in line]
    for number, line in enumerate(restarts, start=1):
        assert re.fullmatch(
            rf"hvdlite-run: restart {number} of 3 \(--max-restarts\): rank [01] on localhost \(pid \d+\) failed first, "
            r"with exit code 5; now 2 workers on localhost",
            line,
        ), line
    assert len(restarts) == 2
    job.assert_gone()


def test_after_the_last_restart_the_job_ends_as_that_attempt_does(launch, tmp_path):
    program = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit $((3 + TORCHELASTIC_RESTART_COUNT))"
    job = launch("-np", "1", *RESTART, "--max-restarts", "1", "--output-filename", tmp_path, "sh", "-c", program)
    code, _, err = job.ended()
    assert code == 4
    assert err.decode().count("hvdlite-run: restart ") == 1
    assert (tmp_path / "rank.0" / "stdout").read_text() == "0 of 1\n"
    assert (tmp_path / "restart.1" / "rank.0" / "stdout").read_text() == "1 of 1\n"
    job.assert_gone()


def test_ctrl_c_ends_the_job_and_no_attempt_follows(launch):
    job = ready(launch("-np", "2", *RESTART, "sh", "-c", "echo ready; exec sleep 1000"))
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.ended()
    assert (code, out) == (130, b"")
    assert b"restart" not in err
    job.assert_gone()


def test_standard_input_is_read_by_the_first_attempt_and_later_ones_find_its_end(launch):
    read_end, write_end = os.pipe()
    try:
        program = "read word; echo got $word; test -z $word || exit 1"
        job = launch("-np", "1", *RESTART, "sh", "-c", program, stdin=read_end)
        os.write(write_end, b"hello\n")
        code, out, _ = job.ended()
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (code, out) == (0, b"[0]<stdout>:got hello\n[0]<stdout>:got\n")


def test_when_a_host_is_lost_the_command_is_started_anew_on_those_that_are_left(launch, make_lan):
    lan = make_lan("a", "b")
    program = "echo ready; test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000; echo $WORLD_SIZE on $HVDLITE_HOST"
    job = ready(launch("-H", "a:1,b:1", *RESTART, "sh", "-c", program, on=lan.desk))
    wait_until(lambda: lan.hosts[1].runs("sleep"))
    lan.cut(lan.hosts[1])
    code, out, err = job.ended()
    assert code == 0, err
    assert out.decode().splitlines()[-1] == "[0]<stdout>:1 on a"
    assert re.search(r"restart 1 of 3 \(--max-restarts\): lost b: .*; now 1 worker on a$", err.decode(), re.MULTILINE)
    wait_until(lambda: not any(host.runs("sleep") for host in lan.hosts))
