"""The socket on which a running hvdlite-run answers others of the same user, and its clients.

    hvdlite-run --report PID ── @hvdlite-run-<pid> (an abstract Unix socket) ── Console ── ReportAsked ──► supervisor
                             ◄── JSON: {"text": ..., "report": ...}
    hvdlite-run --watch PID  ── each two seconds ── Console ── WatchAsked ──► supervisor
                             ◄── JSON: `status.job_view.JobView`
    hvdlite-run --ps         ── each of them, at once ── Console
                             ◄── JSON: {"started_at": ..., "workers": ..., "hosts": ..., "command": ...}

The socket has no file, and no port: it is there as long as the process, within its network namespace. The launcher
answers its own user and root, and the client asks only launchers of its own user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import JobEndsError, LauncherError, UsageError
from ..protocol.messages import ReportAsked, WatchAsked
from ..system.terminal_text import command_in_one_line, table

_REPORT, _WATCH, _ABOUT = b"report\n", b"watch\n", b"about\n"
_REQUEST_BYTES = 16
_PATIENCE_S = 15.0
_ABOUT_PATIENCE_S = 2.0
_PEER = struct.Struct("3i")
_NONE = object()
_LACKS_PAUSE_S = 0.2

# The last parts of the paths of programs, and the module, that run `launcher.__main__`.
_PROGRAM, _MODULE = b"hvdlite-run", b"hvdlite_launcher"


class Console(contextlib.AbstractContextManager["Console"]):
    """Listens until `close`. Where there are no abstract sockets (not Linux), it does nothing."""

    def __init__(
        self, put: Callable[[ReportAsked | WatchAsked], object], about: Callable[[], Mapping[str, object]]
    ) -> None:
        """``about`` returns what `--ps` shows of the job, for JSON. It is called in threads of this object."""
        self._put = put
        self._about = about
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._closes = threading.Event()
        self._waiting: set[SimpleQueue[object]] = set()  # where the answers come in that others wait for
        if not sys.platform.startswith("linux"):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(os.getpid()))
        except OSError:  # a process of another namespace of numbers has it: there is only SIGQUIT then
            listener.close()
            return
        listener.listen()
        self._listener = listener
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True, name="console")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread. Who waits for an answer is told at once that there is none."""
        if self._listener is not None:
            self._closes.set()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()
            with self._lock:
                for answers in self._waiting:
                    answers.put(_NONE)

    def _run(self, listener: socket.socket) -> None:
        while not self._closes.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # it closes, or this process can open no more files for now
                self._closes.wait(_LACKS_PAUSE_S)
                continue
            # Before there is a thread for it: others may connect as often as they like.
            if _user_of(connection) not in (os.geteuid(), 0):
                connection.close()
                continue
            client = threading.Thread(target=self._serve, args=(connection,), daemon=True, name="console client")
            try:
                client.start()
            except RuntimeError:  # there are too many: who asked is told that there is no answer
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            request = connection.recv(_REQUEST_BYTES)
            if request == _ABOUT:
                connection.sendall(json.dumps(self._about()).encode())
            elif request in (_REPORT, _WATCH) and (answer := self._answer_to(request)) is not _NONE:
                connection.sendall(json.dumps(answer).encode())

    def _answer_to(self, request: bytes) -> object:
        """Returns what the supervisor answers, for JSON; `_NONE` if it does not in time, or this object is closed."""
        answers: SimpleQueue[object] = SimpleQueue()
        with self._lock:
            if self._closes.is_set():
                return _NONE
            self._waiting.add(answers)
        try:
            if request == _REPORT:
                self._put(ReportAsked(lambda text, report: answers.put({"text": text, "report": report})))
            else:
                self._put(WatchAsked(answers.put))
            return answers.get(timeout=_PATIENCE_S)
        except Empty:
            return _NONE
        finally:
            with self._lock:
                self._waiting.discard(answers)


def ask_for_report(job: str, flag: str = "--report") -> tuple[str, dict[str, Any]]:
    """Returns the report of a running job as text and as JSON's value. ``job`` is its hvdlite-run's process number.

    ``flag`` is the one that errors name. Raises a UsageError if there is no such job, a JobEndsError if it is ending,
    and a LauncherError if it does not answer.
    """
    given = _asked(job, flag, _REPORT, "gave no report")
    try:
        return str(given["text"]), dict(given["report"])
    except (KeyError, TypeError, ValueError):
        raise LauncherError(f"{flag}: hvdlite-run {job} is of another version: use its own hvdlite-run") from None


def ask_for_view(job: str) -> Any:
    """Returns JSON's value of what there is to see of a running job; raises as `ask_for_report` does."""
    return _asked(job, "--watch", _WATCH, "does not answer")


