"""
What Linux says of this host's addresses, interfaces and routes, and of processes. Nothing is sent to other hosts.

Interface names are never compared between hosts, where they may differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"

# Addresses that are never in use (RFC 5737, RFC 3849): the route to them is the default route.
ELSEWHERE = ("192.0.2.1", "2001:db8::1")

DISCARD_PORT = 9
"""A port at which usually nothing listens."""

_SIOCGIFADDR = 0x8915  # Linux's


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface: IPv4 before IPv6, link-local ones last."""
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: sorted((each.address for each in addresses if each.family in families), key=_least_useful_last)
        for name, addresses in psutil.net_if_addrs().items()
    }


def interface_with(address: str) -> str | None:
    """Returns the name of the interface with this address, or None."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, own in _all_addresses() if ipaddress.ip_address(own) == wanted), None)


def _all_addresses() -> Iterator[tuple[str, str]]:
    """Yields interfaces' names and addresses: first each one's first IPv4 address, without an import of psutil."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("40s", os.fsencode(name)))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    yield from found
    for name, addresses in interfaces().items():
        for own in addresses:
            yield name, own


def addresses_towards(target: str) -> Iterator[str]:
    """Yields this host's address on the route to each address of another host; none where there is no route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(target, DISCARD_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # on a UDP socket this only chooses the route
                yield str(probe.getsockname()[0])


def _least_useful_last(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local, parsed.version == 6


# The numbers of fields of /proc/PID/stat, by proc(5). The name, the second, may hold anything.
_FLAGS, _EXIT_CODE, _FIRST = 9, 52, 3
_PF_EXITING = 0x4


class Stat:
    """The fields of one process or thread."""

    def __init__(self, fields: list[bytes]) -> None:
        self._fields = fields

    def __getitem__(self, number: int) -> int:
        """Returns the field that proc(5) gives this number."""
        return int(self._fields[number - _FIRST])

    @property
    def has_ended(self) -> bool:
        """Whether it only waits for its parent to collect it."""
        return self._fields[0] in (b"Z", b"X")


def stat_of(pid: int | str) -> Stat | None:
    """Returns the fields of a process; None if there is none, or it cannot be read."""
    try:
        return _read(f"/proc/{pid}/stat")
    except OSError:
        return None


def exit_statuses(pid: int) -> list[int]:
    """Returns the wait status of each thread of a process that exits; none as long as one of them goes on.

    None too if there is no such process, or this one can open no more files. After a process of some GB was killed, the
    kernel takes its memory back for 0.1 s before the process has ended: no instruction of it runs any more.
    """
    statuses = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                stat = _read(f"/proc/{pid}/task/{thread}/stat")
            except (FileNotFoundError, ProcessLookupError):  # it has ended entirely
                continue
            if not stat[_FLAGS] & _PF_EXITING:
                return []
            statuses.append(stat[_EXIT_CODE])
    except OSError:
        return []
    return statuses


def _read(path: str) -> Stat:
    with open(path, "rb") as file:
        return Stat(file.read().rpartition(b")")[2].split())
