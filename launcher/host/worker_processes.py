"""A host's workers: starting them, their pipes, and noticing that one was killed.

    start_workers ──► Worker ──► WorkerOutput ── what it writes ──► the launcher, which sends WorkerStdin its input
                        └──► KilledWorkers ── pidfds of some threads ──► all threads are exiting? ──► on_killed

Output that is not shown yet is in the launcher's memory, so its amount is limited. At the limit the agent stops reading
and the workers block once their pipes are full. The agent keeps sending its other messages to the launcher: a terminal
that does not accept output delays output only. A worker that does not read its input blocks nobody either: each piece
is requested from the launcher (`InputWanted`) when the worker's pipe has room for it.

After a worker was killed, SIGCHLD comes last: a process of some GB is taken down for 0.1 s before it. Its threads end
at once, all but the last one, which does this work. Since Linux 6.9 a pidfd can be that of a thread. Elsewhere nothing
is noticed early. A fired pidfd alone says little: a program's thread may end while others go on. So a worker counts as
killed once the kernel says of each thread that it is exiting, and by which signal: then no instruction of its program
runs any more, and nothing more is written into the memory that it shares with other ranks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from hvdlite_wire.linux import exit_statuses

from ..errors import ProtocolError, in_words
from ..plan.worker_environment import OWN_VARIABLES, HostEnvironment, variables_set
from ..protocol.channel import WINDOW_BYTES, Channel
from ..protocol.messages import Output, Refused, StartJob, Stream
from ..system import process_tree
from ..system.machine import usable_cores

# What is in it is imported when a Python interpreter starts: see its `sitecustomize`.
_DIRECTORY_OF_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")
_READ_BYTES = 1 << 16

# Of each worker: whichever of its threads takes down the memory ends last, and the others tell.
_THREADS = 4
_LOOK_EACH_S = 0.002
# After so many looks the thread has ended by itself.
_LOOKS = 100

_SYS_PIDFD_OPEN = 434
_PIDFD_THREAD = os.O_EXCL


@dataclass
class ForkedProcess:
    """A worker's process that `subprocess` has not started; the parts of a `subprocess.Popen` that the agent uses."""

    pid: int
    returncode: int | None = None
    stdin: IO[bytes] | None = None


@dataclass
class Worker:
    """A started worker process. ``pipes`` are its output streams that have not reached their end.

    ``number`` identifies it in messages to the launcher.
    """

    number: int
    process: subprocess.Popen[bytes] | ForkedProcess
    pipes: dict[Stream, IO[bytes]]


class CannotStartError(Exception):
    """A worker could not be started; ``refused`` is the message about it for the launcher."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.refused = refused


def command_of(job: StartJob) -> tuple[str, ...]:
    return (sys.executable, *job.command) if job.in_python else job.command


def common_environment(job: StartJob, job_dir: str, interface: str | None) -> dict[str, str]:
    """Returns the environment of the job's workers on this host, without the variables that each has of its own.

    ``interface`` is the network interface towards the job's other hosts.
    """
    inherited = {**os.environ, **job.environment} if job.inherits else job.environment
    given = {name: value for name, value in inherited.items() if name not in OWN_VARIABLES}
    of_horovod = _directory_of_horovod() if job.as_horovod else None
    path = filter(None, [_DIRECTORY_OF_HOOK, of_horovod, given.get("PYTHONPATH")])
    given["PYTHONPATH"] = os.pathsep.join(path)
    if not _is_same_directory(given.get("PWD", job.cwd), job.cwd):
        given["PWD"] = job.cwd  # over ssh it is the directory of the login
    host = HostEnvironment(job_dir, usable_cores(), interface, job.slots, is_alone=not job.peers)
    return {**given, **variables_set(given, {}, host)}


def start_workers(
    job: StartJob, workers: Mapping[int, Mapping[str, str]], common: Mapping[str, str]
) -> Iterator[Worker]:
    """Starts these workers of the job one by one and yields each; only worker 0 has a standard input.

    Each leads a session of its own. ``workers`` are their own variables, by their numbers; ``common`` are the others.
    """
    command = command_of(job)
    set_up = process_tree.setting_back(process_tree.dying_with_parent())
    for number, own in workers.items():
        environment = {**common, **own}
        try:
            process = subprocess.Popen(
                command,
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=set_up,  # noqa: PLW1509  # the agent has no threads
            )
        except UnicodeEncodeError as error:  # the locale's encoding is not UTF-8
            what = f"command or environment: {error.object[error.start : error.end]!a}"
            why = f"{what} cannot be encoded in this host's locale: set LC_ALL=C.UTF-8"
            raise CannotStartError(Refused(why, 126)) from error
        except OSError as error:
            raise CannotStartError(_refusal(job, environment, error)) from error
        except subprocess.SubprocessError as error:  # the child could not set itself up
            raise CannotStartError(Refused(str(error).lower(), 126)) from error
        assert process.stdout is not None
        assert process.stderr is not None
        yield Worker(number, process, {"stdout": process.stdout, "stderr": process.stderr})


def _is_same_directory(path: str, other: str) -> bool:
    """Whether both are the same directory, as a path through a link and one without it may be."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path == other


