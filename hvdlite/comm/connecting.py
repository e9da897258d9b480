"""
How ranks wait for each other while they open an engine: `ConnectingRanks`, `InitTimeout`, and `Ends`.

    rank 0 ── left, failed ──► listening thread ── record_end, record_failure ──► Ends
    hvdlite-run ── the generation is revoked ────────────────────────── give_up ──► │
    a thread that opens an engine ── wait_until_set (the store), wait_until_over (gloo) ── raises the reason ◄─┘

Neither a store nor gloo knows of ranks: a wait for one that has ended would last until its timeout. There is one `Ends`
per world. `ConnectingRanks` waits through it, and `control.rank0_connection` fills it in. It also numbers the
operations, so that the failure of a rank in one of them ends the others' waits in the same operation alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import CommunicationError, HvdliteError, PeerLostError, describe_end, lack_of
from ..signing import Signer

Result = TypeVar("Result")

# The label of the operation's group, and its number among that group's operations.
OperationId = tuple[str, int]

# How often a wait in the store looks for ends: rarely where ranks are many, since each look asks the store.
_LOOK_S, _LOOK_S_PER_KEY = 1.0, 0.01

# How often a wait for gloo looks: the first time, and at most.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.2

# How long to wait for rank 0's message about an end, once gloo has failed.
_WORD_S = 3.0

_MOST_WORDS = 2000

# c10d's message when a wait times out before the operation is complete.
_NOT_DONE_YET = "Operation timed out!"


class InitTimeout:
    """The time that ranks wait for each other: one deadline for all of `hvd.init`, later a timeout for each wait."""

    def __init__(
        self, timeout: timedelta, clock: Callable[[], float] = time.monotonic, limit: timedelta | None = None
    ) -> None:
        """`hvd.init` begins now, and may take as long as ``limit``, or else as long as ``timeout``."""
        self.timeout = timeout
        self.limit = timeout if limit is None else min(timeout, limit)
        self._clock = clock
        self._until_s: float | None = clock() + self.limit.total_seconds()

    def left(self) -> timedelta:
        """Returns the timeout of the next wait: what remains, but at least 1 s (or ``timeout``, if that is shorter)."""
        if self._until_s is None:
            return self.timeout
        least_s = min(1.0, self.timeout.total_seconds())
        return timedelta(seconds=max(least_s, self._until_s - self._clock()))

    def end_of_init(self) -> None:
        """End the deadline of `hvd.init`: from now on each wait has the full timeout."""
        self._until_s = None


class Ends:
    """Which ranks of one world have ended, and in which operations they have failed. Any thread may call it."""

    def __init__(self) -> None:
        # Tells the other ranks that an operation (its group's label, its number there) has failed here, and why.
        self.say_failed: Callable[[str, int, str], object] = lambda label, number, words: None
        self.given_up = ""
        """Why no rank of this world will come any more; "" as long as they may."""
        # By global rank, whether it has ended normally.
        self._ended: dict[int, bool] = {}
        # By a group's label, its last operation that has failed on a rank: its number, the global rank and the error.
        self._failed: dict[str, tuple[int, int, str]] = {}
        # By a group's label, how many operations have begun; they are the same on all ranks.
        self._begun: dict[str, int] = {}
        self._here = threading.local()
        self._news = threading.Condition()

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
        with self._news:
            self._ended.setdefault(rank, ended_normally)
            self._news.notify_all()

    def record_failure(self, rank: int, label: str, number: int, words: str) -> None:
        """Notes that the operation has failed on the global ``rank``, with this error. It does not block."""
        with self._news:
            if number > self._failed.get(label, (0, 0, ""))[0]:
                self._failed[label] = number, rank, words
                self._news.notify_all()

    def give_up(self, why: str) -> None:
        """Ends all waits, now and later, since no rank of this world will come any more. It does not block."""
        with self._news:
            self.given_up = self.given_up or why
            self._news.notify_all()

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

    def wait_until_over(
        self, work: Any, is_late: Callable[[], bool], ranks: Sequence[int], names: Sequence[str]
    ) -> None:
        """Blocks until an operation of these global ranks is over; raises the reason at once if one of them cannot.

        Raises the operation's own RuntimeError if there is no such reason, and a TimeoutError once ``is_late()``. Then,
        too, the operation itself may still be in progress.
        """
        look_s = _FIRST_LOOK_S
        while True:
            try:
                work.wait(timedelta(seconds=look_s))
            except RuntimeError as error:
                has_failed = _NOT_DONE_YET not in str(error)
                # The reason may arrive a little after gloo's own error.
                reason = self._told_soon(ranks, names) if has_failed else self._reason(ranks, names, self.operation)
                if reason is not None:
                    raise reason from error
                if has_failed:
                    raise
                if is_late():
                    raise TimeoutError from error
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
            else:
                return

    def _told_soon(self, ranks: Sequence[int], names: Sequence[str]) -> CommunicationError | None:
        operation = self.operation
        with self._news:
            patience_s = 0.0 if operation is None else _WORD_S
            self._news.wait_for(lambda: self._reason(ranks, names, operation) is not None, patience_s)
        return self._reason(ranks, names, operation)

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
        return CommunicationError(self.given_up) if self.given_up else None


@dataclass(frozen=True, slots=True)
class ConnectingRanks:
    """The ranks that open process groups together.

    ``names`` are the ranks as messages name them, such as ``rank 3 (node2)``. Only these ranks have ``store`` and the
    key of ``signer``. ``init_timeout`` is how long they wait for each other, unless one of them is among ``ends``.
    ``numbers`` are their global ranks.
    """

    store: Store
    signer: Signer
    rank: int
    names: tuple[str, ...]
    init_timeout: InitTimeout
    ends: Ends = field(default_factory=Ends)
    numbers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def own_name(self) -> str:
        return self.names[self.rank]

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str) -> ConnectingRanks:
        """Returns some of the ranks, with this one as ``group_rank``.

        ``token`` is equal on these ranks, and never used before.
        """
        return replace(
            self,
            store=PrefixStore(f"hvdlite.{token}", self.store),
            signer=self.signer.derive("among", token),
            rank=group_rank,
            names=tuple(self.names[each] for each in group_ranks),
            numbers=tuple(self.global_ranks[each] for each in group_ranks),
        )

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.numbers or tuple(range(self.size))

    def wait_until_set(self, store: Store, keys: Sequence[str]) -> None:
        """Block until the ranks have set these keys; a CommunicationError if one of them has ended or failed."""
        self.ends.wait_until_set(store, keys, self.init_timeout.left(), self.global_ranks, self.names)

    def ending_store(self, store: Store) -> EndingStore:
        """Returns a store for gloo, whose waits end like those of `wait_until_set` in the operation of this thread."""
        wait = partial(
            self.ends.wait_until_set, ranks=self.global_ranks, names=self.names, operation=self.ends.operation
        )
        return EndingStore(store, self.init_timeout.left(), wait)


def wait_for_all(ranks: ConnectingRanks, label: str) -> None:
    """Wait until all ranks have called this with this label; a CommunicationError names those that did not."""
    keys = [f"{label}/here/{group_rank}" for group_rank in range(ranks.size)]
    try:
        ranks.store.set(keys[ranks.rank], "1")
        ranks.wait_until_set(ranks.store, keys)
    except CommunicationError as error:
        raise type(error)(f"{ranks.own_name} could not connect to the other ranks: {error}") from error
    except RuntimeError as error:
        late = []
        with contextlib.suppress(RuntimeError):
            late = [name for name, key in zip(ranks.names, keys, strict=True) if not ranks.store.check([key])]
        raise CommunicationError(
            f"{ranks.own_name} could not connect to the other ranks within the timeout_s of hvd.init(). "
            f"Missing: {', '.join(late[:8]) or f'unknown ({error})'}; look at their output for the cause"
        ) from error


class EndingStore(Store):
    """A store for gloo whose waits, by ``wait_until_set``, end when a rank ends, or fails to open its part.

    While gloo connects, it waits in the store for the address of each rank, and only the store can end that. C++ looks
    its methods up by name, and keeps no reference to the Python object: its maker must, while gloo connects.
    """

    def __init__(
        self, store: Store, timeout: timedelta, wait_until_set: Callable[[Store, Sequence[str], timedelta], None]
    ) -> None:
        """``timeout`` is that of `get`, which has none of its own. ``has_waited``: whether gloo has waited by now."""
        super().__init__()
        self._store = store
        self._patience = timeout
        self._wait_until_set = wait_until_set
        self.has_waited = False

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch's stubs lack bytes

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.has_waited = True
        self._wait_until_set(self._store, keys, self._patience if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        # Gloo then asks by `get` and `set` alone.
        return False
