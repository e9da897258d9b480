"""
`Mailbox`: one end of the connection over which a rank and rank 0 send each other short messages.

    send (any thread) ── into the socket ── what does not fit is buffered ── flush, when the socket has room

`rank0_connection` and `coordinator` each have an end. Nothing here waits for the other end, even if it stops reading:
its process may be frozen, or something may hold its interpreter. `frames` encodes the messages, `coordinator` lists
them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hvdlite_wire.codec import Family

from .. import forks
from ..signing import Signer
from .frames import Message, Opener, Sealer
from .messages import FROM_RANK_0, TO_RANK_0, FromRank0, ToRank0

_READ_BYTES = 1 << 18
_WRITE_BYTES = 1 << 18


Sent = TypeVar("Sent")
Received = TypeVar("Received")


@dataclass(frozen=True, slots=True)
class Direction(Generic[Message]):
    """A direction of a connection: its name, which is signed too, and the messages that go there."""

    name: str
    family: Family[Message]


UP = Direction("to rank 0", TO_RANK_0)
DOWN = Direction("from rank 0", FROM_RANK_0)


class Mailbox(Generic[Sent, Received]):
    """One end of a connection. Any thread may send; one thread receives, and flushes when the socket has room again."""

    def __init__(
        self,
        connection: socket.socket,
        session: Signer,
        *,
        sends: Direction[Sent],
        receives: Direction[Received],
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``session`` is the connection's signer, the same at both ends.

        ``wake`` is called on the sending thread when there is data to flush and there was none before.
        """
        connection.setblocking(False)
        self._connection = connection
        self._sealer = Sealer(session.derive(sends.name), sends.family)
        self._opener = Opener(session.derive(receives.name), receives.family)
        self.wake = wake
        self._sending = threading.Lock()
        # Data that the socket had no room for.
        self._outgoing = bytearray()
        self._is_broken = False
        forks.when_forked(self)

    def send(self, message: Sent) -> None:
        """Sends a message. Never blocks, and never fails because the other end is closed: `receive` reports that."""
        self.send_all([message])

    def send_all(self, messages: Iterable[Sent]) -> None:
        """Sends several messages, as `send` does. Raises a ValueError before any is sent if one is too long."""
        with self._sending:
            # Under the lock, since frames are counted in the order in which they are sent.
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
        """Whether there is data to flush."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Sends as much as the socket has room for now."""
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
            # Not raised here: `receive` must still read what the other end sent, and then its end.
            self._is_broken = True
            return len(data)

    def receive(self) -> list[Received]:
        """Returns the messages that have arrived completely by now.

        Raises EOFError if the other end is closed, OSError if this end is, and FrameError if the data is not the other
        end's.
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
        """Sends no more: the other end's `receive` raises EOFError, while this end can still receive."""
        self._connection.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Sends and receives no more: `receive` raises EOFError at both ends."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        # An open copy would keep the connection alive after the parent's end, of which the other end must hear.
        self.close()

    def close(self) -> None:
        self._connection.close()


def mailbox_pair(session: Signer) -> tuple[Mailbox[ToRank0, FromRank0], Mailbox[FromRank0, ToRank0]]:
    """Returns two connected ends within this process: a rank's, and rank 0's."""
    own_end, other_end = socket.socketpair()
    return Mailbox(own_end, session, sends=UP, receives=DOWN), Mailbox(other_end, session, sends=DOWN, receives=UP)
