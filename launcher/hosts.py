"""The hosts a user names with ``-H``: their grammar, and which of them are this machine.

What runs where on them is planned in `plan`.
"""

from __future__ import annotations

import getpass
import re
import socket
from dataclasses import dataclass, replace

from .errors import UsageError

_EXAMPLE = "such as node1:4"

_ITEM = re.compile(
    r"(?:(?P<user>[^\s@:,\[\]]+)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[\w.][\w.-]*))"
    r"(?::(?P<slots>[0-9]+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it may hold. ``name`` is as the user wrote it, less IPv6's brackets."""

    name: str
    slots: int = 1
    user: str | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``a:2,user@b:4,[fd00::1]:2,c``. No slots: one. A host named twice is one host, its slots added."""
    hosts: dict[tuple[str | None, str], Host] = {}
    for item in text.split(","):
        host = _parse_item(item.strip())
        key = (host.user, host.name)
        known = hosts.get(key)
        hosts[key] = host if known is None else replace(known, slots=known.slots + host.slots)
    return tuple(hosts.values())


def _parse_item(item: str) -> Host:
    match = _ITEM.fullmatch(item)
    if match is None:
        if item.count(":") > 1 and "[" not in item:
            raise UsageError(f"-H: {item!r} is not host:slots; an IPv6 address goes in brackets, such as [fd00::1]:4")
        raise UsageError(f"-H: {item!r} is not host:slots, {_EXAMPLE}")
    digits = (match["slots"] or "1").lstrip("0")
    if not digits:
        raise UsageError(f"-H: {item!r} has no slots; a host needs at least one, {_EXAMPLE}")
    if len(digits) > 6:
        raise UsageError(f"-H: {item!r} has more slots than any host can hold")
    return Host(match["ipv6"] or match["name"], int(digits), match["user"])


def only_this_machine(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """All of them as one host, if all name this machine; the first that does not is a `UsageError`."""
    for host in hosts:
        if not _is_this_machine(host):
            raise UsageError(f"-H: {host.name!r} is another host; so far only this machine can be launched on")
    return (replace(hosts[0], slots=sum(host.slots for host in hosts)),)


def _is_this_machine(host: Host) -> bool:
    name = host.name.lower()
    own = socket.gethostname().lower()
    if name not in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}:
        return False
    return host.user is None or host.user == getpass.getuser()
