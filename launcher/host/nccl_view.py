"""Asks NCCL what it knows of a job that hangs: since 2.24 one process of each host serves that (RAS), on loopback.

    collect ── nccl_view ── the port at which one of this host's workers listens ──► lines of text, as NCCL has them

NCCL describes communicators and processes of the whole job, so one host's answer is enough. It is asked only where the
listening process is a worker of this job: another job's, or another user's, may have the port.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import time
from collections.abc import Collection, Mapping

# In NCCL_RAS_ADDR, unless the user has set it.
_PORT = 28028
_WITHIN_S = 1.0
_MOST_BYTES = 50_000
_LISTENS = "0A"
# In whole seconds, for what NCCL asks processes on other hosts.
_QUESTION = b"timeout 1\nverbose status\n"


def nccl_view(workers: Collection[int], environ_of: str = "/proc/%d/environ") -> tuple[int, tuple[str, ...]] | None:
    """Returns which of these processes has answered for NCCL, and its lines; None where none of them listens."""
    for pid in workers:
        if (port := _port_of(environ_of % pid)) and _listens(pid, port) and (text := _ask(port)):
            return pid, tuple(line.rstrip() for line in text.decode(errors="replace").splitlines() if line != "OK")
    return None


def _port_of(path: str) -> int:
    """Returns the port that NCCL uses in a process with this environment; 0 if it serves none."""
    variables: Mapping[bytes, bytes] = {}
    with contextlib.suppress(OSError), open(path, "rb") as file:
        pairs = (each.partition(b"=") for each in file.read().split(b"\0"))
        variables = {name: value for name, _, value in pairs}
    if variables.get(b"NCCL_RAS_ENABLE") == b"0":
        return 0
    given = variables.get(b"NCCL_RAS_ADDR", b"").rpartition(b":")[2]
    return int(given) if given.isdigit() and len(given) < 6 else _PORT


def _listens(pid: int, port: int) -> bool:
    """Whether a process listens at a port, by its descriptors and the table of its network namespace."""
    inodes = set()
    for table in (f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            rows = (line.split() for line in file)
            inodes |= {row[9] for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}
    if not inodes:
        return False
    links = set()
    for path in glob.iglob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(path))
    return any(f"socket:[{inode}]" in links for inode in inodes)


def _ask(port: int) -> bytes:
    """Returns what has come within a second."""
    answer, until = bytearray(), time.monotonic() + _WITHIN_S
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), _WITHIN_S) as connection:
        connection.sendall(_QUESTION)
        while len(answer) < _MOST_BYTES and (left_s := until - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not (data := connection.recv(1 << 16)):
                break
            answer += data
    return bytes(answer[:_MOST_BYTES])
