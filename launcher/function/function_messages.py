"""The messages that carry a function to the workers and its results back, as bytes that only the two ends unpickle.

    caller.run ── FunctionCall ─────► function_runner ── store ──► hvdlite.worker.worker_main, in every worker
               ◄── FunctionResults ──                 ◄── store ──

The keys in the store are a contract with `hvdlite.worker.worker_main`. ``call`` is the pickled call, ``return/WORKER``
is the result of the worker with this number, and ``returned`` lists those with a result, each followed by a blank. The
first two are large values, as `hvdlite.rendezvous.store_client` sets and gets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..store.server import Store

# Arguments for each host's own Python. Not -m, which puts the working directory on sys.path: it may contain a queue.py,
# and it need not be on the caller's sys.path.
WORKER = ("-c", "import sys; sys.path[:] = filter(None, sys.path); from hvdlite.worker.worker_main import main; main()")


@dataclass(frozen=True)
class FunctionCall:
    """A function call in a working directory; ``flags`` are hvdlite-run's."""

    flags: tuple[str, ...]
    cwd: str
    call: bytes


@dataclass(frozen=True)
class FunctionResults:
    """The end of the job, with a ``message`` about the cause; ``rank`` is the worker that failed first, if one did.

    ``returns`` has a result by worker, except for those that died before the function was done.
    """

    exit_code: int
    message: str = ""
    rank: int | None = None
    returns: Mapping[int, bytes] = field(default_factory=dict)


def put_call(store: Store, call: bytes) -> None:
    """Sets the pickled call in the store, for the workers."""
    store.put_large(b"call", call)


def take_returns(store: Store) -> dict[int, bytes]:
    """Returns the pickled results that are in the store, by the worker's number."""
    workers = (store.get(b"returned") or b"").split()
    values = {int(worker): store.get_large(b"return/" + worker) for worker in workers}
    return {worker: value for worker, value in values.items() if value is not None}
