"""Process groups that are still there, and what starting workers one after the other keeps."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tracemalloc

from hvdlite_launcher.system.process_tree import dying_with_parent, has_group


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
