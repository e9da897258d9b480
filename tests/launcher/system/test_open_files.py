"""The limit of open files: raised as far as it is needed and allowed, and as before in children."""

from __future__ import annotations

import resource
import subprocess
import sys

from hvdlite_launcher.system import process_tree

# Runs what follows in a process that was started with these limits.
UNDER = """
import os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.system import process_tree

def limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

def seen_by(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout.split()

HOW = ["sh", "-c", 'ulimit -S -n; ulimit -H -n; echo "$#" "$1"', "sh", "two words"]
"""


def printed(program: str, soft: int, hard: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", UNDER.format(soft=soft, hard=hard) + program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_nothing_changes_where_the_limit_is_far():
    program = "process_tree.allow_open_files(40); print(limit()); print(process_tree.as_before(HOW) == HOW)"
    assert printed(program, 256, 512) == ["(256, 512)", "True"]


def test_the_soft_limit_is_raised_up_to_the_hard_one_and_children_get_the_old_one():
    program = """
process_tree.allow_open_files(300)
print(limit())
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
print(seen_by(process_tree.as_before(HOW)))
print(seen_by(HOW, preexec_fn=process_tree.setting_back()))
print(seen_by(HOW, preexec_fn=process_tree.setting_back(lambda: os.write(1, b"and "))))
print(limit())
"""
    child = "['256', '512', '1', 'two', 'words']"
    assert printed(program, 256, 512) == ["(512, 512)", child, child, f"['and', {child[1:]}", "(512, 512)"]


def test_too_low_a_hard_limit_is_told_with_the_way_out():
    program = """
try:
    process_tree.require_open_files(3000, "connections to 1000 hosts")
except LauncherError as error:
    print(error)
process_tree.require_open_files(400, "connections to 100 hosts")
"""
    (said,) = printed(program, 256, 512)
    assert said.startswith("connections to 1000 hosts need 30")
    assert "the limit is 512" in said
    assert "ulimit -n" in said
    assert "/etc/security/limits.conf" in said


TAKEN = "kept = []\ntry:\n    while True: kept.append(os.dup(0))\nexcept OSError: pass\n"


def test_a_limit_that_is_reached_is_raised_without_an_error():
    allowed = TAKEN + "process_tree.allow_open_files(4); "
    assert printed(allowed + "kept.append(os.dup(0)); print(limit())", 64, 256) == ["(256, 256)"]
    assert printed(allowed + "kept.clear() or print(limit())", 64, 64) == ["(64, 64)"]


def test_a_hard_limit_that_is_reached_is_told():
    tried = "try:\n    process_tree.require_open_files(4, 'four')\nexcept LauncherError as error: "
    (said,) = printed(TAKEN + tried + "kept.clear() or print(error)", 64, 64)
    assert said.startswith("four need 68 open files in this process, and the limit is 64: raise it")


def test_no_limit_is_none(monkeypatch):
    now, unlimited = [(256, resource.RLIM_INFINITY)], resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    needed = process_tree.allow_open_files(1000)
    assert now[1:] == [(4 * needed, unlimited)]
    now.append((unlimited, unlimited))
    process_tree.require_open_files(10**6, "a million")
    assert now[2:] == [(unlimited, unlimited)]


def test_a_program_that_is_missing_is_an_error_of_the_system_also_under_the_old_limit():
    program = """
process_tree.allow_open_files(300)
try:
    process_tree.as_before(["no-such-ssh", "x"])
except OSError as error:
    print(error)
"""
    assert printed(program, 256, 512) == ["[Errno 2] No such file or directory: 'no-such-ssh'"]