def _directory_of_horovod() -> str:
    """Returns a directory for PYTHONPATH whose `horovod` is an alias of `hvdlite.horovod`.

    An environment variable, unlike a changed command, also works for a shell script and for programs that start others.
    """
    # `find_spec` does not import hvdlite, which would import torch.
    spec = importlib.util.find_spec("hvdlite")
    for directory in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(directory, "horovod", "path")
        if os.path.isdir(path):
            return path
    why = f"--horovod: {sys.executable} has no hvdlite with a horovod module: install the same hvdlite there"
    raise CannotStartError(Refused(why, 1))


def _refusal(job: StartJob, environment: Mapping[str, str], error: OSError) -> Refused:
    """Returns the reason why ``job`` could not be started, in a shell's words, with the shell's exit code."""
    program = job.command[0]
    if not os.path.isdir(job.cwd):
        return Refused(f"{job.cwd}: the working directory does not exist on this host", 1)
    path = os.path.join(job.cwd, program)
    found = os.path.isfile(path) if "/" in program else shutil.which(program, path=environment.get("PATH"))
    if not program or isinstance(error, FileNotFoundError | NotADirectoryError):
        why, exit_code = "command not found", 127
        if found:
            why, exit_code = "the interpreter in its first line was not found", 126
    elif os.path.isdir(path):
        why, exit_code = "is a directory", 126
    elif error.errno == errno.ENOEXEC:
        why, exit_code = "is neither a program nor a script that begins with #! and its interpreter", 126
    else:
        why, exit_code = in_words(error) or (error.strerror or str(error)).lower(), 126
    if program.endswith(".py") and os.path.isfile(path):
        why += f"; did you mean: python {program}?"
    name = program if program.isprintable() and program else repr(program)
    return Refused(f"{name}: {why}", exit_code)


# -- their pipes


