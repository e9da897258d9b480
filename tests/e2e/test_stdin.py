"""The standard input of hvdlite-run, with real processes: which rank gets it, and that no process is blocked by it."""

import os
import pty
import select
import subprocess
import sys
import threading
import time

import psutil
import pytest
from e2e.conftest import PATIENCE_S

pytestmark = pytest.mark.slow

# Plays a shell: a session with a terminal, with the job in its background until stdin says to bring it forward.
SHELL = """
import os, signal, subprocess, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
job = subprocess.Popen(sys.argv[2:], stdin=terminal, preexec_fn=os.setpgrp)
print(job.pid, flush=True)
sys.stdin.readline()
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(terminal, job.pid)
sys.exit(job.wait())
"""


def test_rank_0_reads_it_to_its_end_and_the_others_read_nothing(launch, tmp_path):
    data = os.urandom(3_000_000)
    job = launch("-np", "3", "sh", "-c", 'exec cat >"read.$HVDLITE_RANK"', stdin=subprocess.PIPE, cwd=tmp_path)
    job.process.communicate(data, timeout=PATIENCE_S)
    assert job.process.returncode == 0
    assert [(tmp_path / f"read.{rank}").read_bytes() for rank in range(3)] == [data, b"", b""]


def test_lines_arrive_as_they_are_typed(launch):
    job = launch("-np", "1", "cat", stdin=subprocess.PIPE, bufsize=0)
    for line in (b"one\n", b"two\n"):
        job.process.stdin.write(line)
        assert job.process.stdout.readline() == b"[0]<stdout>:" + line
    assert job.ended()[0] == 0


@pytest.mark.night(but=1)
@pytest.mark.parametrize("reads", ["exec <&-", "head -c 1"], ids=["nothing", "one byte"])
def test_a_job_ends_though_its_input_does_not(launch, reads):
    read_end, write_end = os.pipe()
    os.write(write_end, b"typed\n")
    job = launch("-np", "2", "sh", "-c", reads, stdin=read_end)
    os.close(read_end)
    assert job.ended()[0] == 0
    job.assert_gone()
    with pytest.raises(BrokenPipeError):
        os.write(write_end, b"nobody is there")
    os.close(write_end)


def test_what_rank_0_does_not_read_stays_with_who_writes_it(launch, tmp_path):
    total, piece = 64 << 20, bytes(1 << 16)
    os.mkfifo(tmp_path / "go")
    read_end, write_end = os.pipe()
    job = launch(
        "-np", "2", "sh", "-c", "[ $HVDLITE_RANK = 1 ] || { read go <go; wc -c; }", stdin=read_end, cwd=tmp_path
    )
    os.close(read_end)
    written = [0]

    def write():
        while written[0] < total:
            written[0] += os.write(write_end, piece)
        os.close(write_end)

    writer = threading.Thread(target=write)
    writer.start()
    before = -1
    while written[0] != before:  # until it no longer runs
        before = written[0]
        time.sleep(0.5)
    assert before < 1 << 20
    (tmp_path / "go").write_text("now\n")
    writer.join(PATIENCE_S)
    code, out, _ = job.ended()
    assert (code, out) == (0, b"[0]<stdout>:%d\n" % total)


PROMPTS = """
import os, pdb
if os.environ["HVDLITE_RANK"] == "0":
    print("hello", input("who? "))
    pdb.Pdb(nosigint=True, readrc=False).set_trace()
    print("the end")
"""


def test_on_a_terminal_prompts_show_before_their_answer_and_a_debugger_can_be_used(launch, tmp_path):
    (tmp_path / "ask.py").write_text(PROMPTS)
    terminal, line = pty.openpty()
    job = launch(
        *("-np", "2", "--output-filename", "kept", sys.executable, "ask.py"),
        stdin=line,
        stdout=line,
        stderr=line,
        cwd=tmp_path,
        env={"NO_COLOR": "1"},
    )
    os.close(line)
    seen = b""

    def until(text: bytes) -> bytes:
        nonlocal seen
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 4096)
        shown, text, seen = seen.partition(text)
        return shown + text

    try:
        # Before it may stand what the job waits for, in a line that is erased.
        assert until(b"who? ").rpartition(b"\r\x1b[K")[2] == b"[0]<stdout>:who? "
        os.write(terminal, b"me\n")
        session = until(b"(Pdb) ")
        assert session.startswith(b"me\r\n[0]<stdout>:hello me\r\n[0]<stdout>:> ")
        os.write(terminal, b"p 6 * 7\n")
        assert until(b"(Pdb) ") == b"p 6 * 7\r\n[0]<stdout>:42\r\n[0]<stdout>:(Pdb) "
        os.write(terminal, b"c\n")
        assert until(b"the end\r\n") == b"c\r\n[0]<stdout>:the end\r\n"
        assert job.process.wait(PATIENCE_S) == 0
    finally:
        os.close(terminal)
    kept = (tmp_path / "kept" / "rank.0" / "stdout").read_bytes()
    assert kept.startswith(b"who? hello me\n> ")
    assert kept.endswith(b"(Pdb) 42\n(Pdb) the end\n")


def test_rank_0_that_does_not_read_can_be_ended(launch):
    job = launch("-np", "2", "sh", "-c", "echo ready; exec sleep 1000", stdin=open("/dev/zero", "rb"))  # noqa: SIM115
    assert job.process.stdout.readline().endswith(b"ready\n")
    job.process.terminate()
    assert job.ended()[0] == 143
    job.assert_gone()


def test_in_the_background_of_a_shell_it_is_not_stopped_and_reads_once_it_is_in_front():
    terminal, line = pty.openpty()
    command = [sys.executable, "-m", "hvdlite_launcher", "-np", "1", "sh", "-c", 'echo ready; read x; echo "got $x"']
    shell = subprocess.Popen(
        [sys.executable, "-c", SHELL, os.ttyname(line), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    launcher = psutil.Process(int(shell.stdout.readline()))
    try:
        os.write(terminal, b"typed\n")
        assert shell.stdout.readline() == b"[0]<stdout>:ready\n"
        assert launcher.status() != psutil.STATUS_STOPPED
        out, _ = shell.communicate(b"in front\n", timeout=PATIENCE_S)
        assert out == b"[0]<stdout>:got typed\n"
        assert shell.returncode == 0
    finally:
        if launcher.is_running():
            launcher.kill()
        shell.kill()
        shell.communicate()
        os.close(terminal)
        os.close(line)
