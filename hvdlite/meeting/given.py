"""
The store at MASTER_ADDR and MASTER_PORT, where rank 0 listens, and what is wrong if the ranks do not meet there.
"""

from __future__ import annotations

import errno
import functools
import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ..errors import CommunicationError


@functools.cache
def store_at_given_address(rank: int, size: int, address: str, port: str, timeout: timedelta) -> Store:
    """Of both variables' values. Kept: at a later init() a rank could find one that is just closing."""
    try:
        found: tuple[Store, int, int] = next(rendezvous("env://", rank, size, timeout=timeout))
    except RuntimeError as error:
        host, words = socket.gethostname(), str(error).strip().partition("\n")[0]
        why = _why(rank, host, address, port, words, timeout.total_seconds())
        raise CommunicationError(f"hvd.init() failed on rank {rank} ({host}): {why}. ({words})") from error
    return found[0]


def _why(rank: int, host: str, address: str, port: str, words: str, waited_s: float) -> str:
    """What is the matter, and what to do; ``words`` are PyTorch's."""
    if "address already in use" in words:
        return (
            f"port {port} on {host} is taken by another process (address already in use): set MASTER_PORT to a free "
            "port, the same for every rank"
        )
    if "permission denied" in words:
        return f"port {port} on {host} may not be opened by this user: set MASTER_PORT to one from 1024 on"
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return (
            f"MASTER_ADDR={address!r} is not known on {host} ({error.strerror}): set it to a name or an address of "
            "rank 0's host, for every rank"
        )
    if rank == 0 and not any(map(_is_own, found)):
        return f"MASTER_ADDR={address!r} is no address of {host}, where rank 0 is: set it to one, for every rank"
    return (
        f"rank 0 was not found at MASTER_ADDR={address!r}, MASTER_PORT={port} within {waited_s:g} s: it did not call "
        "hvd.init(), could not listen there (look at its output), or runs on another host, or a firewall is between"
    )


def _is_own(address: object) -> bool:
    """Whether this host could listen there."""
    text = str(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in text else socket.AF_INET) as probe:
            probe.bind((text, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
