"""
`Work`, a collective in progress, and `CollectiveWatch`, which records the collectives that this rank has begun.

`group` makes each `Work`; `calls.generation` has the world's one watch. The controller (`control`) reads the watch to
report what this rank waits for, and writes to it which rank has ended first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CommunicationError, MismatchError, describe_interrupt, list_names
from .ends import Ends
from .engine import EngineWork, KnowsWhoBegan
from .step_clock import StepClock

# One collective: the group's label, its number in the group, and the global ranks that take part.
CollectiveId = tuple[str, int, tuple[int, ...]]

# How long to wait for the controller's message about an end, which may arrive a little after the engine's error.
_WORD_S = 3.0


class CollectiveWatch:
    """Records the collectives that this rank has begun, the waits of its threads, and the first rank that ended.

    There is one per generation of the world. All groups of the world record their collectives in it. The controller
    reports these to rank 0, and records here which other rank has ended.
    """

    def __init__(self, ends: Ends | None = None) -> None:
        """``ends`` ends waits for ranks that cannot come; by default it is a new one."""
        self.ends = Ends() if ends is None else ends
        # By thread ident: the collective's name, when the wait began (`time.monotonic`), and its id. Each thread writes
        # only its own entry, since this is on the path of every bucket.
        self.waits: dict[int, tuple[str, float, CollectiveId | None]] = {}
        # By group label, the number of its collectives that this rank has begun; and the idents of the threads that
        # began them.
        self.begun: dict[str, int] = {}
        self.beginners: set[int] = set()
        # When the oldest wait for other ranks began (`time.monotonic`), in a collective or for one to begin; None if
        # there is none. The controller looks twice a second.
        self.waits_since_s: float | None = None
        # Measures the phases of this rank's steps, and these waits as one of them.
        self.clock = StepClock()
        # Ident of the controller's thread that receives reports of other ranks' ends, if there is one.
        self.listening_thread: int | None = None
        # Reports to the other ranks that this rank has lost another one, and may fail because of it.
        self.say_lost: Callable[[], None] = lambda: None
        self._heard = threading.Event()
        self._first_end: tuple[int, bool] | None = None

    def blocked(self) -> dict[int, tuple[str, float, CollectiveId | None]]:
        """Returns, by thread ident, the name of the collective it is blocked in, the wait's start, and its id."""
        # dict.copy is atomic, while other threads change the dict.
        return self.waits.copy()

    def record_first_end(self, rank: int, ended_normally: bool) -> None:
        """Record that global ``rank`` was the first to end: normally, or by a crash or a lost connection.

        Later calls count for waits in the store alone.
        """
        if self._first_end is None:
            self._first_end = (rank, ended_normally)
        self._heard.set()
        self.ends.record_end(rank, ended_normally)

    def record_unknown_end(self) -> None:
        """Record that the first rank to end cannot be known any more."""
        self._heard.set()

    @property
    def known_end(self) -> tuple[int, bool] | None:
        """The first rank to end and its ``ended_normally`` (see `record_first_end`), or None if none is known now."""
        return self._first_end

    def first_end(self) -> tuple[int, bool] | None:
        """Returns `known_end`, after waiting up to 3 s for the controller's message, if there is a controller's thread.

        A rank calls it when it has lost another.
        """
        # Report it before this rank closes anything, so that no other rank takes this rank's end for the first one.
        self.say_lost()
        if self.listening_thread not in (None, threading.get_ident()):
            self._heard.wait(_WORD_S)
        return self._first_end


@dataclass(eq=False)
class Work:
    """A collective in progress. `wait` blocks until its tensors may be read, or raises its error.

    ``_what`` and ``_collective`` name the collective for messages and for the watch. ``_error_of(what, error)``
    converts the engine's error to hvdlite's. ``_describe_rank`` names a rank of the group in messages.
    """

    _work: EngineWork
    _what: str
    _watch: CollectiveWatch
    _error_of: Callable[[str, BaseException], CommunicationError]
    _collective: CollectiveId | None = None
    _describe_rank: Callable[[int], str] = str

    def wait(self) -> None:
        """Block until done; on a GPU the current stream waits, and not the host."""
        waits, own = self._watch.waits, threading.get_ident()
        waits[own] = (self._what, time.monotonic(), self._collective)
        is_timed = self._watch.clock.begin_wait()
        try:
            self._work.wait()
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                # PyTorch's signal handler raises it wherever the program happens to be.
                raise
            if isinstance(error, MismatchError):
                # The engine's message is already complete.
                raise
            told = self._error_of(self._what, error)
            if told is error:
                raise
            raise told from error
        except KeyboardInterrupt as interrupt:
            describe_interrupt(interrupt, self._what, self.waits_for())
            raise
        finally:
            del waits[own]
            if is_timed:
                self._watch.clock.end_wait()

    def waits_for(self) -> str:
        """Describes the ranks that have not begun it; empty where the engine does not know. It does not communicate."""
        ranks = self._work.not_begun() if isinstance(self._work, KnowsWhoBegan) else []
        return list_names([self._describe_rank(rank) for rank in ranks], len(ranks))

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it is done or has failed, on a thread of the engine; at once if it is done already.

        With NCCL the callback runs at once in any case, on a current stream that waits for the collective.
        """
        self._work.get_future().add_done_callback(lambda _: callback())
