"""
Sends the readings of this rank's step clock to rank 0, and looks whether the program is in forward or elsewhere.

    the program's stack ── inside a module with parameters? ── counts of the clock
    the clock's readings ── `PaceReading`, to rank 0 ── `Paces`, from rank 0: what `hvd.stragglers` returns

`control_client` owns it. The program's thread does none of this. A hook on the model would tell more exactly when
forward begins, but it would be copied, pickled and compiled with the model.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from types import CodeType, FrameType

from torch import nn

from ..calls.call_sites import FramesOfThreads, outwards
from ..calls.messages import PaceReading
from ..comm.step_clock import Phase, RankPace
from .rank0_connection import Rank0Connection

# The average interval between looks at the program.
_LOOK_S = 0.025

# The interval between readings, in jobs of few ranks. Rank 0 can take this many readings a second from all ranks.
_READING_S = 1.0
_READINGS_PER_S = 50

_CALL: CodeType = nn.Module._call_impl.__code__


class PaceReports:
    """A thread that looks at the program and sends the clock's readings, from `start` to `close`."""

    def __init__(self, connection: Rank0Connection) -> None:
        self._connection = connection
        self._clock = connection.watch.clock
        self._interval_s = max(_READING_S, connection.group.size / _READINGS_PER_S)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-pace", daemon=True)
        self.paces: tuple[RankPace, ...] = ()
        """Those of all ranks, as rank 0 has sent them last."""

    def start(self) -> None:
        self._clock.turn_on(self._interval_s)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. It may be called without `start`, and more than once."""
        self._clock.is_on = False
        self._is_closed.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # At random times, since regular ones could meet each step in the same phase.
        dice = random.Random()
        while not self._is_closed.wait(_LOOK_S * dice.uniform(0.5, 1.5)):
            self.look()

    def look(self) -> None:
        """Counts where the program is, and sends the readings that the clock has made."""
        clock = self._clock
        if clock.phase is Phase.LOAD and clock.thread is not None and clock.tells_forward:
            with FramesOfThreads() as frames:
                frame = frames.get(clock.thread)
                # Only now: meanwhile the phase may have ended.
                if frame is not None and clock.phase is Phase.LOAD:
                    if is_in_model(frame):
                        clock.in_forward += 1
                    else:
                        clock.elsewhere += 1
            # Frames that are kept here would keep the program's tensors.
            del frame, frames
        while clock.readings:
            reading = clock.readings.popleft()
            self._connection.send(
                PaceReading(replace(reading, seconds=tuple(round(each, 7) for each in reading.seconds)))
            )


def is_in_model(frame: FrameType) -> bool:
    """Whether this frame is in a call of a module with parameters: a data transform is a module without any."""
    outermost: FrameType | None = None
    for each in outwards(frame):
        if each.f_code is _CALL:
            outermost = each
    module = None if outermost is None else outermost.f_locals.get("self")
    if not isinstance(module, nn.Module):
        return False
    try:
        # Not the module's own method, which may return something else, or do anything, on this thread.
        return next(nn.Module.named_parameters(module), None) is not None
    except RuntimeError:  # the program adds modules or parameters just now
        return True
