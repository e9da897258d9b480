"""Finds out, while an elastic job runs, which hosts there are: runs the user's script again and again, in a thread.

    script ── lines such as node1:4 ──► Discovery ──► HostsFound, DiscoveryFailed ──► the job's event loop

`launch` creates and closes it. If the first run fails, the only event is `DiscoveryFailed`. A later failure is shown to
the user once, and the hosts stay as they are until a run succeeds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO

from ..errors import LauncherError, UsageError, in_words
from ..plan.hosts import AUTO, Host, find_this_machine, parse_host
from ..plan.job_spec import DiscoveryScript
from ..protocol.messages import DiscoveryFailed, HostsFound
from ..system import process_tree
from ..system.process_tree import signal_name
from ..system.terminal_text import one_line

_MOST_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200
_LOOK_S = 0.05
_REAP_S = 1.0
# How long the end of a job waits for a run to end: not for name servers, which may take any time to answer.
_END_S = 5.0
# A script may read a file while it is being written, so an empty list counts only when printed twice in a row.
_TIMES_EMPTY = 2


class ScriptError(LauncherError):
    """The script failed, or its output is not a list of hosts; the message does not name the script."""


class Discovery:
    """Runs a script until it is closed; leaving the context closes it."""

    def __init__(
        self,
        script: DiscoveryScript,
        put: Callable[[HostsFound | DiscoveryFailed], object],
        say: Callable[[str], object],
    ) -> None:
        """``put`` is called with each event, and ``say`` with text for the user; both in a thread of its own."""
        self._script = script
        self._put = put
        self._say = say
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="discovery")
        self._printed: tuple[Host, ...] | None = None  # by the last run that succeeded; `_found` are its hosts
        self._found: dict[str, int] = {}
        self._last: dict[str, int] | None = None  # those of the last event

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        is_failing, times_empty = False, 0
        while not self._closed.is_set():
            try:
                found = self._hosts()
            except (LauncherError, OSError) as error:
                if self._closed.is_set():
                    return
                why = _words_of(self._script, error)
                if self._last is None:
                    self._put(DiscoveryFailed(why))
                    return
                if not is_failing:
                    self._say(f"{why}. The hosts stay as they are; it is run again every {self._script.period_s:g} s")
                is_failing = True
            else:
                if is_failing:
                    self._say(f"--host-discovery-script {one_line(self._script.command)} works again")
                is_failing = False
                if self._closed.is_set():
                    return
                times_empty = 0 if found else times_empty + 1
                if found != self._last and (found or times_empty == _TIMES_EMPTY):
                    self._last = found
                    self._put(HostsFound(found))
            self._closed.wait(self._script.period_s)

    def _hosts(self) -> dict[str, int]:
        printed = _printed_hosts(self._script, self._closed.is_set)
        if printed != self._printed:  # not each time, since names are looked up
            self._found = {host.label: host.slots for host in find_this_machine(printed)}
            self._printed = printed
        return self._found


def discover(script: DiscoveryScript) -> tuple[Host, ...]:
    """Runs a script once, and returns the hosts that it prints; raises `LauncherError` if it fails."""
    try:
        return find_this_machine(_printed_hosts(script, lambda: False))
    except (LauncherError, OSError) as error:
        raise LauncherError(_words_of(script, error)) from error


def _printed_hosts(script: DiscoveryScript, is_closed: Callable[[], bool]) -> tuple[Host, ...]:
    text = run_script(script, is_closed).decode(errors="backslashreplace")
    return tuple(parse_discovered(text, script.slots_per_host))


def parse_discovered(text: str, slots_per_host: int) -> list[Host]:
    """Parses what a script printed: ``host`` or ``host:slots`` in each line. A `ScriptError` has the line's number.

    A repeated line has no effect, as with horovodrun.
    """
    hosts: dict[str, Host] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        item = line.partition("#")[0].strip()
        if not item:
            continue
        try:
            host = parse_host(item)
        except UsageError as error:
            raise ScriptError(f"line {number} of its output: {error}") from None
        if host.slots == AUTO:
            raise ScriptError(f"line {number} of its output: {one_line(item)!r}: say how many slots, such as node1:4")
        if not item.rpartition("]")[2].count(":"):
            host = Host(host.name, slots_per_host, host.user)
        if hosts.setdefault(host.label, host) != host:
            raise ScriptError(
                f"line {number} of its output: {host.label} has {host.slots} slots, and in line {lines[host.label]} "
                f"{hosts[host.label].slots}; name each host once"
            )
        lines.setdefault(host.label, number)
    return list(hosts.values())


def run_script(script: DiscoveryScript, is_closed: Callable[[], bool]) -> bytes:
    """Returns the output of one run; raises `ScriptError` if it fails. Ends all processes that the run started.

    The run is killed if it takes too long, prints too much, or ``is_closed`` returns True. It prints into files: a
    process that it has left running may keep these open, and nobody waits for it. They are in memory: on a full disk a
    list of hosts would be short or empty, which would end their ranks.
    """
    with _file("stdout") as stdout, _file("stderr") as stderr:
        process = subprocess.Popen(
            process_tree.as_before(["/bin/sh", "-c", script.command]),
            cwd=script.cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            give_up_at = time.monotonic() + script.limit_s
            while not _has_ended(process):
                if max(_size(stdout), _size(stderr)) > _MOST_BYTES:
                    raise ScriptError("it printed more than any list of hosts has, and was killed")
                if time.monotonic() > give_up_at:
                    raise ScriptError(f"it ran for {script.limit_s:g} s, and was killed{_last_line(stderr)}")
                if is_closed():
                    raise ScriptError("the job ends")
        finally:
            process_tree.kill_tree(process.pid)
            process.wait()
            _reap_group(process.pid)
        if code := process.returncode:
            how = {126: "it cannot be executed", 127: "it was not found"}.get(code, f"it ended with exit code {code}")
            raise ScriptError((how if code > 0 else f"it was killed by {signal_name(-code)}") + _last_line(stderr))
        if _size(stdout) > _MOST_BYTES:
            raise ScriptError("it printed more than any list of hosts has")
        return os.pread(stdout.fileno(), _MOST_BYTES, 0)


def _file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _reap_group(pid: int) -> None:
    """Reaps the processes of a killed group that this process has adopted, which would else pile up with each run."""
    give_up_at = time.monotonic() + _REAP_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < give_up_at:
            if os.waitpid(-pid, os.WNOHANG)[0] == 0:
                time.sleep(0.005)


def _last_line(stderr: IO[bytes]) -> str:
    end = os.pread(stderr.fileno(), _MOST_BYTES, max(0, _size(stderr) - _MOST_BYTES))
    lines = end.decode(errors="backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {one_line(last)[:_SHOWN_CHARACTERS]}" if last else ""


def _words_of(script: DiscoveryScript, error: Exception) -> str:
    return f"--host-discovery-script {one_line(script.command)}: {in_words(error) or error}"
