"""
Accepts ranks' connections at rank 0: the listening socket, and connections that have not authenticated yet.

    accept ── hello ── challenge ── proof ── admit(rank, connection, session)
                 └─ anything else, or nothing within 5 s: closed, with a line in the log

`coordinator` serves it with its one selector. Nothing here blocks, so a connection that is silent, slow or foreign does
not delay the ranks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..calls.mailbox import HELLO_BYTES, PROOF_BYTES, HandshakeServer
from ..log import log
from ..signing import Signer

HANDSHAKE_S = 5.0  # a connection that has not authenticated by then is closed; the rank may connect again
_BACK_OFF_S = 0.5  # before accepting again after the system ran out of descriptors
_MOST_LINES = 5


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection that has not authenticated yet."""

    connection: socket.socket
    since_s: float
    received: bytes = b""
    answerer: HandshakeServer | None = None

    @property
    def missing(self) -> int:
        return (HELLO_BYTES if self.answerer is None else PROOF_BYTES) - len(self.received)


class Acceptor:
    """The listening socket, until all ranks are connected."""

    def __init__(
        self,
        listener: socket.socket,
        signer: Signer,
        size: int,
        selector: selectors.BaseSelector,
        admit: Callable[[int, socket.socket, Signer], None],
        is_expected: Callable[[int], bool],
    ) -> None:
        """``admit`` is called with a rank, its connection and its session once both ends have authenticated.

        ``is_expected``: the rank belongs to the job and is not connected yet. The data of each file registered with
        ``selector`` is a function to be called when it is ready.
        """
        self._listener: socket.socket | None = listener
        self._signer = signer
        self._selector = selector
        self._admit = admit
        self._is_expected = is_expected
        self._visitors: dict[_Visitor, None] = {}
        self._most_visitors = max(64, 2 * size)
        self._accepts_again_at_s: float | None = None
        self._refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def patience_s(self) -> float | None:
        """Seconds until `look` must be called; None for never."""
        times_s = [visitor.since_s + HANDSHAKE_S for visitor in list(self._visitors)[:1]]
        if self._accepts_again_at_s is not None:
            times_s.append(self._accepts_again_at_s)
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def look(self) -> None:
        """Closes connections whose time is over; call it after everything that is ready has been read."""
        now_s = time.monotonic()
        while self._visitors and now_s - (oldest := next(iter(self._visitors))).since_s >= HANDSHAKE_S:
            self._refuse(oldest, f"it did not authenticate within {HANDSHAKE_S:g} s")
        if self._accepts_again_at_s is not None and now_s >= self._accepts_again_at_s and self._listener is not None:
            self._accepts_again_at_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stops listening, and closes connections that have not authenticated."""
        for visitor in list(self._visitors):
            self._forget(visitor)
            visitor.connection.close()
        if self._listener is not None:
            if self._accepts_again_at_s is None:
                self._selector.unregister(self._listener)
            address = self._listener.getsockname()
            self._listener.close()
            self._listener = None
            if isinstance(address, str):
                # A Unix socket's file, of which there would be one more in each generation of an elastic job.
                with contextlib.suppress(OSError):
                    os.unlink(address)
            self._accepts_again_at_s = None
            if self._refused > _MOST_LINES:
                log.warning("rank 0 refused %d connections in all that were not from ranks of this job", self._refused)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            # The other end has closed before it was accepted.
            return
        except OSError as error:
            # No descriptor or memory is free; further connections wait in the system's queue.
            log.warning("rank 0 cannot accept connections of other ranks (%s), and tries again soon", error)
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
            self._refuse(
                next(iter(self._visitors)), "too many connections have not authenticated, and it is the oldest of them"
            )

    def _hear(self, visitor: _Visitor) -> None:
        if visitor not in self._visitors:
            return
        try:
            data = visitor.connection.recv(visitor.missing)
            if not data:
                raise ValueError("it closed the connection before it authenticated")  # noqa: TRY301
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
                raise ValueError(
                    f"it claims to be rank {visitor.answerer.rank}, which does not exist or is connected already"
                )
            if visitor.connection.send(visitor.answerer.challenge) != len(visitor.answerer.challenge):
                raise ValueError("it does not read what it is sent")
            return
        session = visitor.answerer.session(said)
        rank = visitor.answerer.rank
        if not self._is_expected(rank):
            raise ValueError(f"rank {rank} is connected already")
        self._forget(visitor)
        self._admit(rank, visitor.connection, session)

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        self._forget(visitor)
        visitor.connection.close()
        self._refused += 1
        if self._refused <= _MOST_LINES:
            more = "" if self._refused < _MOST_LINES else " (further ones are only counted)"
            log.warning("rank 0 refused a connection that is not from a rank of this job: %s%s", why, more)

    def _forget(self, visitor: _Visitor) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.connection)
