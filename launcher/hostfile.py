"""A file of hosts, one in a line, as Horovod, OpenMPI and MPICH write it:

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

import re

from .errors import UsageError
from .hosts import Host, each_once, parse_host, parse_slots
from .userfile import name_file, read_user_file

_EXAMPLE = "such as: node1 slots=4"
_MAX_BYTES = 1 << 20

_FIELD = re.compile(r"(?:(slots)=([0-9]+|auto)|(max)[-_]slots=([0-9]+))", re.ASCII)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of the file; whatever is wrong with it is a `UsageError` that names it."""
    try:
        return parse_hostfile(_read(path))
    except UsageError as error:
        raise UsageError(f"{name_file('--hostfile', path)}{error}") from None


def _read(path: str) -> str:
    data = read_user_file(path, max_bytes=_MAX_BYTES, what="a hostfile")
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
        raise UsageError(f": no host in it; a line is a host, {_EXAMPLE}")
    return hosts


def _parse_line(words: str) -> Host:
    first, *rest = re.sub(r"\s*=\s*", "=", words).split()
    host = parse_host(first)
    fields: dict[str, int] = {}
    for word in rest:
        match = _FIELD.fullmatch(word)
        if match is None:
            raise UsageError(f"{word!r} is not slots=N; a line is a host, {_EXAMPLE}")
        name, value = (group for group in match.groups() if group)
        if name in fields or (name == "slots" and ":" in first.rpartition("]")[2]):
            raise UsageError(f"{words!r} says twice how many slots; once is right, {_EXAMPLE}")
        fields[name] = parse_slots(value, word)
    slots = fields.get("slots", host.slots)
    if slots > fields.get("max", slots):
        raise UsageError(f"{words!r} has more slots than its max-slots")
    return Host(host.name, slots, host.user)
