"""Writes a worker's standard input in the agent, without blocking while the worker does not read it.

`agent` makes one for each worker that has an input. It requests each piece from the launcher (`InputWanted`) when the
worker's pipe has room for it."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import IO

from ..errors import ProtocolError


class WorkerStdin:
    """Writes one piece of input at a time, and calls ``ask`` when the pipe has accepted it: also once at the start."""

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector, ask: Callable[[], None]) -> None:
        """``selector``: the data of each registration is a function without arguments, which the event loop calls."""
        self._pipe = pipe
        self._selector = selector
        self._ask = ask
        self._rest = memoryview(b"")
        os.set_blocking(pipe.fileno(), False)
        ask()

    def put(self, data: bytes) -> None:
        """Writes the next piece; an empty one is the end of the input."""
        if self._rest:
            raise ProtocolError("the launcher sent more input than was requested")
        if self._pipe.closed:
            return
        if not data:
            self.close()
            return
        self._rest = memoryview(data)
        self._write()

    def close(self) -> None:
        """Closes the pipe, so that the worker reads the end of its input. ``ask`` is not called again."""
        self._rest = memoryview(b"")
        if not self._pipe.closed:
            self._wait(False)
            self._pipe.close()

    def _write(self) -> None:
        if self._pipe.closed:  # the selector may still report a pipe that was closed in the same round
            return
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
        except BlockingIOError:
            self._wait(True)
        except OSError:  # the worker no longer reads it
            self.close()
        else:
            self._wait(False)
            self._ask()

    def _wait(self, for_room: bool) -> None:
        waits = self._pipe in self._selector.get_map()
        if for_room and not waits:
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write)
        elif waits and not for_room:
            self._selector.unregister(self._pipe)
