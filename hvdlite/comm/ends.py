"""
`Ends`: ends the waits for ranks that cannot come any more, while ranks open an engine through their store.

    rank 0 ── left, failed ──► listening thread ── record_end, record_failure ──► Ends
    a thread that opens an engine ── wait_until_set (the store), connecting (gloo) ── raises the reason ◄─┘

A store does not know of ranks: a wait for the key of a rank that has ended would last until its timeout. There is one
`Ends` per world. `gloo.ConnectingRanks` waits through it, and `control.rank0_connection` fills it in. It also numbers
the operations, so that the failure of a rank in one of them ends the others' waits in the same operation alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from ..errors import CommunicationError, HvdliteError, PeerLostError, describe_end, lack_of

Result = TypeVar("Result")

# The label of the operation's group, and its number among that group's operations.
OperationId = tuple[str, int]

# How often a wait in the store looks for ends: rarely where ranks are many, since each look asks the store.
_LOOK_S, _LOOK_S_PER_KEY = 1.0, 0.01

# How long to wait for rank 0's message about an end, once gloo has failed.
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
        """Runs the next operation of the group with this label; if it fails here alone, the other ranks are told."""
        number = self._begun[label] = self._begun.get(label, 0) + 1
        earlier, self._here.operation = getattr(self._here, "operation", None), (label, number)
        try:
            return operation()
        except HvdliteError as error:
            # Raised on every rank, or the consequence of another rank's end; unless this process has run out of
            # something.
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
        """Blocks until these global ranks have set the keys; raises the reason within seconds if one of them cannot.

        ``operation`` is by default that of this thread.
        """
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
        """A context in which gloo connects these ranks: it fails with the reason if one of them cannot come.

        This rank is ``ranks[own]``.
        """
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
