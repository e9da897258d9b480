"""The agent's connection to the launcher: receives commands, sends events, and notices when the launcher is silent.

Nothing here blocks: what the launcher does not take yet is kept. What the messages mean is decided in `agent`.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator

from .agent_frames import FROM_LAUNCHER, Decoder, encode
from .messages import Beat, Message

# Each end sends a beat this often where both agreed to, and takes longer silence for the other's end. Together
# with what it takes to end the workers then, a job is gone 20 s after a link was cut.
BEAT_S = 2.0
SILENCE_S = 10.0

_READ_BYTES = 1 << 16
_OUTGOING_BYTES = 1 << 18


class Channel:
    """Two file descriptors that are read and written when the loop that owns ``selector`` says so."""

    def __init__(
        self,
        commands: int,
        events: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``selector`` calls back, without arguments, what is registered with it."""
        self._commands = commands
        self._events = events
        self._selector = selector
        self._clock = clock
        self._decoder = Decoder(FROM_LAUNCHER)
        self._outgoing = bytearray()
        self._beats_at: float | None = None
        self._heard_at = clock()
        self.closed = False
        """Whether the launcher has hung up, or will not be heard of again."""
        self.silent = False
        """Whether that is because it was silent for too long."""
        os.set_blocking(commands, False)
        os.set_blocking(events, False)

    @property
    def full(self) -> bool:
        """Whether so much is unsent that more should wait, if it can."""
        return len(self._outgoing) > _OUTGOING_BYTES

    def receive(self) -> Iterator[Message]:
        """What has come; for when the commands' descriptor is ready."""
        data = os.read(self._commands, _READ_BYTES)
        self._heard_at = self._clock()
        if not data:
            self.closed = True
        yield from self._decoder.feed(data)

    def send(self, message: Message) -> None:
        """Keep it for the next `flush`."""
        self._outgoing += encode(message)

    def flush(self) -> None:
        """Write what the launcher takes now, and see to it that the loop comes back for the rest."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._events, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # nobody listens any more
            self.closed = True
            return
        waits = self._events in self._selector.get_map()
        if self._outgoing and not waits:
            self._selector.register(self._events, selectors.EVENT_WRITE, self.flush)
        elif waits and not self._outgoing:
            self._selector.unregister(self._events)

    # ------------------------------------------------------------------ beats

    def beat(self) -> None:
        """From now on send a beat now and then, and expect to hear something as often."""
        self._heard_at = self._beats_at = self._clock()

    def time_left_s(self) -> float | None:
        """When `tick` is to be called at the latest; None if there is no need."""
        return None if self._beats_at is None else max(0.0, self._beats_at - self._clock())

    def tick(self) -> None:
        """Send a beat if it is time; a launcher that was silent for too long is gone."""
        if self._beats_at is None or (now := self._clock()) < self._beats_at:
            return
        self._beats_at = now + BEAT_S
        if not self._outgoing:  # what waits there says as much
            self.send(Beat())
        if now - self._heard_at > SILENCE_S:
            self.closed = self.silent = True
