"""Reads the launcher's standard input for rank 0, one piece each time that rank 0 has taken the one before.

    rank 0 has room ── InputWanted ──► read a piece ── InputRead ──► sent on to rank 0

Nothing is read ahead: what rank 0 does not read stays, but for a few pieces, with whoever writes it. A thread of
its own reads, since nobody knows when something comes.
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

from ..wire.messages import Event, InputRead

# A frame of it fits in an empty pipe, which the agent's is when it asks: passing it on waits for nobody.
_PIECE_BYTES = 1 << 15
_BACKGROUND_S = 0.3


class Stdin:
    """Each `read` is answered by one `InputRead`; an empty one is the end."""

    def __init__(self, events: SimpleQueue[Event], fd: int = 0) -> None:
        self._events = events
        self._fd = fd
        self._asked: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="stdin").start()

    def read(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        # A job in the background of a shell that reads its terminal is stopped by this signal. Where it is blocked
        # the read fails instead. In this thread alone: what is ignored or blocked elsewhere, children inherit.
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
            except BlockingIOError:  # whoever shares it with us made it so
                select.select([self._fd], [], [])
            except OSError as error:
                if error.errno != errno.EIO or not self._in_background():
                    return b""  # nothing will ever come from there
                time.sleep(_BACKGROUND_S)  # no event tells of being in the foreground again

    def _in_background(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) != os.getpgrp()
        except OSError:
            return False


def echoes(fd: int = 0) -> bool:
    """Whether what is typed there is seen as it is typed: it is a terminal, and shows it."""
    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False
