"""Processes and their descendants are signalled, and starting workers one after the other keeps nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tracemalloc

import psutil
from hvdlite_launcher.system.process_tree import dying_with_parent, kill_tree, signal_handlers

# A process may not be killed by this one if it is root's, such as of sudo.
NOT_ALL_MAY_BE_KILLED = """
import subprocess

import psutil

from hvdlite_launcher.system.process_tree import kill_descendants

others, own = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
kill = psutil.Process.kill


def kill_own(process):
    if process.pid == others.pid:
        raise psutil.AccessDenied(process.pid)
    kill(process)


psutil.Process.kill = kill_own
print(kill_descendants(within_s=0.1), psutil.pid_exists(own.pid))
others.kill()
"""


def test_children_that_die_with_their_parent_are_made_one_after_the_other_and_nothing_piles_up():
    dying_with_parent()
    tracemalloc.start()
    try:
        for _ in range(200):
            dying_with_parent()
        of_ctypes = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, ctypes.__file__)])
    finally:
        tracemalloc.stop()
    assert sum(each.count for each in of_ctypes.statistics("filename")) == 0


def test_a_signal_for_handlers_reaches_those_and_ends_no_other(tmp_path):
    """A shell that handles nothing, and its child, which does."""
    program = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print(flush=True); signal.pause()"
    )
    shell = subprocess.Popen(["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program], stdout=subprocess.PIPE)
    with shell:
        assert shell.stdout.readline() == b"\n"
        signal_handlers(shell.pid, signal.SIGUSR1)
        assert shell.wait(60) == 7
    signal_handlers(shell.pid, signal.SIGUSR1)  # it has ended


def test_a_signal_for_handlers_reaches_a_process_whose_name_is_no_text():
    program = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); "
        r"open('/proc/self/comm', 'wb').write(b'caf\xe9'); print(flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        signal_handlers(process.pid, signal.SIGUSR1)
        assert process.wait(60) == 7


def test_a_descendant_that_may_not_be_killed_does_not_keep_the_others_alive():
    told = subprocess.run([sys.executable, "-c", NOT_ALL_MAY_BE_KILLED], capture_output=True, text=True, check=True)
    assert told.stdout == "False False\n"


def test_a_child_in_another_group_that_may_not_be_killed_is_left_alone(monkeypatch):
    program = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "print(child.pid, flush=True); time.sleep(60)"
    )

    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        child = int(process.stdout.readline())
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "kill", refuse)
            kill_tree(process.pid)
        os.kill(child, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
