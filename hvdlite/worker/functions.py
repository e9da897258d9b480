"""
The public function `run`, and the main program of the workers that it starts through `hvdlite_launcher.run`.

    store: "call" ── unpickle ── func(*args, **kwargs) ── pickle ── store: "return/WORKER"; append WORKER to "returned"

WORKER is the worker's number. With the value goes its rank, which it has in an elastic job only once it called `init`.

Return values are pickled by cloudpickle, since they may be of classes that the caller's main program defines. The store
keys and their values are a contract with `hvdlite_launcher`: `function_runner` transports them, `caller` reads them.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite_wire.job_contract import HOST, RANK, SIZE, STORE, WORKER
from hvdlite_wire.store_requests import StoreRequest

from ..errors import words_of
from ..rendezvous.launchers import read_elastic_worker
from ..rendezvous.store_client import StoreClient
from ..runtime.world import last_assignment

Returned = TypeVar("Returned")


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    **flags: Any,
) -> list[Returned]:
    """Call ``func(*args, **kwargs)`` in ``np`` new workers, and return its return values in the order of the ranks.

    It takes the arguments of `hvdlite_launcher.run`: ``hosts``, ``hostfile``, ``environment`` and all flags of
    hvdlite-run. ``func`` must call `init` if the workers are to communicate. The calling process is not one of the
    workers and need not call `init`.
    """
    # The library's only import of the launcher. mypy sees it under the name of its directory, `launcher`.
    import hvdlite_launcher  # type: ignore[import-not-found]  # noqa: PLC0415

    returned: list[Returned] = hvdlite_launcher.run(func, args, kwargs, np=np, **flags)
    return returned


def main(environ: Mapping[str, str] = os.environ) -> None:
    """Calls the function once and stores its return value, or the exception that it raised, for the caller of `run`.

    An exception is raised again once it is stored. sys.exit() in the function ends the worker and stores nothing.
    """
    own_pid = os.getpid()
    client = StoreClient.from_url(environ.get(STORE, ""))
    path, call = pickle.loads(client.get_large(b"call"))
    # The caller's path, because functions of its modules are pickled by name. Missing directories have no effect.
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    try:
        func, args, kwargs = pickle.loads(call)
        value = _pickled(func(*args, **kwargs), "what the function returned")
    except Exception as error:
        if os.getpid() != own_pid:  # in a process that the function has forked
            raise
        _tell(client, environ, {"value": None, **_told_of(error)})
        # The caller of `run` gets the traceback, so this process does not print it. It still ends by the exception,
        # because exit handlers look at it.
        sys.excepthook = lambda *_: None
        raise
    if os.getpid() == own_pid:
        _tell(client, environ, {"value": value})


def _pickled(value: object, what: str) -> bytes:
    # Imported now: it may be installed only on the caller's path, which has been set by now.
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise pickle.PicklingError(f"{what} cannot be pickled, to be sent back: {words_of(error)}") from error
    return data


def _told_of(error: Exception) -> dict[str, object]:
    try:
        pickled = _pickled(error, "the exception")
    except pickle.PicklingError:
        pickled = None  # the caller shows its text
    own_frame = error.__traceback__
    below = own_frame.tb_next if own_frame is not None else None
    return {
        "error": pickled,
        "summary": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, below)),
    }


def _tell(client: StoreClient, environ: Mapping[str, str], what: Mapping[str, object]) -> None:
    worker = environ.get(WORKER, "").encode()
    told = {"host": environ.get(HOST, ""), **_place(environ), **what}
    client.set_large(b"return/" + worker, pickle.dumps(told))
    client.request(StoreRequest.APPEND, [b"returned", worker + b" "])


def _place(environ: Mapping[str, str]) -> dict[str, int | None]:
    """Returns this worker's rank and size; in an elastic job those of its last world, and which one that was."""
    if read_elastic_worker(environ) is None:
        rank, size = (int(environ.get(name, "")) for name in (RANK, SIZE))
        return {"generation": None, "rank": rank, "size": size}
    assignment = last_assignment()
    if assignment is None:
        return {"generation": 0, "rank": None, "size": None}
    return {"generation": assignment.generation, "rank": assignment.rank, "size": assignment.size}
