"""Reads the workers' stdout and stderr in the agent and sends them to the launcher, which shows them.

Output that is not shown yet is in the launcher's memory, so its amount is limited. At the limit the agent stops reading
and the workers block once their pipes are full. The agent keeps sending its other messages to the launcher: a terminal
that does not accept output delays output only.
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
    """The output pipes of all workers. What is read from them is sent as `Output` messages, split anywhere."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        """``selector``: the data of each registration is a function without arguments, which the event loop calls."""
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
            left = capacity_bytes(pipe)
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
