"""
Sends a line of text from rank 0 to the other ranks of its host, over an abstract Unix socket.

The socket has a name in Linux's abstract namespace and no file, and vanishes with its process. So a killed job leaves
nothing behind, and a new job finds nothing of an older one. Both ends check by SO_PEERCRED that the other process
belongs to the same user. `pmi_rendezvous` calls it for jobs on one host.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress

from ..errors import CommunicationError

_LONGEST = 4096
_PAUSE_S = 0.02  # between two attempts to connect to rank 0


def give_to_local_ranks(name: str, text: str, size: int, timeout_s: float) -> None:
    """Sends ``text`` to all other ranks; rank 0 calls it. Blocks until each rank has it.

    ``name`` is the socket's, equal on all ranks. Raises a CommunicationError if a rank does not ask within
    ``timeout_s``, or if another process listens under this name.
    """
    give_up_at = time.monotonic() + timeout_s
    missing = set(range(1, size))
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address_of(name))
        except OSError as error:
            raise CommunicationError(
                f"another process of this host has the socket name {name!r} of this job: two processes are its rank "
                f"0, or hvd.init() was called both in a program and in one that it started ({error})"
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
                raise CommunicationError(
                    f"hvd.init() failed: rank {_list(missing)} on this host did not call it within {timeout_s:g} s: "
                    "look at the output of these ranks"
                ) from None
            except (OSError, ValueError):
                continue  # it closed the connection, or is no rank; the error at the end names the missing ranks


def ask_local_rank_0(name: str, rank: int, timeout_s: float) -> str:
    """Returns the text that rank 0 sends; every other rank calls it. Blocks until rank 0 listens under ``name``.

    Raises a CommunicationError after ``timeout_s``, or if the socket belongs to another user's process.
    """
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
    raise CommunicationError(
        f"hvd.init() failed: rank 0 on this host did not call it within {timeout_s:g} s: look at its output"
    )


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
