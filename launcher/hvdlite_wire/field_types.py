"""
The types of messages' fields, with what is allowed for each. Numbers have limits, since one that is too large would
only fail later, in code that does not handle it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from .codec import Between


def _plain(text: str) -> str:
    """Refuses zeros and lone surrogates, unless these stand for bytes that are not UTF-8."""
    if "\0" in text:
        raise ValueError("it has a zero")
    text.encode(errors="surrogateescape")
    return text


def _address(text: str) -> str:
    return str(ipaddress.ip_address(text))


Text = Annotated[str, _plain]
Address = Annotated[str, _address]
WorkerNumber = Annotated[int, Between(0, 10**6)]
Count = Annotated[int, Between(0, 10**9)]
Bytes = Annotated[int, Between(0, 1 << 60)]
Pid = Annotated[int, Between(1, 2**31 - 1)]
Seconds = Annotated[float, Between(0, 10**6)]


@dataclass(frozen=True)
class HostLinks:
    """A worker's own addresses on connections to other hosts, and how long nothing has come from other addresses."""

    addresses: tuple[Address, ...] = ()
    silent_s: Mapping[Address, Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusals:
    """A worker's own addresses for connections to other hosts, and those that have refused one, if known."""

    addresses: tuple[Address, ...]
    refused_by: tuple[Address, ...]
