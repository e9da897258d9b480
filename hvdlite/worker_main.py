"""
The main program of a worker of `hvdlite_launcher.run`: calls the function that `run` was given.

    store: call ── unpickle ── func(*args, **kwargs) ── pickle ── store: return/RANK, and that it is there

Values are pickled by cloudpickle, since they may be of classes that the caller's main program defines. The keys,
and what lies under them, are a contract with `hvdlite_launcher`: `function_messages` carries them, `caller` reads them.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Mapping

from .environment import told_by_launcher
from .rendezvous.store_client import StoreClient, StoreCommand


def main(environ: Mapping[str, str] = os.environ) -> None:
    """Call it, once. What it raises has been told when it leaves here; sys.exit() in it is an end as any other."""
    client = StoreClient.from_url(told_by_launcher("STORE", environ))
    path, call = pickle.loads(client.get_large(b"call"))
    # As in the caller, whose modules are sent by name; where these do not exist it has no effect.
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    try:
        func, args, kwargs = pickle.loads(call)
        value = _pickled(func(*args, **kwargs), "what the function returned")
    except Exception as error:
        _tell(client, environ, {"value": None, **_told_of(error)})
        # The traceback is on its way to who called us, and the interpreter still knows of the exception: all else
        # goes on as in any program that fails.
        sys.excepthook = lambda *_: None
        raise
    _tell(client, environ, {"value": value})


def _pickled(value: object, what: str) -> bytes:
    # Imported now, as it may be seen on the caller's path alone.
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise pickle.PicklingError(f"{what} cannot be pickled, to be sent back: {error}") from error
    return data


def _told_of(error: Exception) -> dict[str, object]:
    try:
        pickled = _pickled(error, "the exception")
    except pickle.PicklingError:
        pickled = None  # its text has to do
    own_frame = error.__traceback__
    below = own_frame.tb_next if own_frame is not None else None
    return {
        "error": pickled,
        "summary": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, below)),
    }


def _tell(client: StoreClient, environ: Mapping[str, str], what: Mapping[str, object]) -> None:
    rank = told_by_launcher("RANK", environ).encode()
    told = {"host": told_by_launcher("HOST", environ), "size": int(told_by_launcher("SIZE", environ)), **what}
    client.set_large(b"return/" + rank, pickle.dumps(told))
    client.request(StoreCommand.APPEND, [b"returned", rank + b" "])
