"""
Opens the store that rank 0 serves at MASTER_ADDR and MASTER_PORT, and explains why ranks cannot connect there.

`runtime.connect_ranks` calls `store_at_given_address`, which calls `torch.distributed.rendezvous`.
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

_SLACK_S = 2.0  # PyTorch's own timeout ends first: its error says more
_WARN_AFTER_S = 30.0


def store_at_given_address(
    process: ProcessState, rank: int, size: int, address: str, port: str, timeout: timedelta
) -> Store:
    """Returns the store at ``address`` and ``port``; rank 0 serves it. Every rank must call it, and waits for rank 0.

    ``process`` keeps the store for later calls of `init`: else a rank could connect to a server that is just closing.
    Rank 0 keeps its server even if the number of ranks changes; another rank then connects anew, because another
    process may serve there now. Raises a `CommunicationError` with the cause if the ranks have not connected within the
    timeout.
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
    """Opens PyTorch's store in a thread: a program that listens there and does not answer would block for ever."""
    found: Future[Store] = Future()

    def look() -> None:
        try:
            store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
            found.set_exception(error)
        else:
            found.set_result(store)

    threading.Thread(target=look, name="hvdlite-store", daemon=True).start()
    limit_s = timeout.total_seconds() + _SLACK_S
    if limit_s > _WARN_AFTER_S:
        with contextlib.suppress(FutureTimeoutError):
            return found.result(_WARN_AFTER_S)
        log.warning(
            "rank %d has waited %g s in hvd.init() for %s at MASTER_ADDR=%r, MASTER_PORT=%s, and gives up after %g s "
            "(hvd.init(timeout_s=...)): look at the output of the other ranks",
            *(rank, _WARN_AFTER_S, "the other ranks" if rank == 0 else "rank 0", address, port, limit_s),
        )
        limit_s -= _WARN_AFTER_S
    try:
        return found.result(limit_s)
    except FutureTimeoutError:
        raise RuntimeError("the program that listens there has not answered") from None


def _why(rank: int, size: int, host: str, address: str, port: str, words: str, waited_s: float) -> str:
    if "address already in use" in words:
        return (
            f"port {port} on {host} is taken by another process (address already in use): set MASTER_PORT to a free "
            "port, the same for every rank"
        )
    if "permission denied" in words:
        return f"port {port} on {host} cannot be opened by this user: set MASTER_PORT to 1024 or higher"
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return (
            f"MASTER_ADDR={address!r} cannot be resolved on {host} ({error.strerror}): set it to a name or an address "
            "of rank 0's host, for every rank"
        )
    if rank == 0:
        if not any(map(_is_own, found)):
            return (
                f"MASTER_ADDR={address!r} is not an address of {host}, where rank 0 runs: set it to one, for every rank"
            )
        return (
            f"not all of the {size} ranks connected to MASTER_ADDR={address!r}, MASTER_PORT={port} within {waited_s:g} "
            "s: the others did not call hvd.init() (look at their output), have another address, port or WORLD_SIZE, "
            "or are behind a firewall"
        )
    return (
        f"rank 0 was not found at MASTER_ADDR={address!r}, MASTER_PORT={port} within {waited_s:g} s: it did not call "
        "hvd.init(), could not listen there because another process does (look at its output), runs on another host, "
        "or is behind a firewall"
    )


def _is_own(address: str) -> bool:
    """Whether this host could listen at the address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
