"""
`Work`: a collective under way. `Watch`: a record of the collective that each thread of this process waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import CommunicationError, MismatchError, say_where
from .engine import EngineWork

# One collective among those of a group: the group's label, its number there, and the global ranks that take part.
CollectiveId = tuple[str, int, tuple[int, ...]]

# An engine may know that a rank has gone a little earlier than who tells which.
_WORD_S = 3.0


class Watch:
    """Records the collective that each thread is blocked in, and the first rank known to have ended."""

    def __init__(self) -> None:
        # By thread, by its ident: an engine's collective, since when (`time.monotonic`), and which it is. Each thread
        # writes its own entry, on the way of every bucket.
        self.waits: dict[int, tuple[str, float, CollectiveId | None]] = {}
        # By a group's label: how many of its collectives this rank has begun. And the threads that have.
        self.begun: dict[str, int] = {}
        self.beginners: set[int] = set()
        # The thread that hears of other ranks' ends, if there is one.
        self.listener: int | None = None
        # Lets those know who watch that this rank has lost another, and may end of it.
        self.say_lost: Callable[[], None] = lambda: None
        self._heard = threading.Event()
        self._first_end: tuple[int, bool] | None = None

    def blocked(self) -> dict[int, tuple[str, float, CollectiveId | None]]:
        """What each thread is blocked in now, by its ident, since when, and which collective it is."""
        # In one step of the interpreter's, while other threads change it.
        return self.waits.copy()

    def hear_of_end(self, rank: int, by_itself: bool) -> None:
        """This global rank was the first to end, or, unless ``by_itself``, to go."""
        if self._first_end is None:
            self._first_end = (rank, by_itself)
        self._heard.set()

    def hear_of_nobody(self) -> None:
        """Who was the first is not to be known any more."""
        self._heard.set()

    @property
    def known_end(self) -> tuple[int, bool] | None:
        """Who was the first, as far as that is known now."""
        return self._first_end

    def first_end(self) -> tuple[int, bool] | None:
        """Who was the first, after a moment in which word of it may still come; None if there is none.

        To be asked by a rank that has lost another.
        """
        # Before anything of this rank is closed: so no other takes its end for the first.
        self.say_lost()
        if self.listener not in (None, threading.get_ident()):
            self._heard.wait(_WORD_S)
        return self._first_end


class Work:
    """A collective under way. `wait` returns when its tensors may be read, or raises what went wrong."""

    def __init__(
        self,
        work: EngineWork,
        what: str,
        watch: Watch,
        error_of: Callable[[str, BaseException], CommunicationError],
        place: CollectiveId | None = None,
    ) -> None:
        """``error_of`` makes hvdlite's error of the engine's, which was about ``what``; ``place`` says which it is."""
        self._place = place
        self._work = work
        self._what = what
        self._watch = watch
        self._error_of = error_of

    def wait(self) -> None:
        """Block until done; on a GPU the current stream waits instead of the host."""
        waits, own = self._watch.waits, threading.get_ident()
        waits[own] = (self._what, time.monotonic(), self._place)
        try:
            self._work.wait()
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                # Raised by a signal handler of PyTorch's wherever the program happens to be.
                raise
            if isinstance(error, MismatchError):
                # From an engine that sees it, with all there is to say.
                raise
            raise self._error_of(self._what, error) from error
        except KeyboardInterrupt as interrupt:
            say_where(interrupt, self._what)
            raise
        finally:
            del waits[own]

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have it called, by a thread of the engine's, when it is done or has failed; at once where it is.

        For NCCL at once in any case, with the current stream being one that waits for it.
        """
        self._work.get_future().add_done_callback(lambda _: callback())
