"""The TCP ports on which this process listens, and whether one lets anybody in."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def listening_ports() -> dict[int, str]:
    """Returns the TCP ports on which this process listens, with the addresses."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has just closed it
            own.add(os.readlink(entry))
    found = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = [*line.split()[:4], line.split()[9]]
        if state == "0A" and f"socket:[{inode}]" in own:
            address, _, port = local.partition(":")
            found[int(port, 16)] = socket.inet_ntoa(bytes.fromhex(address)[::-1])
    return found


def lets_in(port: int, within_s: float = 0.5) -> bool:
    """Whether the system accepts a connection; ``within_s`` is generous where it must."""
    with socket.socket() as stranger:
        stranger.settimeout(within_s)
        return stranger.connect_ex(("127.0.0.1", port)) == 0