class WorkerOutput:
    """The output pipes of all workers. What is read from them is sent as `Output` messages, split anywhere."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        self._selector = selector
        self._channel = channel
        self._forwarders: dict[int, Callable[[], object]] = {}  # by the file descriptor that each reads
        self._held_up = False
        self._room_bytes = WINDOW_BYTES

    def watch(self, worker: Worker) -> None:
        for stream, pipe in worker.pipes.items():
            forward = self._forwarders[pipe.fileno()] = partial(self._forward, worker, stream)
            os.set_blocking(pipe.fileno(), False)
            if not self._held_up:
                self._selector.register(pipe.fileno(), selectors.EVENT_READ, forward)

    def drain(self, worker: Worker) -> None:
        """Sends what a dead worker left in its pipes: at most their capacity, even if they are not at their end then.

        A child of the worker may keep the pipes open, or write to them for ever.
        """
        for stream, pipe in list(worker.pipes.items()):
            left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
            while left > 0 and (count := self._forward(worker, stream, limit=left)):
                left -= count

    def taken(self, count: int) -> None:
        """Allows ``count`` more bytes to be sent, as that many have been shown."""
        self._room_bytes += count

    def hold_up(self) -> None:
        """Stops reading while too much is unsent or not shown, else resumes.

        To be called whenever that may have changed.
        """
        if (self._channel.full or self._room_bytes <= 0) == self._held_up:
            return
        self._held_up = not self._held_up
        for fd, forward in self._forwarders.items():
            if self._held_up:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_READ, forward)

    def _forward(self, worker: Worker, stream: Stream, *, limit: int = _READ_BYTES) -> int:
        """Reads once and sends what was read; returns the number of bytes, 0 if there were none."""
        pipe = worker.pipes.get(stream)
        if pipe is None:
            return 0
        try:
            data = os.read(pipe.fileno(), limit)
        except BlockingIOError:
            return 0
        if data:
            self._room_bytes -= len(data)
            self._channel.send(Output(worker.number, stream, data))
        else:
            del worker.pipes[stream], self._forwarders[pipe.fileno()]
            if not self._held_up:
                self._selector.unregister(pipe)
            pipe.close()
        return len(data)


class WorkerStdin:
    """The input of one worker, written a piece at a time: ``ask`` is called for each, first at the start."""

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector, ask: Callable[[], None]) -> None:
        self._pipe = pipe
        self._selector = selector
        self._ask = ask
        self._rest = memoryview(b"")
        os.set_blocking(pipe.fileno(), False)
        ask()

    def put(self, data: bytes) -> None:
        """Writes the next piece; an empty one is the end of the input."""
        if self._rest:
            raise ProtocolError("the launcher sent more input than was requested")
        if self._pipe.closed:
            return
        if not data:
            self.close()
            return
        self._rest = memoryview(data)
        self._write()

    def close(self) -> None:
        """Closes the pipe, so that the worker reads the end of its input. ``ask`` is not called again."""
        self._rest = memoryview(b"")
        if not self._pipe.closed:
            self._wait(False)
            self._pipe.close()

    def _write(self) -> None:
        if self._pipe.closed:  # the selector may still report a pipe that was closed in the same round
            return
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
        except BlockingIOError:
            self._wait(True)
        except OSError:  # the worker no longer reads it
            self.close()
        else:
            self._wait(False)
            self._ask()

    def _wait(self, for_room: bool) -> None:
        waits = self._pipe in self._selector.get_map()
        if for_room and not waits:
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write)
        elif waits and not for_room:
            self._selector.unregister(self._pipe)


# -- killed ones


class KilledWorkers:
    """The workers that are watched, by pid. ``on_killed(pid, signum)`` is called at most once for each."""

    def __init__(self, selector: selectors.BaseSelector, on_killed: Callable[[int, int], None]) -> None:
        self._selector = selector
        self._on_killed = on_killed
        self._syscall = ctypes.CDLL(None).syscall
        self._pidfds: dict[int, set[int]] = {}
        self._looks: dict[int, int] = {}  # how often to look yet, at those of which a thread has ended
        self._look_at = 0.0

    def watch(self, pid: int) -> None:
        """Watches a child of this process from now on, with the threads that it has now."""
        self.forget(pid)
        pidfds = self._pidfds[pid] = set()
        for thread in sorted(_threads_of(pid))[:_THREADS]:
            if (pidfd := int(self._syscall(_SYS_PIDFD_OPEN, thread, _PIDFD_THREAD))) >= 0:
                pidfds.add(pidfd)
                self._selector.register(pidfd, selectors.EVENT_READ, partial(self._fired, pid, pidfd))

    def forget(self, pid: int) -> None:
        """Watches it no longer. To be called when it is reaped, since its number may be given to another process."""
        for pidfd in list(self._pidfds.get(pid, ())):
            self._close(pid, pidfd)
        self._pidfds.pop(pid, None)
        self._looks.pop(pid, None)

    def _close(self, pid: int, pidfd: int) -> None:
        self._pidfds[pid].remove(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _fired(self, pid: int, pidfd: int) -> None:
        if pidfd not in self._pidfds.get(pid, ()):
            return  # forgotten for another that fired at the same time
        self._close(pid, pidfd)
        self._looks[pid] = _LOOKS
        self._look(pid)

    def time_left_s(self) -> float | None:
        return max(0.0, self._look_at - time.monotonic()) if self._looks else None

    def tick(self) -> None:
        if self._looks and time.monotonic() >= self._look_at:
            for pid in list(self._looks):
                self._look(pid)

    def _look(self, pid: int) -> None:
        self._look_at = time.monotonic() + _LOOK_EACH_S
        self._looks[pid] -= 1
        signum = killed_by(pid)
        if signum is not None:
            self.forget(pid)
            self._on_killed(pid, signum)
        elif self._looks[pid] == 0:
            del self._looks[pid]


def killed_by(pid: int) -> int | None:
    """Returns the signal by which all threads of this process are exiting; None as long as any of them goes on.

    None too where that cannot be read, since this process can open no more files.
    """
    # The lowest seven bits of a wait status are 0 if the program has ended by itself.
    signals = [signum for status in exit_statuses(pid) if (signum := status & 0x7F)]
    return signals[-1] if signals else None


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
