"""The hosts that a user names, with ``-H`` or in a hostfile, which of them are this machine, and the ranks on each.

A hostfile has one host per line, as for Horovod, OpenMPI and MPICH:

    # comment
    node1 slots=4
    user@node2 slots=4 max-slots=8
    [fd00::1]:2
    node3 slots=auto
    node4               # no slots: one

``max-slots`` (or ``max_slots``) is only checked: it must not be less than ``slots``. OpenMPI may put more ranks on a
host than it has slots, up to that number; hvdlite-run never does.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..system.network import is_own_address
from ..system.user_files import name_file, read_user_file

AUTO = 0  # slots not yet counted; no host has 0

_EXAMPLE = "such as node1:4"
_LINE_EXAMPLE = "such as: node1 slots=4"
_MOST_FILE_BYTES = 1 << 20

# If the user's ssh configuration says so (ProxyCommand, Match exec), ssh passes user and host to a shell, and only
# newer versions refuse a shell's special characters. Neither may begin with a dash, which would make it an option.
_ITEM = re.compile(
    r"(?:(?P<user>(?!-)[^\s@:,\[\]\x00-\x1f\x7f'`\";&<>|(){}]+)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[\w.][\w.-]*))"
    r"(?::(?P<slots>[0-9]+|auto))?",
    re.ASCII,
)
_FIELD = re.compile(r"(?:(slots)=([0-9]+|auto)|(max)[-_]slots=([0-9]+))", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A machine and its number of slots. ``name`` is as the user wrote it, without the brackets of IPv6.

    ``slots`` is `AUTO` until `count_auto_slots` has set it. ``is_here``: it is the launcher's own machine.
    """

    name: str
    slots: int = 1
    user: str | None = None
    is_here: bool = False

    @property
    def label(self) -> str:
        """The name that identifies the host, also in messages."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses ``a:2,user@b:4,[fd00::1]:2,c:auto,d``; without a number a host has one slot. Raises `UsageError`."""
    try:
        return each_once(parse_host(item.strip()) for item in text.split(","))
    except UsageError as error:
        raise UsageError(f"-H: {error}") from None


def parse_host(item: str) -> Host:
    """Parses ``host:slots``. The caller adds to a `UsageError` where that was written."""
    if any(part.startswith("-") for part in item.split("@")):
        raise UsageError(
            f"{item!r} is not host:slots, {_EXAMPLE}: ssh would read a name that begins with - as an option"
        )
    match = _ITEM.fullmatch(item)
    if match is None or not item.isprintable() or (match["user"] or "").endswith("\\"):
        if item.count(":") > 1 and "[" not in item:
            raise UsageError(f"{item!r} is not host:slots; an IPv6 address goes in brackets, such as [fd00::1]:4")
        raise UsageError(f"{item!r} is not host:slots, {_EXAMPLE}")
    return Host(match["ipv6"] or match["name"], parse_slots(match["slots"] or "1", item), match["user"])


def parse_slots(text: str, item: str) -> int:
    """Parses digits or ``auto``; ``item`` is the text that contains them, for messages."""
    if text == "auto":
        return AUTO
    digits = text.lstrip("0")
    if not digits:
        raise UsageError(f"{item!r} has 0 slots: a host needs at least one, {_EXAMPLE}")
    if len(digits) > 6:
        raise UsageError(f"{item!r} has too many slots: at most 999999 are allowed")
    return int(digits)


def each_once(hosts: Iterable[Host], key: Callable[[Host], object] = lambda host: host.label) -> tuple[Host, ...]:
    """Returns the hosts, with those of the same ``key`` merged into the first of them, which gets the slots of all."""
    found: dict[object, Host] = {}
    for host in hosts:
        known = found.setdefault(key(host), host)
        if known is not host:
            slots = AUTO if AUTO in (known.slots, host.slots) else known.slots + host.slots
            found[key(host)] = replace(known, slots=slots)
    return tuple(found.values())


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Returns the hosts of a file; raises a `UsageError` that names it."""
    try:
        data = read_user_file(path, max_bytes=_MOST_FILE_BYTES, what="a hostfile")
        # Text that is not UTF-8 cannot be a host either: the message about it names its line.
        return parse_hostfile(data.decode("utf-8-sig", errors="backslashreplace"))
    except UsageError as error:
        raise UsageError(f"{name_file('--hostfile', path)}{error}") from None


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parses the lines; a `UsageError` begins with the number of the line, to follow the file's name."""
    number = 0

    def named() -> Iterator[Host]:
        nonlocal number
        # Not splitlines(), which splits at more characters than an editor does that counts lines.
        for line in text.split("\n"):
            number += 1
            if words := line.partition("#")[0].strip():
                yield _parse_line(words)

    try:
        hosts = each_once(named())
    except UsageError as error:
        raise UsageError(f", line {number}: {error}") from None
    if not hosts:
        raise UsageError(f": it names no host; each line is a host, {_LINE_EXAMPLE}")
    return hosts


def _parse_line(words: str) -> Host:
    first, *rest = re.sub(r"\s*=\s*", "=", words).split()
    host = parse_host(first)
    fields: dict[str, int] = {}
    for word in rest:
        match = _FIELD.fullmatch(word)
        if match is None:
            raise UsageError(f"{word!r} is not slots=N; each line is a host, {_LINE_EXAMPLE}")
        name, value = (group for group in match.groups() if group)
        if name in fields or (name == "slots" and ":" in first.rpartition("]")[2]):
            raise UsageError(f"{words!r} gives the number of slots twice: give it once, {_LINE_EXAMPLE}")
        fields[name] = parse_slots(value, word)
    slots = fields.get("slots", host.slots)
    if slots > fields.get("max", slots):
        raise UsageError(f"{words!r} has more slots than its max-slots")
    return Host(host.name, slots, host.user)


_HOSTFILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
    "DSTACK_MPI_HOSTFILE",
)
# What mpirun sets for each process that it starts: that process's hosts are mpirun's business.
_WITHIN_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID")


def given_hosts(environ: Mapping[str, str]) -> tuple[str, tuple[Host, ...]] | None:
    """Returns the variable by which the place where hvdlite-run runs has named hosts, and these; None without one.

    Kubernetes' operators and dstack write a hostfile; SkyPilot and SageMaker name the nodes, and their GPUs. Within
    another launcher's job nothing is taken. Raises a `UsageError` that names the variable, if its value cannot be used,
    or if this is not the host on which a job is to be started.
    """
    if any(name in environ for name in _WITHIN_MPI):
        return None
    if name := next((name for name in _HOSTFILES if environ.get(name)), None):
        try:
            return name, read_hostfile(environ[name])
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    if environ.get("SKYPILOT_NODE_IPS"):
        return _of_skypilot(environ)
    if environ.get("SM_HOSTS"):
        return _of_sagemaker(environ)
    return None


def _of_skypilot(environ: Mapping[str, str]) -> tuple[str, tuple[Host, ...]]:
    name = "SKYPILOT_NODE_IPS"
    if environ.get("SKYPILOT_NODE_RANK", "0") != "0":
        raise UsageError(
            f"SKYPILOT_NODE_RANK is {environ['SKYPILOT_NODE_RANK']}, and SkyPilot starts this command on every node: "
            'start hvdlite-run on the first one alone, as in: if [ "$SKYPILOT_NODE_RANK" = 0 ]; then ... fi'
        )
    slots = _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    return name, tuple(_host(each, name, slots) for each in environ[name].split())


def _of_sagemaker(environ: Mapping[str, str]) -> tuple[str, tuple[Host, ...]]:
    name = "SM_HOSTS"
    try:
        names = json.loads(environ[name])
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
        raise UsageError(f"{name}={environ[name]!r} is not a list of hosts in JSON")
    own = environ.get("SM_CURRENT_HOST", names[0])
    if own != names[0]:
        raise UsageError(
            f"SM_CURRENT_HOST is {own}, and SageMaker starts this command on every host: start hvdlite-run on "
            f"{names[0]}, the first one, alone"
        )
    slots = _gpus(environ, "SM_NUM_GPUS")
    return name, tuple(_host(each, name, slots) for each in names)


def _host(text: str, variable: str, slots: int) -> Host:
    try:
        host = parse_host(f"[{text}]" if ":" in text else text)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None
    return replace(host, slots=slots)


def _gpus(environ: Mapping[str, str], name: str) -> int:
    """Returns the GPUs of each host; `AUTO`, where the host itself counts, if there are none or it is not said."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 and int(text) else AUTO


def host_of_label(label: str, slots: int) -> Host:
    """Returns the host with this `Host.label`. Looks its name up, which may take a while."""
    user, _, name = label.rpartition("@")
    host = Host(name, slots, user or None)
    return replace(host, is_here=True) if _is_this_machine(host) else host


def count_auto_slots(hosts: Iterable[Host], count: Callable[[Host], int]) -> tuple[Host, ...]:
    """Returns the hosts with their slots; calls ``count`` for those that were `AUTO`."""
    return tuple(replace(host, slots=count(host)) if host.slots == AUTO else host for host in hosts)


def find_this_machine(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Returns the hosts, with all names of this machine merged into one host."""
    found = (replace(host, is_here=True, user=None) if _is_this_machine(host) else host for host in hosts)
    return each_once(found, lambda host: host.is_here or host.label)


def _own_name() -> str | None:
    """Returns the name of the user; None if the system has none, as in containers that run under any uid."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _is_this_machine(host: Host) -> bool:
    if host.user is not None and host.user != _own_name():
        return False
    name = host.name.lower()
    own = socket.gethostname().lower()
    if name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}:
        return True
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an alias in the user's ssh configuration, or no name that there can be
        return False
    return any(is_own_address(str(address[0]).partition("%")[0]) for *_, address in answers)


@dataclass(frozen=True)
class Slot:
    """One worker and the host that it runs on.

    ``number`` identifies the worker during the whole job. Its ``rank`` (global), ``local_rank`` (within its host) and
    ``cross_rank`` (among hosts) are always looked up by its number. ``node`` is the number of its host.
    """

    number: int
    rank: int
    node: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: Host


def plan_slots(hosts: tuple[Host, ...], size: int | None = None) -> tuple[Slot, ...]:
    """Returns ``size`` slots, one per rank, filling the hosts in order; by default all slots of the hosts.

    When a job starts, each worker's number is its rank. Raises `UsageError` if there are too few slots.
    """
    total = sum(host.slots for host in hosts)
    if size is None:
        size = total
    if size > total:
        raise UsageError(
            f"-np {size} is more than the {total} slots of the hosts: give them more slots, as in host:{size}"
        )
    local_sizes: list[int] = []
    left = size
    for host in hosts:
        local_sizes.append(min(host.slots, left))
        left -= local_sizes[-1]
    cross_sizes = Counter(local_rank for local_size in local_sizes for local_rank in range(local_size))
    cross_ranks: Counter[int] = Counter()
    slots: list[Slot] = []
    for node, (host, local_size) in enumerate(zip(hosts, local_sizes, strict=True)):
        for local_rank in range(local_size):
            cross_rank, cross_size = cross_ranks[local_rank], cross_sizes[local_rank]
            rank = len(slots)
            slots.append(Slot(rank, rank, node, local_rank, local_size, cross_rank, cross_size, host))
            cross_ranks[local_rank] += 1
    return tuple(slots)