def the_one_job(flag: str) -> str:
    """Returns the process number of the only hvdlite-run of this user here; raises a UsageError unless it is alone."""
    jobs = running_jobs()
    if len(jobs) == 1:
        return str(jobs[0])
    if jobs:
        raise UsageError(f"{flag}: {len(jobs)} of your jobs run here; give the PID of one of them (--ps lists them)")
    raise UsageError(". ".join([f"{flag}: none of your jobs runs here", *_advice(elsewhere())]))


def _asked(job: str, flag: str, request: bytes, without_answer: str) -> Any:
    if not re.fullmatch(r"[0-9]{1,10}", job):
        raise UsageError(f"{flag}: {job!r} is not the number of a process{_those_that_run()}")
    try:
        return _ask(int(job), request, _PATIENCE_S)
    except ConnectionRefusedError:
        there = elsewhere()
        if int(job) in there:
            raise UsageError(f"{flag}: {_advice([int(job)])[0]}") from None
        missing = f"{flag}: no hvdlite-run with the process number {job} runs here{_those_that_run()}"
        raise UsageError(". ".join([missing, *_advice(there)])) from None
    except PermissionError:
        raise UsageError(f"{flag}: process {job} is another user's") from None
    except (BlockingIOError, TimeoutError):
        raise LauncherError(f"{flag}: hvdlite-run {job} {without_answer}: it is stopped, or very busy") from None
    except (OSError, ValueError):
        raise JobEndsError(f"{flag}: hvdlite-run {job} {without_answer}: its job is ending") from None


def _ask(pid: int, request: bytes, patience_s: float) -> Any:
    """Returns the answer of an hvdlite-run, as JSON's value.

    Raises ConnectionRefusedError if there is none, PermissionError if it is another user's, TimeoutError or
    BlockingIOError (so many wait for it that it takes no more) if it does not answer, and any other OSError or
    ValueError if it ends.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience_s)
        connection.connect(_address(pid))
        if _user_of(connection) != os.geteuid():
            raise PermissionError
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return json.loads(answer.read())


def table_of_jobs() -> str:
    """Returns a line for each hvdlite-run of this user on this machine, with the age of its job, for `--ps`.

    A last line names those in other network namespaces.
    """
    rows = [("PID", "AGE", "WORKERS", "HOSTS", "COMMAND")]
    for pid in running_jobs():
        try:
            about = _ask(pid, _ABOUT, _ABOUT_PATIENCE_S)
            age = timedelta(seconds=max(0, int(time.time() - float(about["started_at"]))))
            command = command_in_one_line(about["command"])
            rows.append((str(pid), str(age), str(about["workers"]), ",".join(about["hosts"]), command))
        except (TimeoutError, BlockingIOError):
            rows.append((str(pid), "?", "?", "?", "(does not answer: it is stopped, or very busy)"))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it ends just now
    return "\n".join([*table(rows), *_advice(elsewhere())])


def running_jobs() -> list[int]:
    """Returns the process numbers of this user's hvdlite-runs that can be asked."""
    found: set[int] = set()
    # The names of others' sockets may be any bytes.
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="ascii", errors="replace") as file:
        for line in file:
            # Only those that listen: the connections of those who ask have the same name.
            if match := re.search(r" 00010000 .* @hvdlite-run-([0-9]+)$", line.rstrip("\n")):
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{match[1]}").st_uid == os.geteuid():
                        found.add(int(match[1]))
    return sorted(found)


def _those_that_run() -> str:
    jobs = running_jobs()
    return f"; running: {', '.join(map(str, jobs))}" if jobs else "; none of yours runs"


def _address(pid: int) -> str:
    return f"\0hvdlite-run-{pid}"


def _user_of(connection: socket.socket) -> int:
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


# -- jobs in other network namespaces, as of containers: none of them can be asked from here


def elsewhere() -> list[int]:
    """Returns the process numbers of this user's hvdlite-runs there, as far as they may be looked at."""
    own, found = network_of("self"), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read(4096).split(b"\0")
                if _is_launcher(words) and None not in (own, there := network_of(int(name))) and there != own:
                    found.append(int(name))
    return found


def network_of(pid: int | str) -> str | None:
    """Returns the network namespace of a process; None if it has ended, or may not be looked at."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _advice(pids: list[int]) -> list[str]:
    """Returns a line that they are there, and how to ask them; none for none."""
    if not pids:
        return []
    are = "is" if len(pids) == 1 else "are"
    return [
        f"hvdlite-run {', '.join(map(str, pids))} {are} in another network namespace, as of a container: ask in there "
        f"(docker exec, kubectl exec, nsenter --net=/proc/{pids[0]}/ns/net)"
    ]


def _is_launcher(words: list[bytes]) -> bool:
    """Whether a process with these words runs jobs: as a script of its interpreter, or by ``-m``."""
    begin = words[:6]
    return any(os.path.basename(word) == _PROGRAM for word in begin[:2]) or (
        b"-m" in begin[:-1] and begin[begin.index(b"-m") + 1] == _MODULE
    )
