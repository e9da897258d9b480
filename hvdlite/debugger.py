"""`wait_for_debugger`: has one rank wait until a debugger is connected, as ``hvdlite-run --debug-rank`` asks for."""

from __future__ import annotations

import socket
import sys

from .errors import LaunchEnvironmentError

# What debuggers suggest. Another rank of this host, or another job, may have it.
_PORT = 5678


def wait_for_debugger(debugged: int, rank: int, size: int) -> None:
    """If this rank is the ``debugged`` one, says where it waits for a debugger, and returns once one is connected.

    Raises ValueError on all ranks if there is no such rank, and LaunchEnvironmentError where debugpy is missing.
    """
    if debugged >= size:
        raise ValueError(
            f"HVDLITE_DEBUG_RANK={debugged} (--debug-rank): the ranks are 0 to {size - 1}; name one of them"
        )
    if rank != debugged:
        return
    try:
        import debugpy  # noqa: PLC0415  # only where somebody debugs
    except ImportError:
        raise LaunchEnvironmentError(
            f"rank {rank} is to be debugged (--debug-rank, HVDLITE_DEBUG_RANK), and debugpy is not installed for "
            f"{sys.executable}: pip install debugpy"
        ) from None
    if debugpy.is_client_connected():
        return
    address, port = debugpy.listen(("127.0.0.1", _PORT if _is_free(_PORT) else 0))
    print(
        f"rank {rank} on {socket.gethostname()} waits for a debugger at {address}:{port} (debugpy). The others wait "
        "for it, without limit",
        file=sys.stderr,
        flush=True,
    )
    debugpy.wait_for_client()


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
