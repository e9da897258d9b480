"""
Accepts ranks' connections at rank 0: its listening socket, and connections that have not authenticated yet.

    accept ── hello ── challenge ── proof ── admit(rank, connection, session)
                 └─ anything else, or nothing within 5 s: closed, with a line in the log

All of it is served by the coordinator's one selector and blocks nowhere: who is silent, slow or a stranger costs the
ranks nothing. The steps are in `handshake`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from ..log import log
from ..signing import Signer
from .handshake import HELLO_BYTES, PROOF_BYTES, HandshakeServer

# Who has not proved anything by then is sent away, and may come again.
HANDSHAKE_S = 5.0

# Where the system has no more descriptors: how long until it is asked again.
_BACK_OFF_S = 0.5

_MOST_LINES = 5


class _Visitor:
    """A connection that has not proved yet whose it is."""

    def __init__(self, connection: socket.socket, since_s: float) -> None:
        self.connection = connection
        self.since_s = since_s
        self.received = b""
        self.answerer: HandshakeServer | None = None

    @property
    def missing(self) -> int:
        """Bytes of the step that is under way; never are more read."""
        return (HELLO_BYTES if self.answerer is None else PROOF_BYTES) - len(self.received)


class Acceptor:
    """The listening socket, until all ranks have come."""

    def __init__(
        self,
        listener: socket.socket,
        signer: Signer,
        size: int,
        selector: selectors.BaseSelector,
        admit: Callable[[int, socket.socket, Signer], None],
        is_expected: Callable[[int], bool],
    ) -> None:
        """``admit`` is called with a rank's connection and its session once both ends have proved themselves.

        ``is_expected`` tells whether a rank is one of the job's, and has not come yet. What ``selector`` finds ready
        here has a function as its data, to be called with no argument.
        """
        self._listener: socket.socket | None = listener
        self._signer = signer
        self._selector = selector
        self._admit = admit
        self._is_expected = is_expected
        # In the order of their coming.
        self._visitors: dict[_Visitor, None] = {}
        self._most_visitors = max(64, 2 * size)
        self._accepts_again_at_s: float | None = None
        self._refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def patience_s(self) -> float | None:
        """When `look` is to be called next, at the latest; None for never."""
        times_s = [visitor.since_s + HANDSHAKE_S for visitor in list(self._visitors)[:1]]
        if self._accepts_again_at_s is not None:
            times_s.append(self._accepts_again_at_s)
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def look(self) -> None:
        """Send those away whose time is over. To be called after all that is ready has been read."""
        now_s = time.monotonic()
        while self._visitors and now_s - (oldest := next(iter(self._visitors))).since_s >= HANDSHAKE_S:
            self._refuse(oldest, f"it has not proved within {HANDSHAKE_S:g} s that it is one")
        if self._accepts_again_at_s is not None and now_s >= self._accepts_again_at_s and self._listener is not None:
            self._accepts_again_at_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Let nobody in any more."""
        for visitor in list(self._visitors):
            self._forget(visitor)
            visitor.connection.close()
        if self._listener is not None:
            if self._accepts_again_at_s is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            self._accepts_again_at_s = None
            if self._refused > _MOST_LINES:
                log.warning("%d connections to rank 0 in all were not of this job's ranks", self._refused)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            # It has gone again before it was let in.
            return
        except OSError as error:
            # No descriptor is free, or no memory: the others wait in the system's queue meanwhile.
            log.warning("rank 0 cannot accept connections of other ranks (%s), and tries again", error)
            self._selector.unregister(self._listener)
            self._accepts_again_at_s = time.monotonic() + _BACK_OFF_S
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor = _Visitor(connection, time.monotonic())
        self._visitors[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(visitor))
        if len(self._visitors) > self._most_visitors:
            self._refuse(next(iter(self._visitors)), "others came after it, and it had proved nothing yet")

    def _hear(self, visitor: _Visitor) -> None:
        if visitor not in self._visitors:
            return
        try:
            data = visitor.connection.recv(visitor.missing)
            if not data:
                raise ValueError("it closed the connection before it had proved anything")  # noqa: TRY301
            visitor.received += data
            if visitor.missing == 0:
                self._step(visitor)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError) as error:
            self._refuse(visitor, str(error))

    def _step(self, visitor: _Visitor) -> None:
        said, visitor.received = visitor.received, b""
        if visitor.answerer is None:
            visitor.answerer = HandshakeServer(self._signer, said)
            if not self._is_expected(visitor.answerer.rank):
                raise ValueError(f"it says that it is rank {visitor.answerer.rank}, which is none, or is there already")
            if visitor.connection.send(visitor.answerer.challenge) != len(visitor.answerer.challenge):
                raise ValueError("it takes no answer")
            return
        session = visitor.answerer.session(said)
        rank = visitor.answerer.rank
        if not self._is_expected(rank):
            raise ValueError(f"rank {rank} is there already")
        self._forget(visitor)
        self._admit(rank, visitor.connection, session)

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        self._forget(visitor)
        visitor.connection.close()
        self._refused += 1
        if self._refused <= _MOST_LINES:
            more = "" if self._refused < _MOST_LINES else " (more are counted, and not told of)"
            log.warning("a connection to rank 0 was not one of this job's ranks: %s%s", why, more)

    def _forget(self, visitor: _Visitor) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.connection)
