"""
`Pool`: ranks as threads, with a world of their own, that run one program after the other.

    Pool.run(source) ── a queue to each rank ── train(rank, show) ── Outcome of each rank: records, and how it ended

A rank that raises ends the world, as the end of its process would: the others get a CommunicationError, and the next
program gets a new world. So does one in which a rank has not ended by the deadline; then the stacks are kept.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranks import attempt_ranks
from worlds import WorldOfThread, instead_of_the_world

from .records import Record, record
from .source import Source

# How long the other ranks may take to come to their own errors, before the world of one that has raised is ended.
_GRACE_S = 0.05
# A world's threads are replaced after this: `attempt_threads` takes older ones to hang.
_LIFE_S = 60.0
# How long the ranks of an ended world may take to notice.
_ENDING_S = 10.0


@dataclass
class Outcome:
    """How a rank has ended: ``error`` is what it raised, at the action ``at``; ``stack`` is where it hung."""

    records: list[Record] = field(default_factory=list)
    error: BaseException | None = None
    at: int = -1
    # Where it stood at the deadline, and whether it ended at all when the world did.
    stack: str | None = None
    has_ended: bool = False


@dataclass(frozen=True)
class Leg:
    """Where programs run: an engine of `ranks.ENGINES`, and the host of each rank."""

    name: str
    engine: str
    hosts: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.hosts)


LEGS = {
    leg.name: leg
    for leg in (
        Leg("shm2", "shared memory", ("a", "a")),
        Leg("shm3", "shared memory", ("a", "a", "a")),
        Leg("gloo2", "gloo", ("a", "a")),
        Leg("gloo3", "gloo", ("a", "a", "a")),
        Leg("hosts2", "gloo", ("a", "b")),
        Leg("hosts3", "gloo", ("a", "b", "c")),
        Leg("uneven3", "gloo", ("a", "a", "b")),
        Leg("hosts4", "gloo", ("a", "a", "b", "b")),
    )
}


class Pool:
    """Threads that are ranks, until a program fails; then others take their place."""

    def __init__(self, leg: Leg, deadline_s: float = 20.0) -> None:
        self._leg = leg
        self.deadline_s = deadline_s
        self._world: _Threads | None = None
        self._worlds = WorldOfThread()
        self._context = instead_of_the_world(self._worlds)
        # Threads that did not end with their world.
        self.lost = 0

    def run(self, source: Source) -> list[Outcome]:
        """Runs a program on all ranks."""
        if self._world is not None and time.monotonic() > self._world.made_at_s + _LIFE_S:
            self.close()
        if self._world is None:
            self._world = _Threads(self._leg, self._worlds)
        outcomes = self._world.run(source, self.deadline_s)
        if any(outcome.error is not None or outcome.stack is not None for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self.lost += not self._world.have_ended
            self._world = None

    def __enter__(self) -> Pool:
        self._context.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._context.__exit__(None, None, None)


class _Threads:
    """One world's threads."""

    def __init__(self, leg: Leg, shared: WorldOfThread) -> None:
        self._size = leg.size
        self._shared = shared
        self.made_at_s = time.monotonic()
        self._orders: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(leg.size)]
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._worlds: dict[int, Any] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._thread = threading.Thread(
            target=attempt_ranks,
            args=(leg.size, lambda group: shared.call(group, self._serve)),
            kwargs={"engine": leg.engine, "hosts": leg.hosts},
            daemon=True,
        )
        self._thread.start()

    def run(self, source: Source, deadline_s: float) -> list[Outcome]:
        outcomes = [Outcome() for _ in range(self._size)]
        train = source.train()
        for rank, order in enumerate(self._orders):
            order.put((train, source, outcomes[rank]))
        self._wait(outcomes, deadline_s)
        return outcomes

    def _wait(self, outcomes: Sequence[Outcome], deadline_s: float) -> None:
        """Waits for all ranks; ends their world if one fails, or has not ended by the deadline."""
        ends_at, revoked_at = time.monotonic() + deadline_s, None
        while not all(outcome.has_ended for outcome in outcomes):
            try:
                rank = self._ended.get(timeout=max(0.0, ends_at - time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                if revoked_at is None:
                    revoked_at = now
                    if not any(outcome.error is not None for outcome in outcomes):
                        self._note_stacks(outcomes)
                if now > revoked_at + _ENDING_S:
                    self._note_stacks(outcomes)
                    return
                # Again and again, since a rank may just be opening a group.
                self._revoke()
                ends_at = now + 0.2
            else:
                if outcomes[rank].error is not None and revoked_at is None:
                    ends_at = min(ends_at, time.monotonic() + _GRACE_S)

    def _note_stacks(self, outcomes: Sequence[Outcome]) -> None:
        for rank, outcome in enumerate(outcomes):
            if outcome.stack is None and not outcome.has_ended:
                outcome.stack = self._stack_of(rank)

    def _stack_of(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"

    def _revoke(self) -> None:
        for own in list(self._worlds.values()):
            own.controller.revoke("a rank has raised an error, and its process ends")
            for group in (own.group, *own.sets.groups()):
                group.revoke("a rank has raised an error, and its process ends")

    def _serve(self, rank: int) -> None:
        self._worlds[rank] = self._shared.here
        self._threads[rank] = threading.current_thread()
        while True:
            order = self._orders[rank].get()
            if order is None:
                return
            train, source, outcome = order
            try:
                train(rank, _show_to(outcome))
            except BaseException as error:  # noqa: BLE001 - it is judged
                outcome.at = _action_of(error, source)
                outcome.error = error.with_traceback(None)
                outcome.error.__context__ = None
            outcome.has_ended = True
            del train, order
            self._ended.put(rank)

    def close(self) -> None:
        for order in self._orders:
            order.put(None)
        self._thread.join(_ENDING_S)

    @property
    def have_ended(self) -> bool:
        return not self._thread.is_alive()


def _show_to(outcome: Outcome) -> Callable[..., None]:
    return lambda *what, **more: outcome.records.append(record(*what, **more))


def _action_of(error: BaseException, source: Source) -> int:
    """Returns the action at which the program raised this."""
    at = -1
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == source.filename:
            at = source.action_at(frame.lineno or 1)
    return at
