"""
Finds this host's own addresses from its routes: the one that others reach, and its interface.

Asked of the system alone: nothing is sent, and no interface's name is compared with another host's.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Addresses that stand for "anywhere else" (RFC 5737, RFC 3849): the route to them is the default route.
ELSEWHERE = ("192.0.2.1", "2001:db8::1")

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def own_address(towards: Iterable[str]) -> str | None:
    """The address that this host has on its route to the first of these that it has a route to.

    An address that other hosts cannot use (loopback, link-local) counts as none.
    """
    for target in towards:
        with suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # of a datagram socket: chooses the route, sends nothing
                    own = str(probe.getsockname()[0])
                    if _is_reachable(own):
                        return own
    return None


def address_of(interface: str) -> str | None:
    """The first address of the interface of this name that is more than link-local; None where there is none."""
    found = ((name, own) for find in (_interfaces_v4, _interfaces_v6) for name, own in find())
    return next((str(own) for name, own in found if name == interface and not own.is_link_local), None)


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address; None where none does, or only as one of several."""
    wanted = ipaddress.ip_address(address)
    find = _interfaces_v4 if wanted.version == 4 else _interfaces_v6
    return next((name for name, own in find() if own == wanted), None)


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _interfaces_v4() -> Iterable[tuple[str, ipaddress.IPv4Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, ipaddress.IPv4Address(answer[20:24])


def _interfaces_v6() -> Iterable[tuple[str, ipaddress.IPv6Address]]:
    with suppress(OSError):  # a system without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))
