"""
`Work`, a collective in progress; `CollectiveWatch`, which records those that this rank has begun; and `Ends`.

`group` makes each `Work`; `calls.generation` has the world's one watch. The controller (`control`) reads the watch to
report what this rank waits for, and writes to it which rank has ended first.

`Ends` ends the waits for ranks that cannot come any more, while ranks open an engine through their store: a store does
not know of ranks, so that a wait for the key of a rank that has ended would last until its timeout.

    rank 0 ── left, failed ──► listening thread ── record_end, record_failure ──► Ends
    a thread that opens an engine ── wait_until_set (the store), connecting (gloo) ── raises the reason ◄─┘
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from ..errors import (
    CommunicationError,
    HvdliteError,
    MismatchError,
    PeerLostError,
    describe_end,
    describe_interrupt,
    lack_of,
    list_names,
)
from .engine import EngineWork, KnowsWhoBegan
from .step_clock import StepClock

# One collective: the group's label, its number in the group, and the global ranks that take part.
CollectiveId = tuple[str, int, tuple[int, ...]]

Result = TypeVar("Result")

# The label of the operation's group, and its number among that group's operations.
OperationId = tuple[str, int]

# How often a wait in the store looks for ends: rarely where ranks are many, since each look asks the store.
_LOOK_S, _LOOK_S_PER_KEY = 1.0, 0.01

# How long to wait for the controller's message about an end, which may arrive a little after the engine's error.
_WORD_S = 3.0

_MOST_WORDS = 2000


class Ends:
    """Which ranks of one world have ended, and in which operations they have failed. Any thread may call it."""

    def __init__(self) -> None:
        # Tells the other ranks that an operation (its group's label, its number there) has failed here, and why.
        self.say_failed: Callable[[str, int, str], object] = lambda label, number, words: None
        # Makes gloo, which cannot be interrupted, fail to connect.
        self.give_up_connecting: Callable[[], object] = lambda: None
        # By global rank, whether it has ended normally.
        self._ended: dict[int, bool] = {}
        # By a group's label, its last operation that has failed on a rank: its number, the global rank and the error.
        self._failed: dict[str, tuple[int, int, str]] = {}
        # By a group's label, how many operations have begun; they are the same on all ranks.
        self._begun: dict[str, int] = {}
        self._here = threading.local()
        # The ranks, and the operation, of each group that gloo connects just now.
        self._connecting: list[tuple[Sequence[int], OperationId | None]] = []
        self._lock = threading.Condition()

    def run(self, label: str, operation: Callable[[], Result]) -> Result:
        """Runs the next operation of the group with this label; tells the others if it fails here alone."""
        number = self._begun[label] = self._begun.get(label, 0) + 1
        earlier, self._here.operation = getattr(self._here, "operation", None), (label, number)
        try:
            return operation()
        except HvdliteError as error:
            # Raised on every rank, or caused by another rank's end, unless this process has run out of something.
            if (lack := lack_of(error)) is not None:
                self.say_failed(label, number, lack)
            raise
        except BaseException as error:
            self.say_failed(label, number, f"{type(error).__name__}: {error}"[:_MOST_WORDS])
            raise
        finally:
            self._here.operation = earlier

    def record_end(self, rank: int, ended_normally: bool) -> None:
        """Notes that the global ``rank`` has ended. It does not block."""
        self._ended.setdefault(rank, ended_normally)
        self._interrupt()

    def record_failure(self, rank: int, label: str, number: int, words: str) -> None:
        """Notes that the operation has failed on the global ``rank``, with this error. It does not block."""
        if number > self._failed.get(label, (0, 0, ""))[0]:
            self._failed[label] = number, rank, words
            self._interrupt()

    @property
    def operation(self) -> OperationId | None:
        """The operation that this thread is in."""
        found: OperationId | None = getattr(self._here, "operation", None)
        return found

    def wait_until_set(
        self,
        store: Store,
        keys: Sequence[str],
        timeout: timedelta,
        ranks: Sequence[int],
        names: Sequence[str],
        operation: OperationId | None = None,
    ) -> None:
        """Blocks until these global ranks have set the keys; raises the reason within seconds if one of them cannot."""
        operation = operation or self.operation
        until_s = time.monotonic() + timeout.total_seconds()
        while True:
            began_s = time.monotonic()
            left_s = until_s - began_s
            look_s = _LOOK_S + _LOOK_S_PER_KEY * len(keys)
            is_last = left_s <= look_s
            try:
                store.wait(list(keys), timedelta(seconds=max(left_s, 0.001)) if is_last else timedelta(seconds=look_s))
            except RuntimeError as error:
                reason = self._reason(ranks, names, operation)
                if reason is not None:
                    raise reason from error
                # A store that is gone fails at once.
                if is_last or time.monotonic() - began_s < look_s / 2:
                    raise
            else:
                return

    @contextlib.contextmanager
    def connecting(self, ranks: Sequence[int], names: Sequence[str], own: int) -> Iterator[None]:
        """A context in which gloo connects these ranks, this one as ``ranks[own]``; it fails if one cannot come."""
        connecting = ranks, self.operation
        with self._lock:
            self._connecting.append(connecting)
        try:
            # It may have ended just before.
            self._interrupt()
            yield
        except RuntimeError as error:
            reason = self._told_soon(ranks, names)
            if reason is None:
                raise
            name = names[own] if own < len(names) else "this rank"
            raise type(reason)(f"{name} could not connect to the other ranks: {reason}") from error
        finally:
            with self._lock:
                self._connecting.remove(connecting)

    def _told_soon(self, ranks: Sequence[int], names: Sequence[str]) -> CommunicationError | None:
        """Returns the reason, which may arrive a little after gloo's own error."""
        operation, until_s = self.operation, time.monotonic() + _WORD_S
        with self._lock:
            while (reason := self._reason(ranks, names, operation)) is None and operation is not None:
                if (left_s := until_s - time.monotonic()) <= 0:
                    break
                self._lock.wait(left_s)
        return reason

    def _interrupt(self) -> None:
        with self._lock:
            self._lock.notify_all()
            is_hopeless = any(self._reason(ranks, (), operation) for ranks, operation in self._connecting)
        if is_hopeless:
            # On another thread, since it lasts until gloo has failed.
            threading.Thread(target=self.give_up_connecting, name="hvdlite-give-up", daemon=True).start()

    def _reason(
        self, ranks: Sequence[int], names: Sequence[str], operation: OperationId | None
    ) -> CommunicationError | None:
        of_rank = dict(zip(ranks, names, strict=False))
        if operation is not None:
            number, rank, words = self._failed.get(operation[0], (0, 0, ""))
            if number == operation[1]:
                return CommunicationError(f"{of_rank.get(rank, f'rank {rank}')} has failed to open its part: {words}")
        for rank in ranks:
            ended_normally = self._ended.get(rank)
            if ended_normally is not None:
                kind = CommunicationError if ended_normally else PeerLostError
                end = describe_end(of_rank.get(rank, f"rank {rank}"), ended_normally)
                return kind(f"{end} before the ranks had connected: look at its output for the cause")
        return None


