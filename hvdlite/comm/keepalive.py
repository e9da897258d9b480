"""
`Keepalive`: for how long nothing has come over the connections of a gloo process group, by the other end's address.

    Connections ── sockets ── keepalive probes of the kernel ── TCP_INFO ── silences() ── hvdlite-run

hvdlite-run asks for a report on a job that stands still (`runtime.hang_report`), and in elastic jobs all the time, to
give hosts up (`rendezvous.responder`). Until the ranks are connected, `connecting.Connecting` takes its place.

Gloo does not notice that the network between two hosts is cut: its operations wait until their timeout. The kernel
does: it probes a connection that is idle, and repeats data that are not acknowledged. The other kernel answers even
while the process there computes, is stopped or hangs. So a connection over which nothing comes for many seconds leads
to a host that is gone, or over a network that is cut. `runtime.connect_ranks` makes one for the ranks of several hosts.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from .gloo import Connections

_PROBE_EVERY_S = 2
# The kernel gives an idle connection up after this many probes, about four minutes: an error of the rank. In an elastic
# job hvdlite-run decides before.
_MOST_PROBES = 127

# Of `struct tcp_info` (linux/tcp.h): milliseconds since the last data and the last acknowledgement came.
_LAST_RECEIVED = struct.Struct("=52xII")

_SHORTEST_S = 2 * _PROBE_EVERY_S


class Keepalive:
    """The connections of one process group. Any thread may call its methods."""

    def __init__(self, connections: Connections) -> None:
        """Has the kernel probe the connections from now on."""
        self._connections = connections
        addresses = set()
        for each in connections.sockets():
            with contextlib.suppress(OSError):
                addresses.add(address_in(each.getsockname()))
                probe(each)
        self.addresses = tuple(sorted(addresses))
        """This end's addresses; usually there is one."""

    def silences(self) -> dict[str, float]:
        """Returns for how many seconds nothing has come from each other address, but none of less than 4 s.

        That of several connections counts over which nothing has come for longest.
        """
        longest: dict[str, float] = {}
        for each in self._connections.sockets():
            with contextlib.suppress(OSError):  # it is being closed
                since_s = silence_s(each)
                if since_s >= _SHORTEST_S:
                    other = address_in(each.getpeername())
                    longest[other] = max(since_s, longest.get(other, 0.0))
        return longest


def probe(connection: socket.socket) -> None:
    """Has the kernel probe a connection from now on."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_probed(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def silence_s(connection: socket.socket) -> float:
    """Returns for how many seconds nothing has come over a connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
    # An answer to a probe is an acknowledgement; but data may come without one.
    return float(min(_LAST_RECEIVED.unpack(info)) / 1000)


def address_in(name: tuple[str, int]) -> str:
    """Returns the address in a socket's name, in one form for IPv4 and none of a link's scope."""
    return name[0].removeprefix("::ffff:").partition("%")[0]
