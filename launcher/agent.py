"""`python -m hvdlite_launcher.agent`: one host's workers, from their start until nothing of them is left.

It reads commands on stdin and writes events on stdout (see `protocol`), and decides nothing but this: when
its stdin ends, the launcher is done or gone, and every process that came from here is killed, the job's
directory removed. One thread, one loop, nothing that blocks: a launcher that does not read holds up the
workers' output, but never the end of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial

from . import tree
from .errors import LauncherError, ProtocolError
from .feed import Feed
from .plan import job_dir, left_file, peer_lost_file
from .protocol import (
    Decoder,
    Exited,
    Input,
    InputWanted,
    Message,
    Output,
    Refused,
    SignalRanks,
    Started,
    StartJob,
    Stream,
    encode,
)
from .signals import signals_as_bytes
from .workers import CannotStartError, Worker, capacity_bytes, start_workers

_READ_BYTES = 1 << 16
_OUTGOING_BYTES = 1 << 18  # with more than this unsent, the workers' pipes are left to fill
_PIPE_BYTES = 1 << 20
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """The loop over three file descriptors: commands in, events out, and the signals we get, as bytes."""

    def __init__(self, commands: int, events: int, signals: int, *, adopts: bool) -> None:
        """``adopts``: orphans among our descendants become our children, so that none is out of sight."""
        self._commands = commands
        self._events = events
        self._signals = signals
        self._adopts = adopts
        self._decoder = Decoder()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}  # by pid, those that run
        self._groups: list[int] = []  # of all workers ever
        self._forwarders: dict[int, Callable[[], object]] = {}  # by the file descriptor that they read
        self._feeds: dict[int, Feed] = {}  # by rank
        self._held_up = False
        self._job_dir: str | None = None
        self._over = False

    def run(self) -> None:
        """Until the launcher hangs up or a signal tells us to; then kill, tidy up and return."""
        self._listen(self._commands, self._read_commands)
        self._listen(self._signals, self._read_signals)
        os.set_blocking(self._events, False)
        try:
            while not self._over:
                for key, _ in self._selector.select():
                    key.data()
                self._flush()
        finally:
            self._end()

    def _listen(self, fd: int, react: Callable[[], object]) -> None:
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _end(self) -> None:
        if not self._adopts:  # the groups may hold children of the dead, which no list of descendants shows
            for group in self._groups:
                tree.signal_group(group, signal.SIGKILL)
        everything_ended = tree.kill_descendants()
        if self._job_dir is not None:
            shutil.rmtree(self._job_dir, ignore_errors=True)
        if not everything_ended:
            raise LauncherError("some processes of the job could not be killed")

    # ------------------------------------------------------- from the launcher

    def _read_commands(self) -> None:
        data = os.read(self._commands, _READ_BYTES)
        if not data:
            self._over = True
        for message in self._decoder.feed(data):
            match message:
                case StartJob():
                    self._start(message)
                case SignalRanks():
                    self._signal(message)
                case Input():
                    if feed := self._feeds.get(message.rank):
                        feed.put(message.data)
                case _:
                    raise ProtocolError("the launcher sent what only an agent says")

    def _start(self, job: StartJob) -> None:
        if self._job_dir is not None:
            raise ProtocolError("the launcher started a second job")
        try:
            path = job_dir(job.token, tempfile.gettempdir())
            os.mkdir(path, 0o700)
        except OSError as error:
            self._send(Refused(f"cannot make a directory for the job: {error}", 1))
            return
        self._job_dir = path
        try:
            for worker in start_workers(job, path):
                self._send(Started(worker.rank, worker.process.pid))
                self._watch(worker)
        except CannotStartError as error:
            self._send(error.refused)

    def _watch(self, worker: Worker) -> None:
        self._workers[worker.process.pid] = worker
        self._groups.append(worker.process.pid)
        for stream, pipe in worker.pipes.items():
            forward = self._forwarders[pipe.fileno()] = partial(self._forward, worker, stream)
            self._listen(pipe.fileno(), forward)
        if (stdin := worker.process.stdin) is not None:
            self._feeds[worker.rank] = Feed(stdin, self._selector, lambda: self._send(InputWanted(worker.rank)))

    def _signal(self, command: SignalRanks) -> None:
        for pid, worker in self._workers.items():
            if worker.rank not in command.ranks:
                continue
            if command.signum == signal.SIGKILL:
                tree.kill_tree(pid)
            else:
                tree.signal_group(pid, command.signum)

    # ------------------------------------------------------------ from workers

    def _forward(self, worker: Worker, stream: Stream, *, limit: int = _READ_BYTES) -> int:
        """Pass on what the worker wrote; the number of bytes, 0 if nothing was there."""
        pipe = worker.pipes.get(stream)
        if pipe is None:
            return 0
        try:
            data = os.read(pipe.fileno(), limit)
        except BlockingIOError:
            return 0
        if data:
            self._send(Output(worker.rank, stream, data))
        else:
            del worker.pipes[stream], self._forwarders[pipe.fileno()]
            if not self._held_up:
                self._selector.unregister(pipe)
            pipe.close()
        return len(data)

    def _read_signals(self) -> None:
        received = os.read(self._signals, 4096)
        if any(signum != signal.SIGCHLD for signum in received):
            self._over = True
        for pid, returncode in tree.reap()[0]:
            worker = self._workers.pop(pid, None)
            if worker is None:
                continue  # an orphan that we adopted
            worker.process.returncode = returncode
            self._drain(worker)
            if feed := self._feeds.pop(worker.rank, None):
                feed.close()
            assert self._job_dir is not None, "workers are started after it is made"
            peer_lost, left = (os.path.exists(note(self._job_dir, worker.rank)) for note in (peer_lost_file, left_file))
            self._send(Exited(worker.rank, returncode, peer_lost, left))

    def _drain(self, worker: Worker) -> None:
        """Pass on all that a dead worker wrote, which is what its pipes can hold.

        Not what comes until their end: a child of the worker's may keep them open, or write for ever.
        """
        for stream, pipe in list(worker.pipes.items()):
            left = capacity_bytes(pipe)
            while left > 0 and (count := self._forward(worker, stream, limit=left)):
                left -= count

    # --------------------------------------------------------- to the launcher

    def _send(self, message: Message) -> None:
        self._outgoing += encode(message)

    def _flush(self) -> None:
        """Write what the launcher takes now. While too much is left, the workers' pipes are not read."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._events, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # nobody listens any more
            self._over = True
            return
        waits = self._events in self._selector.get_map()
        if self._outgoing and not waits:
            self._selector.register(self._events, selectors.EVENT_WRITE, self._flush)
        elif waits and not self._outgoing:
            self._selector.unregister(self._events)
        hold_up = len(self._outgoing) > _OUTGOING_BYTES
        if hold_up != self._held_up:
            self._held_up = hold_up
            for fd, forward in self._forwarders.items():
                if hold_up:
                    self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ, forward)


def main() -> int:
    adopts = tree.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how workers end
    # Nothing that is started or that prints shall find the wire as its own stdin or stdout.
    commands, events = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        with signals_as_bytes(_SIGNALS) as signals:
            Agent(commands, events, signals, adopts=adopts).run()
    except LauncherError as error:
        print(f"hvdlite-run: agent: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
