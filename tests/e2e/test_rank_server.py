"""Ranks that are copies of a process that has imported torch: their programs see what those of new processes see."""

from __future__ import annotations

import json
import sys

import pytest

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
    "command": open("/proc/self/cmdline").read(),
}
print(json.dumps([is_copy, random.random(), torch.rand(1).item(), seen]))
raise SystemExit(5)
"""


def test_the_program_of_a_copy_sees_and_does_what_that_of_a_new_process_does(launch, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    told = []
    for new in (False, True):
        (tmp_path / "input").write_text("typed")
        with open(tmp_path / "input") as file:
            words = ("-np", "1", sys.executable, "program.py", "--flag", "ü x")
            code, out, err = launch(*words, copies=not new, cwd=tmp_path, stdin=file).ended()
        assert code == 5, err
        told.append(json.loads(out.decode().removeprefix("[0]<stdout>:")))
    (is_copy, *drawn, seen), (is_other_copy, *other_drawn, other_seen) = told
    assert (is_copy, is_other_copy) == (True, False)
    assert seen == other_seen
    assert all(value != other for value, other in zip(drawn, other_drawn, strict=True))


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
