"""One end of the connection between launcher and agent: receives and sends messages, and detects a silent other end.

The agent (`host.agent`) and the launcher (`agents.remote_agent`) own one each and handle the messages; `agent_frames`
encodes them. No call blocks: bytes that the other end does not read yet are kept in memory.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from collections.abc import Callable, Collection, Iterator

from .agent_frames import FROM_LAUNCHER, Decoder, encode
from .messages import Beat, Message

# Where both ends agreed to send beats (`Greet.beats`), each sends one every BEAT_S and treats the other as dead after
# SILENCE_S without any bytes. With the time to end the workers, a job has ended at most 20 s after a link was cut.
BEAT_S = 2.0
SILENCE_S = 10.0

_READ_BYTES = 1 << 18
_OUTGOING_BYTES = 1 << 18


class Channel:
    """Sends and receives messages over two file descriptors, from the event loop that owns ``selector``."""

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
        kinds: Collection[int] = FROM_LAUNCHER,
    ) -> None:
        """Reads from one descriptor, and writes to the other. ``kinds`` of frames are those that may come.

        ``selector``: the data of each registration is a function without arguments, which the event loop calls.
        """
        self._in = incoming
        self._out = outgoing
        self._selector = selector
        self._clock = clock
        self._decoder = Decoder(kinds)
        self._outgoing = bytearray()
        self._beats_at: float | None = None
        self._heard_at = clock()
        self._close: Callable[[], object] = lambda: None
        self._is_registered = self._is_closed = False  # what is written to
        self.is_finished = False
        """Whether nothing more may be sent."""
        self.closed = False
        """Whether the other end has closed the connection, or was silent for too long."""
        self.silent = False
        """Whether the other end was silent for too long."""
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    @property
    def full(self) -> bool:
        """Whether the unsent bytes exceed a limit, so that the agent should read no more output from its workers."""
        return len(self._outgoing) > _OUTGOING_BYTES

    def receive(self) -> Iterator[Message]:
        """Reads once and yields the messages that are complete. Call it when there is something to read."""
        return self.decode(self.read())

    def read(self) -> bytes:
        """Reads once, for `decode`; returns b"" at the end. Call it when there is something to read."""
        data = os.read(self._in, _READ_BYTES)
        self.hear()
        if not data:
            self.closed = True
        return data

    def hear(self) -> None:
        """Takes the other end as not silent now."""
        self._heard_at = self._clock()

    def decode(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are complete with what was read last."""
        return self._decoder.feed(data)

    def send(self, message: Message | bytes) -> None:
        """Queues a message for the next `flush`; bytes are one that is encoded already."""
        self._outgoing += message if isinstance(message, bytes) else encode(message)

    def flush(self) -> None:
        """Writes as much as the other end accepts now, and has the event loop call this again for the rest."""
        if self._is_closed:  # another file may have the descriptor's number by now
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._out, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the other end no longer reads
            self.closed = True
            self._outgoing.clear()
        if self._outgoing and not self._is_registered:
            self._selector.register(self._out, selectors.EVENT_WRITE, self.flush)
            self._is_registered = True
        elif self._is_registered and not self._outgoing:
            self._selector.unregister(self._out)
            self._is_registered = False
        if self.is_finished and not self._outgoing:
            self._is_closed = True
            self._close()

    def finish(self, close: Callable[[], object], *, drops_rest: bool = False) -> None:
        """Calls ``close`` once all is written. Nothing may be sent after this.

        May be called again: to drop the rest. ``close`` is called once.
        """
        self.is_finished, self._close = True, close
        if drops_rest:
            self._outgoing.clear()
        self.flush()

    # ------------------------------------------------------------------ beats

    def beat(self) -> None:
        """Starts to send beats, and to expect at least beats from the other end."""
        self._heard_at = self._beats_at = self._clock()

    def time_left_s(self) -> float | None:
        """Returns the seconds until `tick` must be called, or None if no beats are sent."""
        return None if self._beats_at is None else max(0.0, self._beats_at - self._clock())

    def tick(self) -> None:
        """Sends a beat if one is due, and sets `closed` and `silent` if the other end was silent for too long."""
        if self._beats_at is None or (now := self._clock()) < self._beats_at:
            return
        self._beats_at = now + BEAT_S
        if not self._outgoing:  # unsent bytes serve as a beat too
            self.send(Beat())
        if now - self._heard_at > SILENCE_S and not self._has_unread():
            self.closed = self.silent = True

    def _has_unread(self) -> bool:
        """Whether there is something to read, which this process was too busy to do."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        return bool(poll.poll(0))
