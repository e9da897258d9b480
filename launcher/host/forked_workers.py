"""`ForkedWorkers`: starts workers that replace others as copies of a process that has imported torch.

    ask ── the worker's pipes ──► fork server ── pid ──► on_started(worker) ── the go-ahead ──► its program begins
                                              ── no answer in time, or "declined" ──► started in the other way

The fork server is the library's (`hvdlite.worker.fork_server`), run by the job's own interpreter with the options and
the environment of the workers, some seconds after the first of them has called hvd.init(): then it does not compete
with their start, and a short job has none. Requests and answers are JSON, one message each on a socket without a name.

A worker is started so only where that makes no difference to its program: its command is one of Python's that
`python_command` understands, its environment differs from the server's in the variables of its place alone, and what
the server imports prints nothing. A forked worker waits for the go-ahead, so none begins that was given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ..plan.python_command import PythonCommand
from ..plan.worker_environment import OWN_VARIABLES
from ..system import process_tree
from .worker_processes import ForkedProcess, Worker

_STARTS_AFTER_S = 5.0
_ANSWERS_WITHIN_S = 3.0
_MOST_SERVERS = 2
_MOST_BYTES = 1 << 16

# The interpreter puts first on sys.path, for -c, the working directory. Where it puts a script's directory, that is
# put there before anything is imported.
_CODE = """\
import sys
if not getattr(sys.flags, "safe_path", sys.flags.isolated): sys.path[0] = sys.argv[1]
del sys
from hvdlite.worker.fork_server import serve
serve({fd}, {agent})
"""


@dataclass
class _Request:
    """A worker that the server is to fork: our ends of its pipes, and what to do with it.

    ``signals`` came for it before it was there. ``start_anew`` is called with them if it is not forked.
    """

    until_s: float
    stdout: IO[bytes]
    stderr: IO[bytes]
    go: int
    start_anew: Callable[[Sequence[int]], None]
    signals: list[int] = field(default_factory=list)

    def close(self) -> None:
        for pipe in (self.stdout, self.stderr):
            pipe.close()
        os.close(self.go)


class ForkedWorkers:
    """The fork server of a host, from when it is to be started on, and the workers that were asked of it."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_started: Callable[[Worker], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_started`` is called before the worker's program begins."""
        self._selector = selector
        self._on_started = on_started
        self._clock = clock
        self._start_at: float | None = None
        self._command: PythonCommand | None = None
        self._cwd = ""
        self._environment: Mapping[str, str] = {}
        self._servers_left = _MOST_SERVERS
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._requests: dict[int, _Request] = {}
        self.is_ready = False

    def start_soon(self, command: PythonCommand, cwd: str, environment: Mapping[str, str]) -> None:
        """Starts a server for such workers in some seconds; to be called once.

        ``environment`` is the workers', without the variables that each has of its own.
        """
        self._command, self._cwd, self._environment = command, cwd, environment
        self._start_at = self._clock() + _STARTS_AFTER_S

    @property
    def is_planned(self) -> bool:
        return self._command is not None

    def time_left_s(self) -> float | None:
        due = [request.until_s for request in self._requests.values()]
        if self._start_at is not None:
            due.append(self._start_at)
        return max(0.0, min(due) - self._clock()) if due else None

    def tick(self) -> None:
        """Starts the server when it is time, and does without one that has not answered for too long."""
        now_s = self._clock()
        if self._start_at is not None and self._start_at <= now_s:
            self._start_at = None
            self._start()
        if any(request.until_s <= now_s for request in self._requests.values()):
            self._stop()

    def _start(self) -> None:
        assert self._command is not None, "it is set before the time"
        self._servers_left -= 1
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # this process can open no more files
            return
        code = _CODE.format(fd=theirs.fileno(), agent=os.getpid())
        with theirs:
            try:
                command = self._command
                self._server = subprocess.Popen(
                    [command.interpreter, *command.options, "-c", code, command.first_path(self._cwd)],
                    cwd=self._cwd,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=process_tree.setting_back(  # noqa: PLW1509  # the agent has no threads
                        process_tree.dying_with_parent()
                    ),
                )
            except (OSError, subprocess.SubprocessError):  # or the child could not set itself up
                ours.close()
                return
        ours.setblocking(False)
        self._connection = ours
        assert self._server.stdout is not None
        self._selector.register(ours, selectors.EVENT_READ, self._read_answer)
        self._selector.register(self._server.stdout, selectors.EVENT_READ, self._read_output)

    def _read_output(self) -> None:
        if self._connection is None or self._server is None or self._server.stdout is None:
            return  # closed in the same round
        if self._server.stdout.read(1):
            # A worker would print it too, but nothing can tell where in its own output.
            self._servers_left = 0
        self._stop()

    def _stop(self) -> None:
        """Does without this server, and has the workers that were asked of it started in the other way."""
        if self._connection is None or self._server is None:
            return
        if self._server.returncode is None:
            os.kill(self._server.pid, signal.SIGKILL)  # it is not reaped, so its number is its own
        assert self._server.stdout is not None
        for each in (self._connection, self._server.stdout):
            self._selector.unregister(each)
            each.close()
        self._connection, self.is_ready = None, False
        for number in list(self._requests):
            self._refuse(number)

    def reaped(self, pid: int, returncode: int) -> None:
        """Notes the end of a child of this process that is no worker. A server that was killed is started once more."""
        if self._server is None or self._server.pid != pid:
            return
        self._server.returncode = returncode
        self._stop()
        self._server = None
        if self._servers_left and returncode < 0:
            self._start_at = self._clock() + _STARTS_AFTER_S

    # --------------------------------------------------------------- the workers

    def ask(self, number: int, environment: Mapping[str, str], start_anew: Callable[[Sequence[int]], None]) -> bool:
        """Asks for a worker with this whole environment; returns False if it must be a new interpreter.

        Otherwise ``on_started`` is called, or ``start_anew`` with the signals that have come for it meanwhile.
        """
        own = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        is_like_server = own.keys() <= OWN_VARIABLES and self._environment.keys() <= environment.keys()
        if not self.is_ready or not is_like_server or self._connection is None:
            return False
        command = {name: getattr(self._command, name) for name in ("kind", "program", "arguments", "words")}
        data = json.dumps({"worker": number, **command, "environment": own}).encode()
        if len(data) > _MOST_BYTES or (pipes := _three_pipes()) is None:
            return False
        (out, out_writes), (err, err_writes), (go_reads, go) = pipes
        stdout, stderr = (os.fdopen(fd, "rb", buffering=0) for fd in (out, err))
        request = _Request(self._clock() + _ANSWERS_WITHIN_S, stdout, stderr, go, start_anew)
        theirs = [out_writes, err_writes, go_reads]
        try:
            socket.send_fds(self._connection, [data], theirs)
        except OSError:  # it has just ended, or has not read earlier requests
            request.close()
            return False
        finally:
            for fd in theirs:
                os.close(fd)
        self._requests[number] = request
        return True

    def keep_signal(self, number: int, signum: int) -> None:
        """Keeps a signal for a worker that was asked for and is not there yet; does nothing for any other."""
        if request := self._requests.get(number):
            request.signals.append(signum)

    def _read_answer(self) -> None:
        if self._connection is None:
            return  # closed in the same round
        try:
            answer = json.loads(self._connection.recv(_MOST_BYTES))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # among them its end
            answer = {}
        number = answer.get("worker")
        if "ready" in answer:
            self.is_ready = True
        elif number not in self._requests:
            if number is None:
                self._stop()
        elif "pid" in answer and _is_child(answer["pid"]):
            self._begin(number, answer["pid"])
        else:
            self._refuse(number)

    def _begin(self, number: int, pid: int) -> None:
        request = self._requests.pop(number)
        self._on_started(Worker(number, ForkedProcess(pid), {"stdout": request.stdout, "stderr": request.stderr}))
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(request.go, b"g")
        os.close(request.go)
        for signum in request.signals:
            process_tree.signal_group(pid, signum)

    def _refuse(self, number: int) -> None:
        request = self._requests.pop(number)
        request.close()
        request.start_anew(request.signals)


def _three_pipes() -> list[tuple[int, int]] | None:
    """Returns three pipes; None if this process can open no more files."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(3):
            pipes.append(os.pipe())  # those before one that fails are closed
    except OSError:
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)
        return None
    return pipes


def _is_child(pid: int) -> bool:
    """Whether this is a child of this process that it has not reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
