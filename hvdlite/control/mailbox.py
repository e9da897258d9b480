"""
`Mailbox`: one end of the connection over which a rank and rank 0 send each other short messages.

    send (any thread) ── straight into the socket ── what does not fit waits ── flush, when the socket has room

Nothing here waits for the other end, however long it reads nothing: it may be frozen, or hold its interpreter. How
messages become bytes is in `frames`, what they say in `coordinator`.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..signing import Signer
from .frames import Opener, Sealer

_READ_BYTES = 1 << 18
_WRITE_BYTES = 1 << 18


class Mailbox:
    """Any thread may send; one receives, and flushes when the socket has room again."""

    def __init__(
        self,
        connection: socket.socket,
        session: Signer,
        *,
        of_rank_0: bool,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``session`` is the connection's own, the same at both ends, of which one is ``of_rank_0``.

        ``wake`` is called, by whoever sends, when there is something to flush that was not there before.
        """
        connection.setblocking(False)
        self._connection = connection
        ways = ("to rank 0", "from rank 0")
        receiving, sending = ways if of_rank_0 else reversed(ways)
        self._sealer = Sealer(session.derive(sending))
        self._opener = Opener(session.derive(receiving))
        self.wake = wake
        self._sending = threading.Lock()
        # What the socket had no room for.
        self._outgoing = bytearray()
        self._is_broken = False
        _remember(self)

    def send(self, message: list[Any]) -> None:
        """Let the other end know. Never blocks, and never fails because the other end is gone: `receive` tells that."""
        self.send_all([message])

    def send_all(self, messages: Iterable[list[Any]]) -> None:
        """The same for several messages. A ValueError before anything is sent if one is too long."""
        with self._sending:
            # In the lock: frames are counted in the order in which they go.
            data = b"".join([self._sealer.seal(message) for message in messages])
            if self._is_broken:
                return
            had_to_wait = bool(self._outgoing)
            sent = 0 if had_to_wait else self._push(data)
            if sent == len(data):
                return
            self._outgoing += memoryview(data)[sent:]
        if not had_to_wait and self.wake is not None:
            self.wake()

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Send what the socket has room for now."""
        with self._sending:
            while self._outgoing:
                sent = self._push(self._outgoing[:_WRITE_BYTES])
                if self._is_broken:
                    self._outgoing.clear()
                elif sent == 0:
                    return
                else:
                    del self._outgoing[:sent]

    def _push(self, data: bytes | bytearray) -> int:
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # What the other end has said before it went is still to be read, and so is its end.
            self._is_broken = True
            return len(data)

    def receive(self) -> list[list[Any]]:
        """The messages that have come whole by now.

        Raises EOFError if the other end is gone, OSError if ours is, FrameError if what came is not the other end's.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise EOFError("the other end has closed the connection")
        return self._opener.open(data)

    def fileno(self) -> int:
        return self._connection.fileno()

    def end_sending(self) -> None:
        """The other end's `receive` comes to an end; ours does when the other end closes."""
        self._connection.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Send no more; the other end's `receive`, and ours, come to an end."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        _open.pop(id(self), None)
        self._connection.close()


def mailbox_pair(session: Signer) -> tuple[Mailbox, Mailbox]:
    """Two ends within this process: a rank's, and rank 0's."""
    own_end, other_end = socket.socketpair()
    return Mailbox(own_end, session, of_rank_0=False), Mailbox(other_end, session, of_rank_0=True)


# One hook for all of them, since none can be taken back.
_open: dict[int, weakref.ref[Mailbox]] = {}


def _remember(mailbox: Mailbox) -> None:
    for number in [number for number, known in list(_open.items()) if known() is None]:
        _open.pop(number, None)
    _open[id(mailbox)] = weakref.ref(mailbox)


def _close_in_child() -> None:
    """A forked child, such as a DataLoader's, must not keep the connections open when this process is gone."""
    for known in list(_open.values()):
        mailbox = known()
        if mailbox is not None:
            mailbox.close()


os.register_at_fork(after_in_child=_close_in_child)
