"""
The store at MASTER_ADDR and MASTER_PORT, where rank 0 listens, and what is wrong if the ranks do not meet there.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ..errors import CommunicationError
from ..log import log
from .process_state import ProcessState

# PyTorch's own timeout is to be the first to end, since it says more.
_SLACK_S = 2.0

# How long the ranks may take to meet before that is told of.
_WARN_AFTER_S = 30.0


def store_at_given_address(
    process: ProcessState, rank: int, size: int, address: str, port: str, timeout: timedelta
) -> Store:
    """Of both variables' values. ``process`` keeps it: at a later init() a rank could find one that is just closing.

    So rank 0 serves the same one however many ranks there are. Another rank connects anew where it has become another
    one, or one of more or fewer: another process may serve there now.

    A `CommunicationError` when the ranks have not met within the timeout, whatever holds them up.
    """
    host = socket.gethostname()
    key = (address, port) if rank == 0 else (address, port, rank, size)
    try:
        return process.keep("store", key, lambda: _meet(rank, size, address, port, timeout))
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        why = _why(rank, size, host, address, port, words, timeout.total_seconds())
        raise CommunicationError(f"hvd.init() failed on rank {rank} ({host}): {why}. ({words})") from error


def _meet(rank: int, size: int, address: str, port: str, timeout: timedelta) -> Store:
    """The store, by PyTorch, in a thread: it waits for ever for a stranger at that port who does not answer."""
    found: Future[Store] = Future()

    def look() -> None:
        try:
            store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        except BaseException as error:  # noqa: BLE001  # raised by who waits for it
            found.set_exception(error)
        else:
            found.set_result(store)

    threading.Thread(target=look, name="hvdlite-store", daemon=True).start()
    limit_s = timeout.total_seconds() + _SLACK_S
    if limit_s > _WARN_AFTER_S:
        with contextlib.suppress(FutureTimeoutError):
            return found.result(_WARN_AFTER_S)
        log.warning(
            "rank %d has waited %g s in hvd.init() for %s at MASTER_ADDR=%r, MASTER_PORT=%s, and does so until %g s "
            "are over (hvd.init(timeout_s=...)): look at the output of the other ranks",
            *(rank, _WARN_AFTER_S, "the other ranks" if rank == 0 else "rank 0", address, port, limit_s),
        )
        limit_s -= _WARN_AFTER_S
    try:
        return found.result(limit_s)
    except FutureTimeoutError:
        raise RuntimeError("what listens there has not answered") from None


def _why(rank: int, size: int, host: str, address: str, port: str, words: str, waited_s: float) -> str:
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
    if rank == 0:
        if not any(map(_is_own, found)):
            return f"MASTER_ADDR={address!r} is no address of {host}, where rank 0 is: set it to one, for every rank"
        return (
            f"not all of the {size} ranks came to MASTER_ADDR={address!r}, MASTER_PORT={port} within {waited_s:g} s: "
            "the others did not call hvd.init() (look at their output), have another address, port or WORLD_SIZE, or a "
            "firewall is between"
        )
    return (
        f"rank 0 was not found at MASTER_ADDR={address!r}, MASTER_PORT={port} within {waited_s:g} s: it did not call "
        "hvd.init(), could not listen there since another process does (look at its output), or runs on another host, "
        "or a firewall is between"
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
