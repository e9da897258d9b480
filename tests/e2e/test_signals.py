"""A signal at any moment at which no job runs ends hvdlite-run at once, and never with a traceback.

It does not come by chance: the process sends it to itself, at the Nth of its imports, or of its last steps.
"""

import re
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Like the console script, which imports no module of ours before.
RUN = """
import atexit, os, sys, builtins
at, signum, of = int(sys.argv[1]), int(sys.argv[2]), builtins.__import__
counted = 0
def count(name, *rest):
    global counted
    if "hvdlite_launcher.__main__" in sys.modules:
        counted += 1
        if counted == at:
            os.kill(os.getpid(), signum)
    return of(name, *rest)
def last():
    if at == 0:
        os.kill(os.getpid(), signum)
    else:
        print("imports:", counted)
atexit.register(last)
from hvdlite_launcher.__main__ import main
builtins.__import__ = count
sys.exit(main())
"""


def run(at, signum, *words):
    program = [sys.executable, "-c", RUN.replace("sys.exit(main())", f"sys.argv[1:] = {list(words)}\nsys.exit(main())")]
    return subprocess.run(
        [*program, str(at), str(int(signum))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.night(but=2)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("words", [["--version"], ["-np", "2", "--dry-run"]], ids=" ".join)
def test_a_signal_while_it_is_imported_ends_it_whatever_is_imported_just_then(signum, words):
    run(-1, signum, *words)  # compiles what is not yet compiled, for which it imports more
    whole = run(-1, signum, *words)
    assert whole.returncode == 0, whole.stderr
    count = int(whole.stdout.rpartition("imports:")[2])
    assert count > 50
    # The first import, the last, and some between; others for each signal.
    for at in {1, 2, 3, count, *range(4 + signum, count, count // 12)}:
        ended = run(at, signum, *words)
        assert (ended.returncode, ended.stderr) == (-signum, ""), at


@pytest.mark.night(but=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_when_all_is_done_is_no_traceback(signum):
    for words in (["--version"], ["-np", "1", "true"]):
        ended = run(0, signum, *words)
        assert (ended.returncode, ended.stderr) == (-signum, "")


def test_a_signal_that_is_ignored_stays_so():
    program = "import os, signal; from hvdlite_launcher.__main__ import main; os.kill(os.getpid(), 1); main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_is_imported_before_signals_are_taken_is_next_to_nothing():
    program = (
        "import sys; before = set(sys.modules); import hvdlite_launcher.__main__; print(*set(sys.modules) - before)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    own = {"hvdlite_launcher", "hvdlite_launcher.errors", "hvdlite_launcher.__main__"}
    assert set(shown.split()) <= own | {"__future__", "_signal", "_thread", "errno", "resource"}


SAVES = """
import time, torch
import hvdlite as hvd
hvd.init()
saver = hvd.save_on_signal(lambda: print("saved after", step, flush=True))
step = 0
while True:
    step += 1
    hvd.allreduce(torch.ones(1), name=f"step {step}")
    if step == 3:
        print("trains", flush=True)
    saver.step()
    time.sleep(0.01)
"""


def test_all_ranks_save_after_the_same_step_and_end_well_after_a_signal_to_hvdlite_run(launch, tmp_path):
    (tmp_path / "train.py").write_text(SAVES)
    # The shell of a worker does not handle the signal.
    job = launch("-np", "2", "sh", "-c", f"{sys.executable} {tmp_path}/train.py; exit $?")
    seen = b""
    while seen.count(b"trains") < 2:
        seen += job.process.stdout.readline()
    job.launcher().send_signal(signal.SIGUSR1)
    code, out, err = job.ended(240)
    saved = re.findall(rb"saved after (\d+)", seen + out)
    assert (code, len(saved), len(set(saved))) == (0, 2, 1), err.decode()
    assert b"SIGUSR1 passed on to 2 workers, to the processes that handle it" in err
    job.assert_gone()
