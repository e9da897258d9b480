"""The launcher's end of an agent: starting it on its host, telling it what to do, hearing what happens there.

How an agent is reached is `agent_argv` alone: ssh will be another list of words here, and nothing else
changes. What the agent does is in `agent`; what its events mean is decided in `supervise`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from queue import SimpleQueue

from .errors import ProtocolError
from .hosts import Host
from .protocol import Command, Decoder, Event, Lost, Message, Output, Refused, encode

_READ_BYTES = 1 << 18


def agent_argv(host: Host) -> list[str]:
    """The command that, run here, is the agent on ``host``: its stdin and stdout are the wire."""
    del host  # it is this machine
    return [sys.executable, "-m", "hvdlite_launcher.agent"]


class RemoteAgent:
    """A running agent. Its events go to ``events``; hanging up ends everything on its host."""

    def __init__(
        self, host: Host, ranks: Collection[int], events: SimpleQueue[Event], *, room: threading.Semaphore
    ) -> None:
        """``ranks`` are those that it will run.

        ``room`` is how much output may be on its way to the screen; whoever shows some gives it back.
        """
        self._host = host
        self._ranks = ranks
        self._events = events
        self._room = room
        self._process = subprocess.Popen(
            agent_argv(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A session of its own: Ctrl-C on the terminal is for the launcher, which decides.
            start_new_session=True,
            # The user's directory must not be on the agent's sys.path: it may hold a queue.py.
            cwd="/",
            env=_with_absolute_python_path(),
        )
        threading.Thread(target=self._listen, daemon=True, name=f"agent on {host.name}").start()

    def send(self, command: Command) -> None:
        """Tell the agent. One that is gone already is reported as `Lost`, not here."""
        assert self._process.stdin is not None
        rest = memoryview(encode(command))
        with contextlib.suppress(OSError, ValueError):
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def hang_up(self) -> None:
        """The agent ends at once whatever still runs there, tidies up, and goes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> int:
        """The agent's exit code, 0 if nothing is left on its host; past the timeout it is killed."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        decoder = Decoder()
        why = "its agent ended unexpectedly"
        try:
            while data := os.read(self._process.stdout.fileno(), _READ_BYTES):
                for message in decoder.feed(data):
                    self._pass_on(message)
        except ProtocolError as error:
            why = str(error)
        self._events.put(Lost(self._host.name, why))

    def _pass_on(self, message: Message) -> None:
        if isinstance(message, Command):
            raise ProtocolError("its agent sent what only a launcher says")
        if not isinstance(message, Refused) and message.rank not in self._ranks:
            raise ProtocolError(f"its agent speaks of rank {message.rank}, which is not there")
        if isinstance(message, Output):
            self._room.acquire()
        self._events.put(message)


def _with_absolute_python_path() -> dict[str, str]:
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment
