"""
One end of a connection over which ranks and rank 0 send each other short messages: JSON, after its length.

What they say is in `coordinator`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import weakref
from typing import Any

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class Mailbox:
    """Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()
        _remember(self)

    def send(self, message: list[Any]) -> None:
        """Raises OSError if the other end is gone."""
        data = json.dumps(message).encode()
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[list[Any]]:
        """The messages that have come whole, after waiting for something to come, as long as the socket waits.

        Raises EOFError if the other end is gone, and OSError if ours is.
        """
        data = self._connection.recv(_READ_BYTES)
        if not data:
            raise EOFError("the other end has closed the connection")
        self._received += data
        messages = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages

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
