"""Reads the workers' stdout and stderr in the agent, and sends on as much as the launcher has shown.

What it has not shown is in the launcher's memory, so there is a limit to that; beyond it the workers' pipes are left
to fill. The wire itself never is: a screen that stands still holds up output, and nothing else.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from functools import partial

from ..wire.agent_frames import WINDOW_BYTES
from ..wire.channel import Channel
from ..wire.messages import Output, Stream
from .start_workers import Worker, capacity_bytes

_READ_BYTES = 1 << 16


class WorkerOutput:
    """All pipes that workers write to. What is read becomes an `Output`, cut anywhere."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        """``selector`` calls back, without arguments, what is registered with it."""
        self._selector = selector
        self._channel = channel
        self._forwarders: dict[int, Callable[[], object]] = {}  # by the file descriptor that they read
        self._held_up = False
        self._room_bytes = WINDOW_BYTES

    def watch(self, worker: Worker) -> None:
        for stream, pipe in worker.pipes.items():
            forward = self._forwarders[pipe.fileno()] = partial(self._forward, worker, stream)
            os.set_blocking(pipe.fileno(), False)
            if not self._held_up:
                self._selector.register(pipe.fileno(), selectors.EVENT_READ, forward)

    def drain(self, worker: Worker) -> None:
        """Pass on all that a dead worker wrote, which is what its pipes can hold.

        Not what comes until their end: a child of the worker's may keep them open, or write for ever.
        """
        for stream, pipe in list(worker.pipes.items()):
            left = capacity_bytes(pipe)
            while left > 0 and (count := self._forward(worker, stream, limit=left)):
                left -= count

    def taken(self, count: int) -> None:
        """So many bytes have been shown."""
        self._room_bytes += count

    def hold_up(self) -> None:
        """While too much is unsent or not shown, read nothing more; to be called whenever that may have changed."""
        if (self._channel.full or self._room_bytes <= 0) == self._held_up:
            return
        self._held_up = not self._held_up
        for fd, forward in self._forwarders.items():
            if self._held_up:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_READ, forward)

    def _forward(self, worker: Worker, stream: Stream, *, limit: int = _READ_BYTES) -> int:
        """Pass on what the worker wrote; the number of bytes, 0 if nothing was there."""
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
