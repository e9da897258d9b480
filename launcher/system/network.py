"""Finds this host's address as other hosts reach it, and the network interface with a given address.

The kernel knows the routes: connecting a UDP socket gives it the source address of the route and sends nothing.
Interface names are never compared between hosts, where they may differ.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping

from ..errors import LauncherError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Addresses reserved for documentation (RFC 5737, RFC 3849): no host has them, but they use the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface: IPv4 before IPv6, link-local ones last."""
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    return {
        name: sorted((a.address for a in addresses if a.family in _FAMILIES), key=_least_useful_last)
        for name, addresses in psutil.net_if_addrs().items()
    }


def _least_useful_last(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local, parsed.version == 6


def interface_with(address: str) -> str | None:
    """Returns the name of the interface with this address, or None."""
    wanted = ipaddress.ip_address(address)
    for name, addresses in interfaces().items():
        if any(ipaddress.ip_address(own) == wanted for own in addresses):
            return name
    return None


def loopback_interface() -> str | None:
    return interface_with("127.0.0.1") or interface_with("::1")


def first_there(names: str) -> str:
    """Returns the first of these comma-separated interfaces that this host has, or the last of them if it has none."""
    known = interfaces()
    *others, last = names.split(",")
    return next((name for name in others if name in known), last)


def address_of(interface: str) -> str:
    """Returns the interface's address for other hosts; raises `LauncherError` if it has none or does not exist."""
    known = interfaces()
    if interface not in known:
        raise LauncherError(f"there is no network interface {interface!r}; this host has {', '.join(known)}")
    if not known[interface]:
        raise LauncherError(f"the network interface {interface!r} has no IP address")
    return known[interface][0]


def address_on_route(peer: str) -> str | None:
    """Returns this host's address on the route to ``peer``, an IP address; None if there is no route."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, _ANY_PORT))
        return str(probe.getsockname()[0])
    return None


def address_towards(peers: Iterable[str]) -> str:
    """Returns this host's address on the routes to most of ``peers``.

    Raises `LauncherError` if there is no route to one of them.
    """
    found: Counter[str] = Counter()
    for peer in peers:
        own = address_on_route(peer)
        if own is None:
            raise LauncherError(f"there is no route to {peer}, the address of another host of the job")
        found[own] += 1
    return found.most_common(1)[0][0]


def own_address(environ: Mapping[str, str]) -> str | None:
    """Returns this host's address as the launcher reaches it by ssh, else its address on the default route."""
    if len(fields := environ.get("SSH_CONNECTION", "").split()) == 4:
        return fields[2].partition("%")[0]
    return next(filter(None, map(address_on_route, _ELSEWHERE)), None)


def some_address() -> str | None:
    """Returns an address of this machine that others may reach, where no route leads out of it; None if it has none."""
    addresses = (ipaddress.ip_address(own) for each in interfaces().values() for own in each if "%" not in own)
    return next((str(own) for own in addresses if not own.is_loopback and not own.is_link_local), None)


def is_own_address(address: str) -> bool:
    """Whether this machine has this IP address."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return False
    if wanted.is_loopback:
        return True
    return any(ipaddress.ip_address(own) == wanted for addresses in interfaces().values() for own in addresses)


def reserve_port() -> socket.socket:
    """Returns a bound socket that does not listen: the kernel gives its TCP port to no other process while it is open.

    A program that binds the port with SO_REUSEADDR, as servers do, still can: Linux allows it while none of the bound
    sockets listens. So rank 0 gets a port that is still free when it starts to listen there.
    """
    try:
        reserved = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("::", 0))
    except OSError:  # this host has no IPv6
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
    return reserved
