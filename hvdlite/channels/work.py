"""
A collective of an engine under way, and word of it for who watches what this process is blocked in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import CommunicationError
from .engine import EngineWork


class Waits:
    """What this process is blocked in, an engine's collective, and since when (`time.monotonic`): for who watches."""

    current: tuple[str, float] | None = None


class Work:
    """A collective under way. `wait` returns when its tensors may be read, or raises what went wrong."""

    def __init__(
        self, work: EngineWork, what: str, waits: Waits, error_of: Callable[[str, BaseException], CommunicationError]
    ) -> None:
        """``error_of`` makes hvdlite's error of the engine's, which was about ``what``."""
        self._work = work
        self._what = what
        self._waits = waits
        self._error_of = error_of

    def wait(self) -> None:
        """Block until done; on a GPU the current stream waits instead of the host."""
        waits = self._waits
        waits.current = (self._what, time.monotonic())
        try:
            self._work.wait()
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                # Raised by a signal handler of PyTorch's wherever the program happens to be.
                raise
            raise self._error_of(self._what, error) from error
        finally:
            waits.current = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have it called, by a thread of the engine's, when it is done or has failed; at once where it is.

        For NCCL at once in any case, with the current stream being one that waits for it.
        """
        self._work.get_future().add_done_callback(lambda _: callback())
