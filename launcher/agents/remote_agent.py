"""The launcher's connection to one agent: starts it on its host, sends it commands, and receives its events.

`agent_group` creates one per host. `plan.ssh` builds the command that reaches another host, which is
`host.remote_parent`; that starts `host.agent`, the other end. Events go to a queue that `wait_for_agents` reads first,
then `supervisor` (or, with ``--check``, `ask_hosts`); requests to the rendezvous store
go to `store.server`. Each agent has threads of its own here, so one that does not answer delays no other.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import IO

from ..errors import ProtocolError, in_words
from ..plan.hosts import Host
from ..plan.ssh import SSH_FAILED, killed_by, last_words
from ..store.server import Store
from ..system.open_files import as_before
from ..system.signals import signal_name
from ..system.terminal_text import one_line
from ..version import VERSION
from ..wire.agent_frames import FROM_AGENT, MARK, WINDOW_BYTES, Decoder, encode
from ..wire.channel import BEAT_S, SILENCE_S
from ..wire.messages import (
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
from ..wire.store_messages import StoreEvent

_READ_BYTES = 1 << 18
_NOISE_BYTES = 1 << 16  # the most that a login shell's start files may print before the agent's MARK
_OVERDRAFT_BYTES = 64 << 20
_MOST_SAID_BYTES = 1 << 20  # of the stderr of ssh and the agent: more is not shown. Workers' output is sent as `Output`
_UNEXPECTED = "its hvdlite agent ended unexpectedly"
# Between attempts to connect to a host that is not there yet: doubled each time.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 2.0
_WORDS_S = 1.0  # how long to wait for the return code and the end of stderr


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
        store: Store,
        explain: Callable[[int, str], str],
        why_not_there_yet: Callable[[int, str], str | None] | None = None,
    ) -> None:
        """``argv`` starts the agent. ``explain(returncode, stderr)`` returns the reason if it ends before its `Hello`.

        If ``why_not_there_yet`` returns a text for the same arguments, such an end is the event `NotThereYet`, and the
        agent is started again, until it is hung up on. Without it there is one attempt.

        ``store`` answers the workers' requests, in this agent's thread and not in the event loop, which has to react
        fast.
        """
        self.host = host
        self.workers: Collection[int] = ()
        """The numbers of the workers on its host, from when it is sent `StartJob`."""
        self._events = events
        self._output = _OutputBytes()
        self._ended: set[int] = set()
        self._store = store
        self._explain = explain
        self._why_not_there_yet = why_not_there_yet
        self._argv = argv
        self._greeting: bytes | None = None
        self._is_hung_up = threading.Event()
        # Held while one attempt to connect follows another, which replaces the process and the queue to it.
        self._attempts = threading.Lock()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._greeted = threading.Event()
        self._silent = self._dismissed = False
        self._words = ""
        self._start(with_receiver=True)

    def greet(self, *, count_slots: bool, interface: str | None) -> None:
        """Sends the first message; the agent's answer is an event, `Answered` or `Lost`."""
        greeting = Greet(VERSION, not self.host.is_here, count_slots, interface)
        with self._attempts:
            self._greeting = encode(greeting)
            self.send(greeting)

    def send(self, command: Command) -> None:
        """Queues a command and does not block. If the agent has ended, that is the event `Lost` and no error here."""
        self._outgoing.put(encode(command))

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
        self._is_hung_up.set()
        with self._attempts:
            self._outgoing.put(None)

    def kill(self) -> None:
        """Kills the agent on this machine, or the ssh client to it: its host is lost, as by an accident."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Waits for the agent and returns its exit code: 0 if nothing of the job is left on its host.

        Kills the agent (the ssh client, for another host) after ``timeout_s``, or at once if it is silent or sent no
        `Hello` and so started nothing.
        """
        try:
            return self._process.wait(timeout_s if self._greeted.is_set() and not self._silent else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start(self, *, with_receiver: bool) -> None:
        """Starts the process, and threads that read and write its pipes; the receiving one is in all attempts the same.

        Raises OSError or RuntimeError if there cannot be a process or a thread.
        """
        # A scheduler may signal all processes of a job. The launcher decides then, and still needs its ssh clients.
        held_off = () if self.host.is_here else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_off)
        try:
            self._process = self._started(self._argv)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            listen = partial(self._listen_to_stderr, self._process.stderr)
            self._stderr_thread = None if self.host.is_here else self._start_thread(listen, "listen_to_stderr")
            assert self._process.stdin is not None
            self._start_thread(partial(self._send_loop, self._outgoing, self._process.stdin), "send_loop")
            if with_receiver:
                self._start_thread(self._receive_loop, "receive_loop")
        except RuntimeError:  # no more threads, and the caller cannot end an agent whose constructor failed
            self._process.kill()
            self._process.wait()
            raise

    def _start_again(self) -> bool:
        """Starts the agent once more, unless it has been hung up on; returns whether it has."""
        with self._attempts:
            if self._dismissed:
                return False
            self._outgoing.put(None)  # ends the last attempt's thread
            self._outgoing = SimpleQueue()
            self._words = ""
            if self._greeting is not None:
                self._outgoing.put(self._greeting)
            self._start(with_receiver=False)
        return True

    def _started(self, argv: list[str]) -> subprocess.Popen[bytes]:
        here = self.host.is_here
        return subprocess.Popen(
            as_before(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if here else subprocess.PIPE,
            bufsize=0,
            # A session of its own: Ctrl-C on the terminal must reach only the launcher, which decides.
            start_new_session=True,
            # The user's working directory must not be on the agent's sys.path: it may contain a queue.py.
            cwd="/" if here else None,
            env=_with_absolute_python_path() if here else None,
        )

    def _start_thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True, name=f"{name} {self.host.label}")
        thread.start()
        return thread

    # ------------------------------------------------------------------ sending

    def _send_loop(self, outgoing: SimpleQueue[bytes | None], to_agent: IO[bytes]) -> None:
        beat = None if self.host.is_here else encode(Beat())
        with contextlib.suppress(OSError), to_agent as stdin:
            while True:
                try:
                    frame = outgoing.get(timeout=None if beat is None else BEAT_S)
                except Empty:
                    frame = beat
                if frame is None:
                    return
                rest = memoryview(frame)
                while rest:
                    rest = rest[stdin.write(rest) :]

    # ---------------------------------------------------------------- receiving

    def _receive_loop(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                end = self._read_messages()
            except ProtocolError as error:
                end = str(error)
            if isinstance(end, str):
                why = end
                break
            self._events.put(end)
            self._is_hung_up.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            try:
                if self._start_again():
                    continue
                why = end.why
            except (OSError, RuntimeError) as failure:
                why = in_words(failure) or str(failure)
            break
        self._store.lose(self)
        if not self._dismissed:
            self._events.put(Lost(self.host.label, why))

    def _read_messages(self) -> str | NotThereYet:
        """Receives messages until the connection ends; returns why, or that there was none and may be one later."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        decoder = Decoder(FROM_AGENT)
        noise = b""
        spoke = False
        while True:
            if not self._wait_readable(fd):
                self._silent = True
                return f"no message from it for {SILENCE_S:g} s: the host is down, or its network connection is cut"
            data = os.read(fd, _READ_BYTES)
            if not data:
                # The reason may be on stdout, as in "This account is not available."
                return self._why_it_ended("" if spoke else noise.decode(errors="backslashreplace"))
            if not spoke:
                noise, mark, data = (noise + data).partition(MARK)
                spoke = bool(mark)
                if not spoke and len(noise) > _NOISE_BYTES:
                    return f"the program that answers there is not an hvdlite agent: {noise[:40]!r}"
            for message in decoder.feed(data):
                self._dispatch(message)

    def _wait_readable(self, fd: int) -> bool:
        """Waits until there are bytes to read, or the end; returns False if the agent was silent for too long."""
        # A local agent's end is always seen. Before `Hello` there are no beats, as the agent may take time to start:
        # until then ssh itself watches the connection.
        if self.host.is_here or not self._greeted.is_set():
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(SILENCE_S * 1000))

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
        if self._greeted.is_set():
            raise ProtocolError("its hvdlite agent sent Hello twice")
        if hello.version != VERSION:
            there = one_line(hello.version)
            raise ProtocolError(
                f"hvdlite is version {VERSION} here, but {there} there: install the same version on all hosts"
            )
        self._words = ""  # earlier output cannot be the reason for its end
        self._greeted.set()
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WORDS_S)
        if self._stderr_thread is not None:
            self._stderr_thread.join(_WORDS_S)
        returncode = self._process.returncode
        if self.host.is_here:
            killed = returncode is not None and (returncode < 0 or returncode > 128)
            return f"its hvdlite agent was killed by {signal_name(abs(returncode) % 128)}" if killed else _UNEXPECTED
        if returncode is None:
            return _UNEXPECTED
        if not self._greeted.is_set():
            why = self._explain(returncode, f"{noise}\n{self._words}")
            # What is on stdout was written on the host.
            if not noise and (cause := self._not_there(returncode, self._words)) is not None:
                return NotThereYet(self.host.label, cause, why)
            return why
        return killed_by(returncode) or last_words(self._words) or _UNEXPECTED

    def _not_there(self, returncode: int, words: str) -> str | None:
        if self._why_not_there_yet is None or self._greeted.is_set():
            return None
        return self._why_not_there_yet(returncode, words)

    def _listen_to_stderr(self, stderr: IO[bytes] | None) -> None:
        assert stderr is not None
        room = _MOST_SAID_BYTES
        while data := os.read(stderr.fileno(), _READ_BYTES):
            # An agent puts this before its messages; `AgentSaid` names its host instead.
            text = data.decode(errors="backslashreplace").replace("hvdlite-run: agent: ", "")
            self._words = (self._words + text)[-_NOISE_BYTES:]
            # An attempt that will be followed by another is told by `NotThereYet` alone.
            if room > 0 and not self._not_there(SSH_FAILED, text):
                room -= len(data)
                more = "" if room > 0 else "\n... (the rest is not shown)"
                self._events.put(AgentSaid(self.host.label, text + more))


def _with_absolute_python_path() -> dict[str, str]:
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment
