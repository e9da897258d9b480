"""Finds this host's address as other hosts of a job reach it, and reserves a port for rank 0."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping

from hvdlite_wire.linux import ELSEWHERE, LOOPBACK, addresses_towards, interface_with, interfaces

from ..errors import LauncherError


def loopback_interface() -> str | None:
    return interface_with(LOOPBACK) or interface_with("::1")


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
    return next(addresses_towards(peer), None)


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
    fields = environ.get("SSH_CONNECTION", "").split()
    if len(fields) == 4 and fields[2] != "UNKNOWN":  # sshd's word where it talks over pipes, behind another program
        return fields[2].partition("%")[0]
    return next(filter(None, map(address_on_route, ELSEWHERE)), None)


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
    return wanted.is_loopback or interface_with(address) is not None


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
