"""
Finds the address by which other hosts reach this host, and says why a connection to one could not be made.

It sends nothing to other hosts. `rank0_stores`, `runtime`, `control.control_client` and `round_trips` call it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence

from hvdlite_wire.linux import DISCARD_PORT, ELSEWHERE, addresses_towards, interfaces

from ..errors import list_names

# How the system and gloo word a TCP connection that the other end, or what is between, has refused at once.
_REFUSED = re.compile(r"connection refused|no route to host|(network|host) is unreachable", re.IGNORECASE)
# The same for one that was not made.
_NO_CONNECTION = re.compile(
    rf"{_REFUSED.pattern}|connect timeout|timed out connecting|connection timed out|^timed out$", re.IGNORECASE
)
# The other end, as gloo and `control.control_client` name it.
_REMOTE = re.compile(r"remote=\[([0-9a-fA-F.:%\w]+)\]|rank 0 cannot be reached at \('([^']+)', \d+")


def own_address(towards: Iterable[str]) -> str | None:
    """Returns this host's source address on its route to the first of ``towards`` that it has a route to.

    None if there is none that other hosts can use: loopback and link-local addresses are skipped.
    """
    return next((own for target in towards for own in addresses_towards(target) if _is_reachable(own)), None)


def address_for_others(hosts: Iterable[str] = ()) -> str:
    """Returns the address of this host at which ranks on ``hosts`` connect to it, as gloo chooses it.

    It is the address of GLOO_SOCKET_IFNAME's first interface if that is set. Raises an OSError if there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    chosen = address_of(interface) if interface else own_address([*dict.fromkeys(hosts), *ELSEWHERE])
    return chosen or socket.gethostbyname(socket.gethostname())  # gloo does the same


def refused_by(error: object, others: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the addresses that have refused a connection, if ``error`` says so.

    Where its text does not name the other end, as where this host has no route to it, ``others`` are asked for.
    """
    text = str(error)
    if not _REFUSED.search(text):
        return ()
    if found := _REMOTE.search(text):
        return ((found[1] or found[2]).removeprefix("::ffff:").partition("%")[0],)
    return tuple(address for address in others if not _has_route(address))


def _has_route(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setblocking(False)  # without a route the kernel refuses at once
        return probe.connect_ex((address, DISCARD_PORT)) not in (errno.EHOSTUNREACH, errno.ENETUNREACH)


def no_connection_between(hosts: Sequence[str], own: str, error: object) -> str | None:
    """Returns a message that a firewall may block the hosts, if ``error`` says that a connection could not be made.

    ``hosts`` has the host of each rank, and ``own`` is this rank's. None if all ranks are on one host, or if ``error``
    has another cause.
    """
    others = [host for host in dict.fromkeys(hosts) if host != own]
    found = _NO_CONNECTION.search(str(error))
    if found is None or not others:
        return None
    all_hosts = ",".join(dict.fromkeys(hosts))
    return (
        f"{own} could not open a TCP connection to another host of the job ({list_names(others, len(others))}): "
        f"{found[0].lower()}. Does a firewall block TCP between these hosts, or has the rank there ended? "
        f"hvdlite-run --check -H {all_hosts} shows which connections fail"
    )


def address_of(interface: str) -> str | None:
    """Returns the first address of an interface that is not link-local; None if it has none."""
    own = interfaces().get(interface, [])
    return next((address for address in own if not ipaddress.ip_address(address).is_link_local), None)


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)