class CollectiveWatch:
    """Records the collectives that this rank has begun, the waits of its threads, and the first rank that ended.

    There is one per generation of the world, for all its groups. The controller reports these to rank 0, and records
    here which other rank has ended.
    """

    def __init__(self, ends: Ends | None = None) -> None:
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
        # The first rank to end, and whether normally, as in `record_first_end`; None if none is known yet.
        self.known_end: tuple[int, bool] | None = None

    def blocked(self) -> dict[int, tuple[str, float, CollectiveId | None]]:
        """Returns, by thread ident, the name of the collective it is blocked in, the wait's start, and its id."""
        # dict.copy is atomic, while other threads change the dict.
        return self.waits.copy()

    def record_first_end(self, rank: int, ended_normally: bool) -> None:
        """Record that global ``rank`` was the first to end: normally, or by a crash or a lost connection.

        Later calls count for waits in the store alone.
        """
        if self.known_end is None:
            self.known_end = (rank, ended_normally)
        self._heard.set()
        self.ends.record_end(rank, ended_normally)

    def record_unknown_end(self) -> None:
        """Record that the first rank to end cannot be known any more."""
        self._heard.set()

    def first_end(self) -> tuple[int, bool] | None:
        """Returns `known_end` to a rank that has lost another, after up to 3 s for the controller to tell it."""
        # Report it before this rank closes anything, so that no other rank takes this rank's end for the first one.
        self.say_lost()
        if self.listening_thread not in (None, threading.get_ident()):
            self._heard.wait(_WORD_S)
        return self.known_end


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
            # PyTorch's signal handler raises the first wherever the program is; the second is complete already.
            if "DataLoader worker" in str(error) or isinstance(error, MismatchError):
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
