"""The socket on which a running hvdlite-run answers others of the same user, and its client: ``hvdlite-run --report``.

    hvdlite-run --report PID ── @hvdlite-run-<pid> (an abstract Unix socket) ── Console ── ReportAsked ──► supervisor
                             ◄── JSON: {"text": ..., "report": ...}

The socket has no file, and no port: it is there as long as the process, within its network namespace. Both ends check
that the other process is of the same user, or root.
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
from collections.abc import Callable

from ..errors import LauncherError, UsageError
from ..wire.messages import ReportAsked

_REQUEST = b"report\n"
_PATIENCE_S = 15.0
_READ_BYTES = 1 << 16
_PEER = struct.Struct("3i")


class Console:
    """Listens until `close`. Where there are no abstract sockets (not Linux), it does nothing."""

    def __init__(self, put: Callable[[ReportAsked], object]) -> None:
        self._put = put
        self._listener: socket.socket | None = None
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

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread. Who waits for a report gets none."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="console client").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            if not _is_of_same_user(connection) or connection.recv(len(_REQUEST)) != _REQUEST:
                return
            is_there = threading.Event()
            found: list[tuple[str, object]] = []

            def answer(text: str, report: object) -> None:
                found.append((text, report))
                is_there.set()

            self._put(ReportAsked(answer))
            if is_there.wait(_PATIENCE_S):
                ((text, report),) = found
                connection.sendall(json.dumps({"text": text, "report": report}).encode())


def ask_for_report(job: str) -> tuple[str, object]:
    """Returns the report of a running job as text and as JSON's value. ``job`` is its hvdlite-run's process number.

    Raises a UsageError if there is no such job, and a LauncherError if it does not answer.
    """
    if not re.fullmatch(r"[0-9]{1,10}", job):
        raise UsageError(f"--report: {job!r} is not the number of a process{_those_that_run()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(_address(int(job)))
        except OSError:
            raise UsageError(
                f"--report: no hvdlite-run with the process number {job} runs here{_those_that_run()}"
            ) from None
        if not _is_of_same_user(connection):
            raise UsageError(f"--report: process {job} is another user's")
        data = bytearray()
        try:
            connection.sendall(_REQUEST)
            while part := connection.recv(_READ_BYTES):
                data += part
            given = json.loads(data)
            return str(given["text"]), given["report"]
        except (OSError, ValueError, KeyError, TypeError):
            raise LauncherError(
                f"--report: hvdlite-run {job} gave no report: its job is ending, or is another user's"
            ) from None


def running_jobs() -> list[int]:
    """Returns the process numbers of this user's hvdlite-runs that can be asked."""
    found: set[int] = set()
    with contextlib.suppress(OSError), open("/proc/net/unix") as file:
        for line in file:
            # Only those that listen: the connections of those who ask have the same name.
            if match := re.search(r" 00010000 .* @hvdlite-run-([0-9]+)$", line.rstrip("\n")):
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{match[1]}").st_uid in (os.geteuid(), 0):
                        found.add(int(match[1]))
    return sorted(found)


def _those_that_run() -> str:
    jobs = running_jobs()
    return f"; running: {', '.join(map(str, jobs))}" if jobs else "; none of yours runs"


def _address(pid: int) -> str:
    return f"\0hvdlite-run-{pid}"


def _is_of_same_user(connection: socket.socket) -> bool:
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (os.geteuid(), 0)
