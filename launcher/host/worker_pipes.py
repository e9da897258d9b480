"""The pipes of workers in the agent: their output, which is sent to the launcher, and the input that it sends.

Output that is not shown yet is in the launcher's memory, so its amount is limited. At the limit the agent stops reading
and the workers block once their pipes are full. The agent keeps sending its other messages to the launcher: a terminal
that does not accept output delays output only. A worker that does not read its input blocks nobody either: each piece
is requested from the launcher (`InputWanted`) when the worker's pipe has room for it.
"""

from __future__ import annotations

import fcntl
import os
import selectors
from collections.abc import Callable
from functools import partial
from typing import IO

from ..errors import ProtocolError
from ..protocol.channel import WINDOW_BYTES, Channel
from ..protocol.messages import Output, Stream
from .start_workers import Worker

_READ_BYTES = 1 << 16


class WorkerOutput:
    """The output pipes of all workers. What is read from them is sent as `Output` messages, split anywhere."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        self._selector = selector
        self._channel = channel
        self._forwarders: dict[int, Callable[[], object]] = {}  # by the file descriptor that each reads
        self._held_up = False
        self._room_bytes = WINDOW_BYTES

    def watch(self, worker: Worker) -> None:
        """Starts to read the output of a worker."""
        for stream, pipe in worker.pipes.items():
            forward = self._forwarders[pipe.fileno()] = partial(self._forward, worker, stream)
            os.set_blocking(pipe.fileno(), False)
            if not self._held_up:
                self._selector.register(pipe.fileno(), selectors.EVENT_READ, forward)

    def drain(self, worker: Worker) -> None:
        """Sends what a dead worker left in its pipes: at most their capacity, even if they are not at their end then.

        A child of the worker may keep the pipes open, or write to them for ever.
        """
        for stream, pipe in list(worker.pipes.items()):
            left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
            while left > 0 and (count := self._forward(worker, stream, limit=left)):
                left -= count

    def taken(self, count: int) -> None:
        """Allows ``count`` more bytes to be sent, as that many have been shown."""
        self._room_bytes += count

    def hold_up(self) -> None:
        """Stops reading while too much is unsent or not shown, else resumes.

        To be called whenever that may have changed.
        """
        if (self._channel.full or self._room_bytes <= 0) == self._held_up:
            return
        self._held_up = not self._held_up
        for fd, forward in self._forwarders.items():
            if self._held_up:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_READ, forward)

    def _forward(self, worker: Worker, stream: Stream, *, limit: int = _READ_BYTES) -> int:
        """Reads once and sends what was read; returns the number of bytes, 0 if there were none."""
        pipe = worker.pipes.get(stream)
        if pipe is None:
            return 0
        try:
            data = os.read(pipe.fileno(), limit)
        except BlockingIOError:
            return 0
        if data:
            self._room_bytes -= len(data)
            self._channel.send(Output(worker.number, stream, data))
        else:
            del worker.pipes[stream], self._forwarders[pipe.fileno()]
            if not self._held_up:
                self._selector.unregister(pipe)
            pipe.close()
        return len(data)


class WorkerStdin:
    """The input of one worker, written a piece at a time: ``ask`` is called for each, first at the start."""

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector, ask: Callable[[], None]) -> None:
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
