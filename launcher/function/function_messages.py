"""Carries a function to the workers and its results back, as bytes that nothing in between unpickles.

    caller.run ── FunctionCall ─────► function_runner ── store ──► hvdlite.worker_main, in every worker
               ◄── FunctionResults ──                 ◄── store ──

The keys are a contract with `hvdlite.worker_main`: ``call`` is what to call, ``return/RANK`` what came of it there, and
``returned`` the ranks that have left that, with a blank after each. The first two are large values, as
`hvdlite.rendezvous.store_client` sets and gets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..store.server import Store

# For each host's own Python. Not -m, which has the working directory on sys.path: it may hold a queue.py, which
# the caller does not see.
WORKER = ("-c", "import sys; sys.path[:] = filter(None, sys.path); from hvdlite.worker_main import main; main()")


@dataclass(frozen=True)
class FunctionCall:
    """What is to be called, in which directory; ``flags`` are hvdlite-run's."""

    flags: tuple[str, ...]
    cwd: str
    call: bytes


@dataclass(frozen=True)
class FunctionResults:
    """How the job ended, with ``message`` on the cause; ``rank`` is the worker that failed first, if one did.

    ``returns`` are by rank; of one that died before its function was done there is none.
    """

    exit_code: int
    message: str = ""
    rank: int | None = None
    returns: Mapping[int, bytes] = field(default_factory=dict)


def put_call(store: Store, call: bytes) -> None:
    store.put_large(b"call", call)


def take_returns(store: Store) -> dict[int, bytes]:
    ranks = (store.look(b"returned") or b"").split()
    values = {int(rank): store.look_large(b"return/" + rank) for rank in ranks}
    return {rank: value for rank, value in values.items() if value is not None}
