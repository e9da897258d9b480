"""The hosts a user names, with ``-H`` or in a hostfile: both grammars, and which of the hosts are this machine.

A hostfile has one host in a line, as Horovod, OpenMPI and MPICH write it:

    # comment
    node1 slots=4
    user@node2 slots=4 max-slots=8
    [fd00::1]:2
    node3 slots=auto
    node4               # no slots: one

``max-slots`` (or ``max_slots``) bounds nothing: OpenMPI may put more ranks on a host than it has slots, up to
that many, and hvdlite-run never does. It must only not contradict ``slots``.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..system.network import is_own_address
from ..system.user_file import name_file, read_user_file

AUTO = 0  # slots that are yet to be counted; no host has none

_EXAMPLE = "such as node1:4"
_LINE_EXAMPLE = "such as: node1 slots=4"
_MOST_FILE_BYTES = 1 << 20

# ssh gives user and host to a shell where the user's configuration says so (ProxyCommand, Match exec), and refuses
# what a shell would take for its own in newer versions alone. Neither begins with a dash: it would be an option.
_ITEM = re.compile(
    r"(?:(?P<user>(?!-)[^\s@:,\[\]\x00-\x1f\x7f'`\";&<>|(){}]+)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[\w.][\w.-]*))"
    r"(?::(?P<slots>[0-9]+|auto))?",
    re.ASCII,
)
_FIELD = re.compile(r"(?:(slots)=([0-9]+|auto)|(max)[-_]slots=([0-9]+))", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it may hold. ``name`` is as the user wrote it, less IPv6's brackets.

    ``slots`` is `AUTO` until `count_auto_slots` has put a number there. ``is_here``: it is the launcher's own.
    """

    name: str
    slots: int = 1
    user: str | None = None
    is_here: bool = False

    @property
    def label(self) -> str:
        """What it is called in messages, and told apart by."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``a:2,user@b:4,[fd00::1]:2,c:auto,d``. No slots: one. What is no host is a `UsageError`."""
    try:
        return each_once(parse_host(item.strip()) for item in text.split(","))
    except UsageError as error:
        raise UsageError(f"-H: {error}") from None


def parse_host(item: str) -> Host:
    """Read ``host:slots``. The caller adds to an error where it was written."""
    if any(part.startswith("-") for part in item.split("@")):
        raise UsageError(f"{item!r} is not host:slots, {_EXAMPLE}: ssh would take what begins with - for an option")
    match = _ITEM.fullmatch(item)
    if match is None or not item.isprintable() or (match["user"] or "").endswith("\\"):
        if item.count(":") > 1 and "[" not in item:
            raise UsageError(f"{item!r} is not host:slots; an IPv6 address goes in brackets, such as [fd00::1]:4")
        raise UsageError(f"{item!r} is not host:slots, {_EXAMPLE}")
    return Host(match["ipv6"] or match["name"], parse_slots(match["slots"] or "1", item), match["user"])


def parse_slots(text: str, item: str) -> int:
    """Read digits or ``auto``, which stand in ``item``."""
    if text == "auto":
        return AUTO
    digits = text.lstrip("0")
    if not digits:
        raise UsageError(f"{item!r} has no slots; a host needs at least one, {_EXAMPLE}")
    if len(digits) > 6:
        raise UsageError(f"{item!r} has more slots than any host can hold")
    return int(digits)


def each_once(named: Iterable[Host]) -> tuple[Host, ...]:
    """A host named twice is one host, its slots added."""
    hosts: dict[tuple[str | None, str], Host] = {}
    for host in named:
        key = (host.user, host.name)
        known = hosts.get(key, replace(host, slots=0))
        if key in hosts and AUTO in (known.slots, host.slots):
            raise UsageError(f"{host.name!r} is named twice, though auto is all the slots it has")
        hosts[key] = replace(known, slots=known.slots + host.slots)
    return tuple(hosts.values())


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of the file; whatever is wrong with it is a `UsageError` that names it."""
    try:
        return parse_hostfile(_read(path))
    except UsageError as error:
        raise UsageError(f"{name_file('--hostfile', path)}{error}") from None


def _read(path: str) -> str:
    data = read_user_file(path, max_bytes=_MOST_FILE_BYTES, what="a hostfile")
    # What is no text cannot be a host either: its line is named as any other that is wrong.
    return data.decode("utf-8-sig", errors="backslashreplace")


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Read the lines; the `UsageError` about one begins with its number, to follow the file's name."""
    hosts: tuple[Host, ...] = ()
    # Not splitlines(): it sees more line ends than an editor that counts them.
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            hosts = each_once([*hosts, _parse_line(words)])
        except UsageError as error:
            raise UsageError(f", line {number}: {error}") from None
    if not hosts:
        raise UsageError(f": no host in it; a line is a host, {_LINE_EXAMPLE}")
    return hosts


def _parse_line(words: str) -> Host:
    first, *rest = re.sub(r"\s*=\s*", "=", words).split()
    host = parse_host(first)
    fields: dict[str, int] = {}
    for word in rest:
        match = _FIELD.fullmatch(word)
        if match is None:
            raise UsageError(f"{word!r} is not slots=N; a line is a host, {_LINE_EXAMPLE}")
        name, value = (group for group in match.groups() if group)
        if name in fields or (name == "slots" and ":" in first.rpartition("]")[2]):
            raise UsageError(f"{words!r} says twice how many slots; once is right, {_LINE_EXAMPLE}")
        fields[name] = parse_slots(value, word)
    slots = fields.get("slots", host.slots)
    if slots > fields.get("max", slots):
        raise UsageError(f"{words!r} has more slots than its max-slots")
    return Host(host.name, slots, host.user)


def count_auto_slots(hosts: Iterable[Host], count: Callable[[Host], int]) -> tuple[Host, ...]:
    """The same hosts, each with a number of slots; ``count`` is asked for those that were `AUTO`."""
    return tuple(replace(host, slots=count(host)) if host.slots == AUTO else host for host in hosts)


def find_this_machine(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """The same hosts; those that are this machine, by whatever names, as one."""
    found: list[Host] = []
    for host in hosts:
        if not _is_this_machine(host):
            found.append(host)
            continue
        here = next((i for i, known in enumerate(found) if known.is_here), None)
        if here is None:
            found.append(replace(host, is_here=True, user=None))
        elif AUTO in (found[here].slots, host.slots):
            raise UsageError(
                f"{found[here].name!r} and {host.name!r} are the same machine; auto is all the slots it has"
            )
        else:
            found[here] = replace(found[here], slots=found[here].slots + host.slots)
    return tuple(found)


def each_machine_once(hosts: Iterable[Host], machine_of: Callable[[Host], str | None]) -> tuple[Host, ...]:
    """The same hosts; those that turn out to be one machine as one, under the first of its names."""
    found: dict[str, Host] = {}
    for host in hosts:
        machine = machine_of(host) or host.label
        known = found.get(machine)
        if known is None:
            found[machine] = host
        else:
            slots = AUTO if AUTO in (known.slots, host.slots) else known.slots + host.slots
            found[machine] = replace(known, slots=slots)
    return tuple(found.values())


def _is_this_machine(host: Host) -> bool:
    if host.user is not None and host.user != getpass.getuser():
        return False
    name = host.name.lower()
    own = socket.gethostname().lower()
    if name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}:
        return True
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # an alias that only ssh knows
        return False
    return any(is_own_address(str(address[0]).partition("%")[0]) for *_, address in answers)
