"""Ranks that are copies of a process that has imported torch: their programs see what those of new processes see."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from e2e.conftest import assert_clean

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
is_copy = "torch" in sys.modules
import gc, json, os, random, resource, signal, tempfile, threading, torch
seen = {
    "argv": sys.argv,
    "path": sys.path,
    "names": sorted(set(dir()) - {"is_copy"}),
    "variables": sorted(name for name in os.environ if "INDUCTOR" not in name),
    "directory": os.getcwd(),
    "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
    "files": sorted(os.listdir("/proc/self/fd")),
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
    "signals": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(each) for each in range(16)],
    "threads": [threading.active_count(), torch.get_num_threads()],
    "stdin": sys.stdin.read(),
    "bytecode": sys.dont_write_bytecode,
    "streams": [
        [repr(each.buffer), each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.write_through]
        for each in (sys.stdout, sys.stderr)
    ],
    "host": os.uname().nodename,
    "memory": sorted(os.listdir("/dev/shm")),
        "command": open("/proc/self/cmdline").read(),
}
print(json.dumps([is_copy, random.random(), torch.rand(1).item(), seen]))
raise SystemExit(5)
"""


def read_by(job):
    code, out, err = job.ended()
    assert code == 5, err
    return json.loads(out.decode().removeprefix("[0]<stdout>:"))


def assert_same(by_copy, by_new_process):
    (is_copy, *drawn, seen), (is_other_copy, *other_drawn, other_seen) = by_copy, by_new_process
    assert (is_copy, is_other_copy) == (True, False)
    assert seen == other_seen
    assert all(value != other for value, other in zip(drawn, other_drawn, strict=True))


@pytest.mark.parametrize("is_set", [True, False])
def test_the_program_of_a_copy_sees_and_does_what_that_of_a_new_process_does(launch, tmp_path, is_set, request):
    importlib.import_module("torch._dynamo")  # which sets a variable here, as other tests do
    if not is_set:  # as where a script's background job runs the tests
        request.addfinalizer(partial(signal.signal, signal.SIGQUIT, signal.signal(signal.SIGQUIT, signal.SIG_IGN)))
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "input").write_text("typed")
    followed = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTORCH_NVML_BASED_CUDA_CHECK")
    env = dict.fromkeys(followed, "1" if is_set else "")
    told = []
    for copies in (True, False):
        with open(tmp_path / "input") as file:
            words = ("-np", "1", sys.executable, "program.py", "--flag", "ü x")
            told.append(read_by(launch(*words, copies=copies, cwd=tmp_path, stdin=file, env=env)))
    assert_same(*told)


def test_so_does_that_of_a_copy_that_no_agent_starts(tmp_path, rank_server):
    (tmp_path / "program.py").write_text(PROGRAM)
    told = []
    for python in (rank_server.python(), ()):
        words = [sys.executable, *python, "program.py", "--flag", "ü x"]
        options = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(tmp_path)}, "start_new_session": True}
        done = subprocess.run(words, input="typed", capture_output=True, text=True, check=False, timeout=200, **options)
        assert done.returncode == 5, done.stderr
        told.append(json.loads(done.stdout))
    assert_same(*told)


def test_so_does_that_of_a_copy_on_another_host(launch, make_lan, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    lan = make_lan("a")
    words = ("-H", "a", sys.executable, "program.py")
    told = [read_by(launch(*words, copies=copies, cwd=tmp_path, on=lan.desk)) for copies in (True, False)]
    assert_same(*told)
    assert told[0][-1]["host"] == "a"
    assert_clean(lan)


@pytest.mark.parametrize(
    ("options", "program", "env"),
    [
        (("-O",), "import torch", {}),
        ((), "import sys", {}),
        ((), "import torch", {"TORCH_SHOW_CPP_STACKTRACES": "1"}),
        ((), "import torch", {"PYTHONPATH": "/nowhere"}),
    ],
)
def test_a_rank_is_a_new_process_where_an_interpreter_would_begin_otherwise_or_torch_is_not_used(
    launch, options, program, env
):
    program = f"import sys; print('as new', 'tor' + 'ch' not in sys.modules); {program}"
    code, out, err = launch("-np", "1", sys.executable, *options, "-c", program, env=env, copies=True).ended()
    assert (code, out) == (0, b"[0]<stdout>:as new True\n"), err


HANDLERS = """
import atexit, sys, threading, time, torch
atexit.register(print, "second", end="")
atexit.register(print, "first")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
"""


@pytest.mark.parametrize(
    ("end", "code", "err"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('what')", 1, "ValueError: what"),
        ("raise KeyboardInterrupt('when')", 130, "KeyboardInterrupt: when"),
    ],
)
def test_a_copy_ends_as_a_new_process_does(launch, end, code, err):
    got, out, stderr = launch("-np", "1", sys.executable, "-c", HANDLERS + end, copies=True).ended()
    assert got == code, stderr
    assert err in stderr.decode()
    assert out.decode().splitlines() == [f"[0]<stdout>:{line}" for line in ("thread", "first", "second")]


def test_the_agent_of_copies_ends_with_the_process_that_stands_in_for_it(launch):
    program = "import signal, torch; print('ready', flush=True); signal.pause()"
    job = launch("-np", "1", sys.executable, "-c", program, copies=True)
    assert job.process.stdout.readline() == b"[0]<stdout>:ready\n"
    (stand_in,) = job.launcher().children()
    assert stand_in != job.remote_parent()
    stand_in.kill()
    code, _, err = job.ended()
    assert code != 0
    assert b"its hvdlite agent was killed by SIGKILL" in err
    job.assert_gone()
