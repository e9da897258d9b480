"""Runs a function in a forked child of a test."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

_LIMIT_S = 60


def in_child(function: Callable[[], Any]) -> Any:
    """Returns what the function returned in a child, which must be picklable; an AssertionError with what it raised.

    A child that hangs is killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LIMIT_S)
        told: tuple[Any, str] = (None, "")
        try:
            told = (function(), "")
        except BaseException:  # noqa: BLE001 - the test gets it
            told = (None, traceback.format_exc())
        finally:
            with os.fdopen(writer, "wb") as file:
                pickle.dump(told, file)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    status = os.waitpid(child, 0)[1]
    assert data, f"the child ended by {os.waitstatus_to_exitcode(status)}"
    result, error = pickle.loads(data)
    assert not error, f"in the child: {error}"
    return result
