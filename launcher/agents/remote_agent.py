"""The launcher's connection to one agent: starts it on its host, sends it commands, and receives its events.

`plan.ssh` builds the command that reaches another host, which is `host.remote_parent`; that starts `host.agent`, the
other end. Events go to a queue, and requests to the rendezvous store to `store.server`. All that is read and written is
in the thread of a `connection_loop`, where nothing blocks: an agent that does not answer delays no other.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import IO

from ..errors import ProtocolError, one_reason
from ..plan.hosts import Host
from ..plan.ssh import SSH_FAILED, killed_by, last_words, why_not_there_yet
from ..protocol.channel import BEAT_S, FROM_AGENT, MARK, SILENCE_S, WINDOW_BYTES, Channel, encode
from ..protocol.messages import (
    AgentSaid,
    Answered,
    Beat,
    Command,
    Event,
    Exited,
    Greet,
    Hello,
    Lost,
    Message,
    NotThereYet,
    OfWorker,
    Output,
    OutputTaken,
    Refused,
)
from ..protocol.store_messages import StoreEvent
from ..store.server import Store
from ..system.process_tree import as_before, signal_name, with_absolute_python_path
from ..system.terminal_text import one_line
from ..version import VERSION
from .connection_loop import ConnectionLoop

_READ_BYTES = 1 << 18
_NOISE_BYTES = 1 << 16  # the most that a login shell's start files may print before the agent's MARK
_OVERDRAFT_BYTES = 64 << 20
_MOST_SAID_BYTES = 1 << 20  # of the stderr of ssh and the agent: more is not shown. Workers' output is sent as `Output`
_UNEXPECTED = "its hvdlite agent ended unexpectedly"
# After the end of what an agent sends: how long to wait for its return code and the end of its stderr, and how often to
# look for them.
_WORDS_S, _LOOK_S = 2.0, 0.01


def local_agent_argv() -> list[str]:
    """Returns the command that runs an agent on this machine: its stdin and stdout are the connection."""
    return [sys.executable, "-m", "hvdlite_launcher.host.remote_parent"]


@dataclass
class _OutputBytes:
    """How much of the workers' output was ``received``, shown or discarded (``done_with``), and told the agent so."""

    received: int = 0
    done_with: int = 0
    reported: int = 0


