"""Finds this host's address as others reach it, and the network interface that has an address.

Routes are asked of the kernel: a UDP socket that is connected has the source address that would be used, and sends
nothing by it. Names of interfaces are never compared between hosts, which may call them as they like.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping

from ..errors import LauncherError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Reserved for documentation (RFC 5737, RFC 3849): nobody is there, but the way out leads to them.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, IPv4 before IPv6, link-local ones last."""
    import psutil  # noqa: PLC0415  # costs 20 ms, needless where nobody asks

    return {
        name: sorted((a.address for a in addresses if a.family in _FAMILIES), key=_least_useful_last)
        for name, addresses in psutil.net_if_addrs().items()
    }


def _least_useful_last(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local, parsed.version == 6


def interface_with(address: str) -> str | None:
    """The name of the interface that has it."""
    wanted = ipaddress.ip_address(address)
    for name, addresses in interfaces().items():
        if any(ipaddress.ip_address(own) == wanted for own in addresses):
            return name
    return None


def loopback_interface() -> str | None:
    return interface_with("127.0.0.1") or interface_with("::1")


def first_there(names: str) -> str:
    """The first of these interfaces, with commas between, that is here; the last of them if none is."""
    known = interfaces()
    *others, last = names.split(",")
    return next((name for name in others if name in known), last)


def address_of(interface: str) -> str:
    """Its address for others; a `LauncherError` if there is no such interface, or it has none."""
    known = interfaces()
    if interface not in known:
        raise LauncherError(f"there is no network interface {interface!r}; there are {', '.join(known)}")
    if not known[interface]:
        raise LauncherError(f"the network interface {interface!r} has no IP address")
    return known[interface][0]


def address_on_route(peer: str) -> str | None:
    """Our own address on the way to ``peer``, an IP address; None if there is no way."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, _ANY_PORT))
        return str(probe.getsockname()[0])
    return None


def address_towards(peers: Iterable[str]) -> str:
    """Our own address on the way to most of them, or a `LauncherError` that names one that cannot be reached."""
    found: Counter[str] = Counter()
    for peer in peers:
        own = address_on_route(peer)
        if own is None:
            raise LauncherError(f"there is no route to {peer}, where another host of the job is")
        found[own] += 1
    return found.most_common(1)[0][0]


def own_address(environ: Mapping[str, str]) -> str | None:
    """This host's address as the launcher reaches it by ssh, which says so; else the one on the way out."""
    if len(fields := environ.get("SSH_CONNECTION", "").split()) == 4:
        return fields[2].partition("%")[0]
    return next(filter(None, map(address_on_route, _ELSEWHERE)), None)


def is_own_address(address: str) -> bool:
    """Whether this machine has it."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return False
    if wanted.is_loopback:
        return True
    return any(ipaddress.ip_address(own) == wanted for addresses in interfaces().values() for own in addresses)


def reserve_port() -> socket.socket:
    """A TCP port that the kernel gives to nobody else while this is open, though nothing listens on it.

    A program that binds it with SO_REUSEADDR, as servers do, may: Linux allows that as long as none of those
    bound to it listens. So rank 0 can be told a port that is still free when it comes to listen there.
    """
    try:
        reserved = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("::", 0))
    except OSError:  # no IPv6 here
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
    return reserved
