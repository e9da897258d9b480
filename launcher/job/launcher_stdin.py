"""Reads the launcher's standard input for rank 0, one piece each time that rank 0's pipe has room.

In an elastic job it is for worker 0, whatever its rank.

    rank 0 has room ── InputWanted ──► read a piece ── InputRead ──► sent to rank 0

`supervisor` asks for each piece. Nothing is read ahead: apart from a few pieces, input that rank 0 does not read stays
unread here too, so its writer blocks. A thread of its own reads, as a read may block for any time.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import termios
import threading
import time
from queue import SimpleQueue

from ..protocol.messages import Event, InputRead

# A frame with one piece fits in an empty pipe. The agent's is empty when it asks, so sending never blocks.
_PIECE_BYTES = 1 << 15
_BACKGROUND_S = 0.3


class Stdin:
    """Answers each `read` with one event `InputRead`; an empty one is the end of the input."""

    def __init__(self, events: SimpleQueue[Event], fd: int = 0) -> None:
        self._events = events
        self._fd = fd
        self._asked: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="stdin").start()

    def read(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        # SIGTTIN stops a background job that reads its terminal; where it is blocked, the read fails instead. Blocked
        # in this thread only, since child processes inherit the mask of the thread that starts them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        data = b"-"
        while data:
            self._asked.get()
            data = self._read()
            self._events.put(InputRead(data))

    def _read(self) -> bytes:
        while True:
            try:
                return os.read(self._fd, _PIECE_BYTES)
            except BlockingIOError:  # a process that shares the descriptor made it non-blocking
                select.select([self._fd], [], [])
            except OSError as error:
                if error.errno != errno.EIO or not self._in_background():
                    return b""  # it cannot be read any more
                time.sleep(_BACKGROUND_S)  # nothing notifies us when the job is in the foreground again

    def _in_background(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) != os.getpgrp()
        except OSError:
            return False


def echoes(fd: int = 0) -> bool:
    """Whether ``fd`` is a terminal that shows what is typed."""
    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False
