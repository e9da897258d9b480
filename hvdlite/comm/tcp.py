"""What Linux tells of this process's TCP sockets, and does with them: for `gloo_sockets`, since gloo owns them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import socket
import stat
import struct
from collections.abc import Collection

_SO_ATTACH_FILTER = 26  # linux: asm-generic/socket.h

# Of `struct tcp_info` (linux/tcp.h): the state, its first byte, and the milliseconds since the last data and the last
# acknowledgement came.
ESTABLISHED, SYN_SENT = 1, 2
_LAST_RECEIVED = struct.Struct("=52xII")

_INODE = 9  # the place in a line of /proc/net/tcp

PROBE_EVERY_S = 2
# The kernel gives an idle connection up after this many probes, about four minutes: an error of the rank. In an elastic
# job hvdlite-run decides before.
_MOST_PROBES = 127


def copy_of(number: int, inode: int | None) -> socket.socket | None:
    """Returns a copy of the TCP socket with this file descriptor, and this inode if it is known.

    None if the file is another one, or closed: any thread may do that meanwhile. An OSError if no file can be opened.
    """
    try:
        copy = os.dup(number)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    file = os.fstat(copy)
    if not stat.S_ISSOCK(file.st_mode) or inode not in (None, file.st_ino):
        os.close(copy)
        return None
    found = socket.socket(fileno=copy)
    if found.proto == socket.IPPROTO_TCP:
        return found
    found.close()
    return None


def state_of(connection: socket.socket) -> int:
    """Returns `ESTABLISHED`, `SYN_SENT` or another state."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def probe(connection: socket.socket) -> None:
    """Has the kernel probe a connection from now on."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def silence_s(connection: socket.socket) -> float:
    """Returns for how many seconds nothing has come over a connection; has the kernel probe it from now on."""
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        probe(connection)
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
    # An answer to a probe is an acknowledgement; but data may come without one.
    return float(min(_LAST_RECEIVED.unpack(info)) / 1000)


def unanswered_by(unanswered: Collection[int]) -> set[str]:
    """Returns the addresses to which these sockets begin to connect: only the kernel's table has them by then."""
    found = set()
    for name in ("tcp", "tcp6") if unanswered else ():
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as table:
            for line in itertools.islice(table, 1, None):
                _, _, other, state, *_ = columns = line.split()
                if int(state, 16) == SYN_SENT and int(columns[_INODE]) in unanswered:
                    # Words of 32 bits, as they are in memory.
                    address = bytes.fromhex(other.partition(":")[0])
                    words = struct.unpack(f">{len(address) // 4}I", address)
                    family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                    found.add(address_in((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), 0)))
    return found


def drop_packets(to: socket.socket) -> None:
    """Has the kernel drop all further packets to a socket. An OSError if this system cannot filter packets."""
    # A classic BPF program of one instruction, "ret #0": keep 0 bytes of each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def address_in(name: tuple[str, int]) -> str:
    """Returns the address in a socket's name, in one form for IPv4 and none of a link's scope."""
    return name[0].removeprefix("::ffff:").partition("%")[0]
