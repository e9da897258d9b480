"""Writes a worker's standard input in the agent, without ever waiting for the worker to read it."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import IO

from ..errors import ProtocolError


class WorkerStdin:
    """One piece at a time: ``ask`` is called when there is room for the next, at first at once."""

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector, ask: Callable[[], None]) -> None:
        """``selector`` calls back, without arguments, what is registered with it."""
        self._pipe = pipe
        self._selector = selector
        self._ask = ask
        self._rest = memoryview(b"")
        os.set_blocking(pipe.fileno(), False)
        ask()

    def put(self, data: bytes) -> None:
        """The next piece; an empty one is the end."""
        if self._rest:
            raise ProtocolError("the launcher sent more input than was asked for")
        if self._pipe.closed:
            return
        if not data:
            self.close()
            return
        self._rest = memoryview(data)
        self._write()

    def close(self) -> None:
        """The worker finds the end there, if it still reads; nothing more is asked for."""
        self._rest = memoryview(b"")
        if not self._pipe.closed:
            self._wait(False)
            self._pipe.close()

    def _write(self) -> None:
        if self._pipe.closed:  # since the selector saw room in it
            return
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
        except BlockingIOError:
            self._wait(True)
        except OSError:  # nobody reads it any more
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
