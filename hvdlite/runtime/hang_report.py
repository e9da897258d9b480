"""
`HangReporter`: tells hvdlite-run what this process does, for a report on a job that stands still, and how far it is.

    hvdlite-run ── agent ── connects to <job's directory>/r<pid> ── HangReporter ── OwnStatus, in full
                         ├─ the same, and writes "brief" ────────────────────────── OwnStatus: steps, longest wait
                         └─ no answer: a signal ── faulthandler writes all stacks to <job's directory>/r<pid>.stacks

A thread waits for connections, and costs nothing until one comes. Where a C extension holds the interpreter's lock the
thread has no turn, so the stacks can also be had by a signal, whose handler needs no lock. The thread also tells
hvdlite-run, once in each wait, that this process has waited for others for longer than the stall warning's time. The
host's agent asks (`launcher.host.status_collector`). When the process ends, a file has the last brief answer.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

from hvdlite_wire.codec import decode, encode
from hvdlite_wire.job_contract import STACKS_SIGNAL, note_file, report_socket, stacks_file
from hvdlite_wire.store_requests import StoreRequest
from hvdlite_wire.worker_status import Frame, OwnStatus, Thread

from .. import forks
from ..calls.call_sites import NOT_THE_USERS, FramesOfThreads, outwards
from ..rendezvous.store_client import StoreClient

_LOOKS_EACH_S = 5.0
_ASKED_WITHIN_S = 0.5
# What `accept` fails with while the program, or the machine, lacks files or memory.
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_LACKS_PAUSE_S = 0.2
_MOST_FRAMES = 200
_MOST_MS = 10**9 - 1


class HangReporter:
    """The thread, the socket and the file of one worker process, until it ends."""

    def __init__(
        self,
        job_dir: str,
        worker: int,
        store: StoreClient,
        *,
        describe: Callable[[bool], OwnStatus],
        waited_s: Callable[[], float],
        warn_after_s: float | None,
    ) -> None:
        """``describe`` returns what this rank knows of itself, in full or how far it is alone, on any thread.

        ``waited_s`` returns for how long the process has waited for other ranks; more than ``warn_after_s`` is too
        long. Raises an OSError if nothing can be created in ``job_dir``.
        """
        self._worker = worker
        self._store = store
        self._describe = describe
        self._note = note_file(job_dir, worker, "progress")
        self._waited_s = waited_s
        self._warn_after_s = warn_after_s
        self._has_told = False
        own = report_socket(job_dir, os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)  # of a process that had this number before
        self._listener.bind(own)
        self._listener.listen()
        self._register(stacks_file(job_dir, os.getpid()))
        forks.when_forked(self)
        threading.Thread(target=self._run, name="hvdlite-report", daemon=True).start()

    def _register(self, path: str) -> None:
        """Has the signal write all stacks to this file, unless the program uses the signal itself."""
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # what was registered when torch was imported, or by a process that had this number before
        # Kept open as long as the process lives, since the handler writes to its descriptor.
        self._stacks = open(path, "a")  # noqa: SIM115  # see above
        self._stacks.write(json.dumps({"libraries": NOT_THE_USERS}) + "\n")
        self._stacks.flush()
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True, chain=False)

    def leave_to_parent(self) -> None:
        # Otherwise it would still take connections, and answer none, after the parent's end.
        self._listener.close()

    def _run(self) -> None:
        look_at_s = time.monotonic() + _LOOKS_EACH_S
        while True:
            # Not only when nobody connects for so long: under --watch the agent asks more often.
            if (left_s := look_at_s - time.monotonic()) <= 0:
                self._look()
                look_at_s = time.monotonic() + _LOOKS_EACH_S
                continue
            try:
                self._listener.settimeout(left_s)
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno not in _LACKS:  # the listener was closed
                    return
                time.sleep(_LACKS_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ASKED_WITHIN_S)
                asked = connection.recv(16)
                connection.settimeout(_LOOKS_EACH_S)
                connection.sendall(self._answer(in_full=asked != b"brief"))

    def note_progress(self) -> None:
        """Writes the brief answer to a file for the agent, which reads it once this process has ended."""
        with contextlib.suppress(OSError), open(self._note, "wb") as file:
            file.write(self._answer(in_full=False))

    def forget_note(self) -> None:
        """Removes what `note_progress` wrote: the process is a rank again."""
        with contextlib.suppress(OSError):
            os.unlink(self._note)

    def _answer(self, *, in_full: bool) -> bytes:
        own: dict[str, Any] = {"worker": self._worker}
        if in_full:
            own |= {"libraries": NOT_THE_USERS, "threads": stacks_of_threads()}
        for _ in range(2):
            try:
                answer = encode(replace(self._describe(in_full), **own))
                decode(OwnStatus, answer)  # as the agent will
            # Neither the thread nor hvd.shutdown() may end by it, and the stacks are worth more than no answer.
            except Exception as error:  # noqa: BLE001
                # The second time without optimizers, which other threads change meanwhile.
                own |= {"optimizers": (), "error": f"{type(error).__name__}: {error}"}
            else:
                return answer
        return encode(OwnStatus(**own))

    def _look(self) -> None:
        limit_s, waited_s = self._warn_after_s, self._waited_s()
        is_stalled = limit_s is not None and waited_s >= limit_s
        if is_stalled and not self._has_told:
            waited_ms = min(int(1000 * waited_s), _MOST_MS)
            # Without an agent this process is ended, too.
            with contextlib.suppress(OSError):
                self._store.request(StoreRequest.STALLED, [b"%d" % self._worker, b"%d" % waited_ms])
        self._has_told = is_stalled


def stacks_of_threads() -> tuple[Thread, ...]:
    """Returns all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with FramesOfThreads() as innermost:
        return tuple(
            Thread(names.get(ident, f"thread {ident}"), ident == main, tuple(_frames(frame)[::-1]))
            for ident, frame in innermost.items()
            if ident != threading.get_ident()
        )


def _frames(innermost: FrameType) -> list[Frame]:
    return [
        Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        for frame in islice(outwards(innermost), _MOST_FRAMES)
    ]
