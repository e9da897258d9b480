"""The agent's connection to the launcher: receives commands, sends events, and detects a launcher that is silent.

The agent (`host.agent`) owns it and handles the messages; `agent_frames` encodes them. No call blocks: bytes that the
launcher does not read yet are kept in memory.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator

from .agent_frames import FROM_LAUNCHER, Decoder, encode
from .messages import Beat, Message

# Where both ends agreed to send beats (`Greet.beats`), each sends one every BEAT_S and treats the other as dead after
# SILENCE_S without any bytes. With the time to end the workers, a job has ended at most 20 s after a link was cut.
BEAT_S = 2.0
SILENCE_S = 10.0

_READ_BYTES = 1 << 16
_OUTGOING_BYTES = 1 << 18


class Channel:
    """Sends and receives messages over two file descriptors, from the event loop that owns ``selector``."""

    def __init__(
        self,
        commands: int,
        events: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``selector``: the data of each registration is a function without arguments, which the event loop calls."""
        self._commands = commands
        self._events = events
        self._selector = selector
        self._clock = clock
        self._decoder = Decoder(FROM_LAUNCHER)
        self._outgoing = bytearray()
        self._beats_at: float | None = None
        self._heard_at = clock()
        self.closed = False
        """Whether the launcher has closed the connection, or was silent for too long."""
        self.silent = False
        """Whether the launcher was silent for too long."""
        os.set_blocking(commands, False)
        os.set_blocking(events, False)

    @property
    def full(self) -> bool:
        """Whether the unsent bytes exceed a limit, so that the agent should read no more output from its workers."""
        return len(self._outgoing) > _OUTGOING_BYTES

    def receive(self) -> Iterator[Message]:
        """Reads once and yields the messages that are complete. Call it when the descriptor of commands is readable."""
        data = os.read(self._commands, _READ_BYTES)
        self._heard_at = self._clock()
        if not data:
            self.closed = True
        yield from self._decoder.feed(data)

    def send(self, message: Message | bytes) -> None:
        """Queues a message for the next `flush`; bytes are one that is encoded already."""
        self._outgoing += message if isinstance(message, bytes) else encode(message)

    def flush(self) -> None:
        """Writes as much as the launcher accepts now, and has the event loop call this again for the rest."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._events, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the launcher no longer reads
            self.closed = True
            return
        waits = self._events in self._selector.get_map()
        if self._outgoing and not waits:
            self._selector.register(self._events, selectors.EVENT_WRITE, self.flush)
        elif waits and not self._outgoing:
            self._selector.unregister(self._events)

    # ------------------------------------------------------------------ beats

    def beat(self) -> None:
        """Starts to send beats, and to expect at least beats from the launcher."""
        self._heard_at = self._beats_at = self._clock()

    def time_left_s(self) -> float | None:
        """Returns the seconds until `tick` must be called, or None if no beats are sent."""
        return None if self._beats_at is None else max(0.0, self._beats_at - self._clock())

    def tick(self) -> None:
        """Sends a beat if one is due, and sets `closed` and `silent` if the launcher was silent for too long."""
        if self._beats_at is None or (now := self._clock()) < self._beats_at:
            return
        self._beats_at = now + BEAT_S
        if not self._outgoing:  # unsent bytes serve as a beat too
            self.send(Beat())
        if now - self._heard_at > SILENCE_S:
            self.closed = self.silent = True
