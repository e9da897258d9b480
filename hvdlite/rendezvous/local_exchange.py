"""
Hands a line of text from rank 0 to the other ranks of its host, by an abstract Unix socket.

It has a name and no file (Linux's abstract namespace), and is gone with the process that has it: nothing is
left behind by a job that is killed, and nothing of an older job is found. Both ends see by the system's word
that the other belongs to the same user.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress

from ..errors import CommunicationError

_LONGEST = 4096
_PAUSE_S = 0.02  # between two tries to reach a rank 0 that is not there yet


def give_to_local_ranks(name: str, text: str, size: int, timeout_s: float) -> None:
    """On rank 0: give ``text`` to all other ranks; returns when each of them has it."""
    give_up_at = time.monotonic() + timeout_s
    missing = set(range(1, size))
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address_of(name))
        except OSError as error:
            raise CommunicationError(
                f"another process of this host has the name {name!r}, which belongs to this job: two processes have "
                f"its rank 0, or hvd.init() was called in both a program and one that it started ({error})"
            ) from error
        listener.listen(size)
        while missing:
            listener.settimeout(max(0.001, give_up_at - time.monotonic()))
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(max(0.001, give_up_at - time.monotonic()))
                    if _peer_user(connection) == os.getuid():
                        rank = int(_read_line(connection))
                        connection.sendall(f"{text}\n".encode())
                        missing.discard(rank)
            except TimeoutError:
                raise CommunicationError(f"waiting for rank {_list(missing)} on this host") from None
            except (OSError, ValueError):
                continue  # one that went away, or no rank: those that are missing are told at the end


def ask_local_rank_0(name: str, rank: int, timeout_s: float) -> str:
    """On the others: the text that rank 0 gives; waits for rank 0."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.001, give_up_at - time.monotonic()))
            connection.connect(_address_of(name))
            if _peer_user(connection) != os.getuid():
                raise CommunicationError(f"the socket {name!r} of this host belongs to another user's process")
            connection.sendall(f"{rank}\n".encode())
            answer = _read_line(connection)
            if answer:
                return answer
        time.sleep(_PAUSE_S)
    raise CommunicationError("waiting for rank 0 on this host")


def _address_of(name: str) -> bytes:
    return b"\0hvdlite/" + name.encode()


def _read_line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(_LONGEST)
        if not piece or len(data) > _LONGEST:
            return ""
        data += piece
    return data[:-1].decode()


def _peer_user(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _list(ranks: set[int]) -> str:
    shown = sorted(ranks)[:8]
    return ", ".join(map(str, shown)) + (", ..." if len(ranks) > len(shown) else "")
