"""The launcher's connection to one agent: starts it on its host, sends it commands, and receives its events.

How an agent on another host is reached is in `ssh`; what the agent does is in `agent`; what its events mean is
decided in `supervisor`. Each agent has threads of its own here, so that one that does not answer holds up no other.
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
from dataclasses import replace
from queue import Empty, SimpleQueue

from ..errors import ProtocolError
from ..plan.hosts import Host
from ..plan.ssh import killed_by, last_words
from ..store.server import Store
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
    OfWorker,
    Output,
    OutputTaken,
    Refused,
)
from ..wire.store_messages import StoreEvent

_READ_BYTES = 1 << 18
_NOISE_BYTES = 1 << 16  # what start files of a shell may print before the agent speaks
_OVERDRAFT_BYTES = 64 << 20
_MOST_SAID_BYTES = 1 << 20  # of ssh's own words, or the agent's; workers' do not come that way
_UNEXPECTED = "its agent ended unexpectedly"
_WORDS_S = 1.0  # for the last words of a process that has ended


def local_agent_argv() -> list[str]:
    """The command that is the agent on this machine: its stdin and stdout are the wire."""
    return [sys.executable, "-m", "hvdlite_launcher.host.remote_parent"]


class RemoteAgent:
    """A running agent. Its events go to ``events``; hanging up ends everything on its host."""

    def __init__(
        self,
        host: Host,
        argv: list[str],
        events: SimpleQueue[Event],
        *,
        store: Store,
        explain: Callable[[int, str], str],
    ) -> None:
        """``argv`` starts it. ``explain(returncode, stderr)`` says why one never said hello.

        ``store`` answers what its workers ask, not by way of ``events``: that loop has to decide.
        """
        self.host = host
        self.workers: Collection[int] = ()
        """The numbers of those that it runs, once it was told to."""
        self._events = events
        self._shown_bytes = 0  # that the agent has not been told of
        self._output_bytes = 0  # that came
        self._done_with_bytes = 0  # of these
        self._ended: set[int] = set()
        self._store = store
        self._explain = explain
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._greeted = threading.Event()
        self._silent = self._dismissed = False
        self._words = ""
        # A scheduler may signal all that runs here: the launcher decides, and what connects it to a host stays.
        held_off = () if host.is_here else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_off)
        try:
            self._process = self._started(argv)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            self._stderr_thread = None if host.is_here else self._start_thread(self._listen_to_stderr)
            self._start_thread(self._speak)
            self._start_thread(self._listen)
        except RuntimeError:  # no more threads: nobody knows of this one yet who would end it
            self._process.kill()
            self._process.wait()
            raise

    def greet(self, *, count_slots: bool, interface: str | None) -> None:
        """The first word. `Answered` or `Lost` is the answer."""
        self.send(Greet(VERSION, not self.host.is_here, count_slots, interface))

    def send(self, command: Command) -> None:
        """Tell the agent, and wait for nothing. One that is gone already is reported as `Lost`, not here."""
        self._outgoing.put(encode(command))

    def output_shown(self, count: int) -> None:
        """So many bytes that came from there are done with. One thread may say so."""
        self._shown_bytes += count
        self._done_with_bytes += count
        if self._shown_bytes >= WINDOW_BYTES // 4:
            self.send(OutputTaken(self._shown_bytes))
            self._shown_bytes = 0

    def hang_up(self) -> None:
        """The agent ends at once whatever still runs there, tidies up, and goes; that is no `Lost`."""
        self._dismissed = True
        self._outgoing.put(None)

    def wait(self, timeout_s: float) -> int:
        """The agent's exit code, 0 if nothing is left on its host; past the timeout it is killed.

        One that is silent, or never said hello and so started nothing, is not waited for.
        """
        try:
            return self._process.wait(timeout_s if self._greeted.is_set() and not self._silent else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _started(self, argv: list[str]) -> subprocess.Popen[bytes]:
        here = self.host.is_here
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if here else subprocess.PIPE,
            bufsize=0,
            # A session of its own: Ctrl-C on the terminal is for the launcher, which decides.
            start_new_session=True,
            # The user's directory must not be on the agent's sys.path: it may hold a queue.py.
            cwd="/" if here else None,
            env=_with_absolute_python_path() if here else None,
        )

    def _start_thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True, name=f"{work.__name__} {self.host.label}")
        thread.start()
        return thread

    # ----------------------------------------------------------------- speaking

    def _speak(self) -> None:
        assert self._process.stdin is not None
        beat = None if self.host.is_here else encode(Beat())
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            while True:
                try:
                    frame = self._outgoing.get(timeout=None if beat is None else BEAT_S)
                except Empty:
                    frame = beat
                if frame is None:
                    return
                rest = memoryview(frame)
                while rest:
                    rest = rest[stdin.write(rest) :]

    # ---------------------------------------------------------------- listening

    def _listen(self) -> None:
        try:
            why = self._read_messages()
        except ProtocolError as error:
            why = str(error)
        self._store.lose(self)
        if not self._dismissed:
            self._events.put(Lost(self.host.label, why))

    def _read_messages(self) -> str:
        """Until the end; why it came."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        decoder = Decoder(FROM_AGENT)
        noise = b""
        spoke = False
        while True:
            if not self._comes(fd):
                self._silent = True
                return f"nothing was heard of it for {SILENCE_S:g} s: it is down, or the network between us is cut"
            data = os.read(fd, _READ_BYTES)
            if not data:
                # What says why there is no agent may have come on stdout: "This account is not available."
                return self._why_it_ended("" if spoke else noise.decode(errors="backslashreplace"))
            if not spoke:
                noise, mark, data = (noise + data).partition(MARK)
                spoke = bool(mark)
                if not spoke and len(noise) > _NOISE_BYTES:
                    return f"what answers there is no agent of hvdlite's: {noise[:40]!r}"
            for message in decoder.feed(data):
                self._pass_on(message)

    def _comes(self, fd: int) -> bool:
        """Whether there is something to read, or the end; False after too long a silence."""
        # The system tells of the end here, and ssh does until the agent, which may take its time to start, beats.
        if self.host.is_here or not self._greeted.is_set():
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(SILENCE_S * 1000))

    def _pass_on(self, message: Message) -> None:
        """Let those hear it whom it concerns. What no agent says at this point raises `ProtocolError`."""
        if isinstance(message, Beat):
            return
        if isinstance(message, Command):
            raise ProtocolError("its agent sent what only a launcher says")
        if isinstance(message, Hello):
            self._welcome(message)
            return
        if not self.workers:
            # Nothing was asked of it yet: this is its end.
            if isinstance(message, Refused):
                raise ProtocolError(one_line(message.why))
            raise ProtocolError("its agent speaks of workers before there are any")
        if isinstance(message, StoreEvent):
            self._store.receive(self, message)
            return
        if isinstance(message, Refused):
            host = None if self.host.is_here else self.host.label
            message = replace(message, why=one_line(message.why), host=host)
        else:
            self._look_at(message)
        self._events.put(message)

    def _welcome(self, hello: Hello) -> None:
        if self._greeted.is_set():
            raise ProtocolError("its agent said hello twice")
        if hello.version != VERSION:
            there = one_line(hello.version)
            raise ProtocolError(f"hvdlite is version {VERSION} here and {there} there: install the same version on all")
        self._words = ""  # what was said before is not why it will end
        self._greeted.set()
        self._events.put(Answered(self.host.label, hello))

    def _look_at(self, message: OfWorker) -> None:
        """That it is of a worker that is there, and that there is no end to what this process keeps of it."""
        if message.worker not in self.workers:
            raise ProtocolError(f"its agent speaks of worker {message.worker}, which is not there")
        if isinstance(message, Exited):
            if message.worker in self._ended:
                raise ProtocolError(f"its agent says twice how worker {message.worker} ended")
            self._ended.add(message.worker)
        if isinstance(message, Output):
            self._output_bytes += len(message.data)
            # Its own window is smaller, but for what is in the pipes of the dead.
            room = WINDOW_BYTES + _OVERDRAFT_BYTES * (1 + len(self.workers))
            if self._output_bytes - self._done_with_bytes > room:
                raise ProtocolError("its agent sends more output than it was given room for")

    def _why_it_ended(self, noise: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WORDS_S)
        if self._stderr_thread is not None:
            self._stderr_thread.join(_WORDS_S)
        returncode = self._process.returncode
        if self.host.is_here:
            killed = returncode is not None and (returncode < 0 or returncode > 128)
            return f"its agent was killed by {signal_name(abs(returncode) % 128)}" if killed else _UNEXPECTED
        if returncode is None:
            return _UNEXPECTED
        if not self._greeted.is_set():
            return self._explain(returncode, f"{noise}\n{self._words}")
        return killed_by(returncode) or last_words(self._words) or _UNEXPECTED

    def _listen_to_stderr(self) -> None:
        assert self._process.stderr is not None
        room = _MOST_SAID_BYTES
        while data := os.read(self._process.stderr.fileno(), _READ_BYTES):
            # As on this machine, an agent says whose words they are; here it is its host that is named.
            text = data.decode(errors="backslashreplace").replace("hvdlite-run: agent: ", "")
            self._words = (self._words + text)[-_NOISE_BYTES:]
            if room > 0:
                room -= len(data)
                more = "" if room > 0 else "\n... and more than is shown"
                self._events.put(AgentSaid(self.host.label, text + more))


def _with_absolute_python_path() -> dict[str, str]:
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment
