"""Process groups that are still there, and what starting workers one after the other keeps."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tracemalloc

from hvdlite_launcher.system.process_tree import dying_with_parent, has_group, signal_handlers


def test_a_group_is_there_until_its_last_process_was_reaped():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert has_group(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_group(process.pid), "nobody else gets its number yet"
    finally:
        process.kill()
        process.wait()
    assert not has_group(process.pid)


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