class RemoteAgent:
    """A running agent. Its events are put into ``events``; hanging up ends all processes of the job on its host."""

    def __init__(
        self,
        host: Host,
        argv: list[str],
        events: SimpleQueue[Event],
        *,
        loop: ConnectionLoop,
        store: Store,
        explain: Callable[[int, str], str],
        try_again: Callable[[RemoteAgent], None] | None = None,
    ) -> None:
        """``argv`` starts the agent. ``explain(returncode, stderr)`` returns the reason if it ends before its `Hello`.

        If the reason is that its host is not there yet, that is the event `NotThereYet`, and ``try_again`` is called
        in the thread of ``loop``; if that is None, it is the event `Lost`, as for any other reason.

        ``store`` answers the workers' requests, in the thread of ``loop`` and not in the event loop of the job, which
        has to react fast. Raises OSError if there cannot be a process. What it sends is read once it is greeted.
        """
        self.host = host
        self.workers: Collection[int] = ()
        """The numbers of the workers on its host, from when it is sent `StartJob`."""
        self._events = events
        self._loop = loop
        self._output = _OutputBytes()
        self._ended: set[int] = set()
        self._store = store
        self._explain = explain
        self._try_again = try_again
        self._greeted = self._dismissed = self._is_lost = False
        self._process = _start(argv, is_here=host.is_here)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdout, stdin = self._process.stdout.fileno(), self._process.stdin.fileno()
        self._channel = Channel(stdout, stdin, loop.selector, kinds=FROM_AGENT)
        self._reads: set[IO[bytes]] = set()  # its pipes that are read from
        self._words, self._room = "", _MOST_SAID_BYTES  # the last of its stderr, and how many bytes of it may be shown
        self._noise, self._spoke = b"", False  # what came on its stdout before its mark

    # ------------------------------------------------------------ from any thread

    def greet(self, *, count_slots: bool, interface: str | None) -> None:
        """Sends the first message; the agent's answer is an event, `Answered` or `Lost`."""
        greeting = Greet(VERSION, not self.host.is_here, count_slots, interface)
        self._call(self._begin, encode(greeting))

    def send(self, command: Command) -> None:
        """Queues a command and does not block. If the agent has ended, that is the event `Lost` and no error here."""
        self._call(self._send, encode(command))

    def output_shown(self, count: int) -> None:
        """Reports that ``count`` bytes of its output were shown or discarded. Must be called from one thread only."""
        output = self._output
        output.done_with += count
        if (unreported := output.done_with - output.reported) >= WINDOW_BYTES // 4:
            self.send(OutputTaken(unreported))
            output.reported = output.done_with

    def hang_up(self) -> None:
        """Makes the agent kill what still runs on its host, clean up and end. This causes no `Lost`."""
        self._dismissed = True
        self._call(self._finish)

    def discard(self) -> None:
        """Ends an agent that was not greeted, and so has started nothing."""
        self._process.kill()
        self._process.wait()
        self.close()

    def kill(self) -> None:
        """Kills the agent on this machine, or the ssh client to it: its host is lost, as by an accident."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Waits for the agent and returns its exit code: 0 if nothing of the job is left on its host.

        Kills the agent (the ssh client, for another host) after ``timeout_s``, or at once if it is silent or sent no
        `Hello` and so started nothing.
        """
        try:
            return self._process.wait(timeout_s if self._greeted and not self._channel.silent else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def exit_code(self, *, is_late: bool) -> int | None:
        """Returns what `wait` does, or None as long as the agent has not ended. ``is_late``: kills it."""
        if is_late or self._channel.silent or not self._greeted:
            self._process.kill()
        return self._process.poll()

    def close(self) -> None:
        """Closes its pipes, once it has ended, and so has the loop."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    # ------------------------------------------ in the loop's thread: the process

    def _call(self, work: Callable[..., object], *arguments: object) -> None:
        self._loop.call(partial(self._do, work, *arguments))

    def _later(self, delay_s: float, work: Callable[..., object], *arguments: object) -> None:
        self._loop.later(delay_s, partial(self._do, work, *arguments))

    def _do(self, work: Callable[..., object], *arguments: object) -> None:
        """Calls a function for the loop: an error in it costs this agent, and no other."""
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001  # nothing else would tell that this agent is not heard any more
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.kill()
        self._lose(f"its connection failed: {one_line(one_reason(error))}")

    def _begin(self, greeting: bytes) -> None:
        for pipe, read in ((self._process.stdout, self._read), (self._process.stderr, self._read_words)):
            if pipe is not None:
                self._loop.selector.register(pipe, selectors.EVENT_READ, partial(self._do, read))
                self._reads.add(pipe)
        if not self.host.is_here:
            self._channel.beat()
            self._later(BEAT_S, self._tick)
        self._send(greeting)

    def _send(self, frame: bytes) -> None:
        if not self._channel.is_finished:
            self._channel.send(frame)
            self._channel.flush()

    def _finish(self, *, drops_rest: bool = False) -> None:
        assert self._process.stdin is not None
        self._channel.finish(self._process.stdin.close, drops_rest=drops_rest)

    def _tick(self) -> None:
        """Sends a beat, and notices a silent agent."""
        channel = self._channel
        if channel.is_finished:
            return
        if not self._greeted:  # it may take time to start: until then ssh itself watches the connection
            channel.hear()
        channel.tick()
        channel.flush()
        if channel.silent:
            self._lose(f"no message from it for {SILENCE_S:g} s: the host is down, or its network connection is cut")
        self._later(channel.time_left_s() or 0.0, self._tick)

    # ------------------------------------------- in the loop's thread: what comes

    def _read(self) -> None:
        data = self._channel.read()
        if not data:
            self._stop_reading(self._process.stdout)
            self._await_end(time.monotonic() + _WORDS_S)
            return
        try:
            for message in self._channel.decode(data if self._spoke else self._after_noise(data)):
                self._dispatch(message)
        except ProtocolError as error:
            self._lose(str(error))

    def _after_noise(self, data: bytes) -> bytes:
        """Returns what follows the agent's mark, which the start files of a login shell may precede."""
        self._noise, mark, data = (self._noise + data).partition(MARK)
        self._spoke = bool(mark)
        if not self._spoke and len(self._noise) > _NOISE_BYTES:
            raise ProtocolError(f"the program that answers there is not an hvdlite agent: {self._noise[:40]!r}")
        return data

    def _stop_reading(self, pipe: IO[bytes] | None) -> None:
        if pipe is not None and pipe in self._reads:
            self._reads.remove(pipe)
            self._loop.selector.unregister(pipe)

    def _await_end(self, until_s: float) -> None:
        """Looks for the return code and the end of stderr, which come soon after the end of what it sends."""
        is_told = self._process.poll() is not None and self._process.stderr not in self._reads
        if not (is_told or self._dismissed) and time.monotonic() < until_s:
            self._later(_LOOK_S, self._await_end, until_s)
            return
        end = self._why_it_ended("" if self._spoke else self._noise.decode(errors="backslashreplace"))
        if isinstance(end, str) or self._dismissed:
            self._close_pipes()
            self._lose(str(end))
            return
        self._stop_reading(self._process.stderr)
        self._close_pipes()
        self._is_lost = True
        self._events.put(end)
        assert self._try_again is not None, "then no host is not there yet"
        self._try_again(self)

    def _close_pipes(self) -> None:
        """Closes the pipes of an agent that sends no more, but for stderr as long as anything holds that open."""
        self._finish(drops_rest=True)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and pipe not in self._reads:
                pipe.close()

    def _lose(self, why: str) -> None:
        """Hears no more of it, and tells that it is lost, once, and unless it was hung up on."""
        self._stop_reading(self._process.stdout)
        if self._is_lost:
            return
        self._is_lost = True
        self._store.lose(self)
        if not self._dismissed:
            self._events.put(Lost(self.host.label, why))

    def _dispatch(self, message: Message) -> None:
        """Passes a message on to the store or the event queue. Raises `ProtocolError` if it is not allowed now."""
        if isinstance(message, Beat):
            return
        if isinstance(message, Command):
            raise ProtocolError("its hvdlite agent sent a message that only the launcher may send")
        if isinstance(message, Hello):
            self._welcome(message)
            return
        if not self.workers:
            # It refused `Greet`, which ends it.
            if isinstance(message, Refused):
                raise ProtocolError(one_line(message.why))
            raise ProtocolError("its hvdlite agent reported on a worker before any was started")
        if isinstance(message, StoreEvent):
            self._store.receive(self, message)
            return
        if isinstance(message, Refused):
            if message.worker is not None and message.worker not in self.workers:
                raise ProtocolError("its hvdlite agent reported on a worker that is not there")
            host = None if self.host.is_here else self.host.label
            message = replace(message, why=one_line(message.why), host=host)
        else:
            self._validate(message)
        self._events.put(message)

    def _welcome(self, hello: Hello) -> None:
        if self._greeted:
            raise ProtocolError("its hvdlite agent sent Hello twice")
        if hello.version != VERSION:
            there = one_line(hello.version)
            raise ProtocolError(
                f"hvdlite is version {VERSION} here, but {there} there: install the same version on all hosts"
            )
        self._words = ""  # earlier output cannot be the reason for its end
        self._greeted = True
        if not self._dismissed:
            self._events.put(Answered(self.host.label, hello))

    def _validate(self, message: OfWorker) -> None:
        """Raises `ProtocolError` for an unknown worker, a second `Exited`, or more output than the limit."""
        if message.worker not in self.workers:
            raise ProtocolError(f"its hvdlite agent reported on worker {message.worker}, which does not run there")
        if isinstance(message, Exited):
            if message.worker in self._ended:
                raise ProtocolError(f"its hvdlite agent reported the end of worker {message.worker} twice")
            self._ended.add(message.worker)
        if isinstance(message, Output):
            self._output.received += len(message.data)
            # The agent's own limit is lower, but it exceeds that by what dead workers left in their pipes.
            room = WINDOW_BYTES + _OVERDRAFT_BYTES * (1 + len(self.workers))
            if self._output.received - self._output.done_with > room:
                raise ProtocolError("its hvdlite agent sent more output than it was allowed to")

    def _why_it_ended(self, noise: str) -> str | NotThereYet:
        returncode = self._process.returncode
        if self.host.is_here:
            killed = returncode is not None and (returncode < 0 or returncode > 128)
            return f"its hvdlite agent was killed by {signal_name(abs(returncode) % 128)}" if killed else _UNEXPECTED
        if returncode is None:
            return _UNEXPECTED
        if not self._greeted:
            why = self._explain(returncode, f"{noise}\n{self._words}")
            # What is on stdout was written on the host.
            if not noise and (cause := self._not_there(returncode, self._words)) is not None:
                return NotThereYet(self.host.label, cause, why)
            return why
        return killed_by(returncode) or last_words(self._words) or _UNEXPECTED

    def _not_there(self, returncode: int, words: str) -> str | None:
        return why_not_there_yet(returncode, words) if self._try_again is not None and not self._greeted else None

    def _read_words(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        data = os.read(stderr.fileno(), _READ_BYTES)
        if not data:
            self._stop_reading(stderr)
            return
        # An agent puts this before its messages; `AgentSaid` names its host instead.
        text = data.decode(errors="backslashreplace").replace("hvdlite-run: agent: ", "")
        self._words = (self._words + text)[-_NOISE_BYTES:]
        # An attempt that will be followed by another is told by `NotThereYet` alone.
        if self._room > 0 and not self._not_there(SSH_FAILED, text):
            self._room -= len(data)
            more = "" if self._room > 0 else "\n... (the rest is not shown)"
            self._events.put(AgentSaid(self.host.label, text + more))


def _start(argv: list[str], *, is_here: bool) -> subprocess.Popen[bytes]:
    # A scheduler may signal all processes of a job. The launcher decides then, and still needs its ssh clients.
    held_off = () if is_here else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_off)
    try:
        return subprocess.Popen(
            as_before(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if is_here else subprocess.PIPE,
            bufsize=0,
            # A session of its own: Ctrl-C on the terminal must reach only the launcher, which decides.
            start_new_session=True,
            # The user's working directory must not be on the agent's sys.path: it may contain a queue.py.
            cwd="/" if is_here else None,
            env=with_absolute_python_path() if is_here else None,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
