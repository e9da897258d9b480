"""
Finds ranks that wait for each other, and words the error that they get; `negotiation` calls it, and passes the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ..calls.mismatch import CAUSES, by_value, first_difference, words_of_difference
from ..calls.operation import OPTIMIZER
from .scene import BlockedThread, Id, Pending, Scene

# The cause when a rank waits for the others to open an optimizer's engine.
_CAUSES_OF_OPTIMIZER = (
    "All ranks open the engine of a hvd.DistributedOptimizer together. Ranks that do not wait for it here have not "
    "made this optimizer, or have made it before the last hvd.init() and not stepped with it since: make the same "
    "optimizers in the same order on every rank; where one rank makes a new one, all must"
)


class Deadlocks:
    """Looks for ranks that wait for each other in a circle."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        # The ranks that the last `find` saw in circles, and since when.
        self._stuck_since_s: tuple[frozenset[int], float] | None = None

    def find(self, now_s: float, settling_s: float) -> tuple[list[Pending], str] | None:
        """Returns the operations of ranks that have waited for each other for that long, and the error's message."""
        scene = self._scene
        if not scene.waiting:
            self._stuck_since_s = None
            return None
        missing = {
            id_: scene.pending[id_].missing(scene.joined)
            for id_ in {id_ for ids in scene.waiting.values() for id_ in ids}
        }
        waiting: dict[int, set[Id]] = {rank: set(ids) for rank, ids in scene.waiting.items()}
        for rank in scene.stuck:
            for each in scene.busy[rank]:
                # Negative numbers, which no operation has.
                id_ = -1 - len(missing)
                missing[id_] = self._not_begun(each)
                waiting.setdefault(rank, set()).add(id_)
        stuck = stuck_ranks(waiting, missing)
        if not stuck & scene.waiting.keys():
            self._stuck_since_s = None
            return None
        if self._stuck_since_s is None or self._stuck_since_s[0] != stuck:
            self._stuck_since_s = (stuck, now_s)
        if now_s - self._stuck_since_s[1] < settling_s:
            return None
        refused = sorted({id_ for rank in stuck for id_ in scene.waiting.get(rank, ())})
        return [scene.pending[id_] for id_ in refused], self._words(stuck)

    def _not_begun(self, blocked: BlockedThread) -> set[int]:
        """The members of that collective that had not begun it when they were last blocked, where that is known."""
        if blocked.collective is None:
            return set()
        label, number, members = blocked.collective
        begun = self._scene.begun
        return {rank for rank in members if rank in begun and begun[rank].get(label, 0) < number}

    def _words(self, stuck: Collection[int]) -> str:
        scene = self._scene
        pending = {rank: [scene.pending[id_] for id_ in sorted(scene.waiting.get(rank, ()))] for rank in stuck}
        if words := self._words_of_pairing(pending):
            return words
        waits = {
            rank: [RankWait(each.first.kind, each.first.what, each.first.of_set) for each in of_rank]
            or [RankWait(scene.busy[rank][0].what, scene.busy[rank][0].what)]
            for rank, of_rank in pending.items()
        }
        return words_of_deadlock(waits, scene.hosts)

    def _words_of_pairing(self, waits: Mapping[int, Sequence[Pending]]) -> str | None:
        """The message for ranks that request one kind under different pairing names; None if that is not so."""
        if any(len(each) != 1 for each in waits.values()):
            return None
        asks = {rank: pending.asks[rank] for rank, (pending,) in sorted(waits.items())}
        first = next(iter(asks.values()))
        if any(
            ask.caller is None or ask.name is None or (ask.set_id, ask.kind) != (first.set_id, first.kind)
            for ask in asks.values()
        ):
            return None
        asked = {rank: ask.same for rank, ask in asks.items()}
        if first_difference(list(asked.values())) is None:
            return None
        (pending,) = waits[next(iter(asks))]
        return words_of_difference(pending.kind, first.what, asked, self._scene.hosts)


def stuck_ranks(waiting: Mapping[int, Iterable[Id]], missing: Mapping[Id, Set[int]]) -> frozenset[int]:
    """Returns the ranks that wait for operations which need ranks that wait too, and so on, in a circle.

    ``waiting`` is what each rank is blocked in; it continues as soon as one of these can be done. ``missing`` are the
    ranks that each operation still needs.
    """
    stuck = set(waiting)
    while freed := {rank for rank in stuck if any(not missing[wait] & stuck for wait in waiting[rank])}:
        stuck -= freed
    return frozenset(stuck)


@dataclass(frozen=True, slots=True)
class RankWait:
    """One wait of a rank: the function's name, the operation, and its process set in words."""

    kind: str
    what: str
    of_set: str | None = None

    def __str__(self) -> str:
        return self.what if self.of_set is None else f"{self.what} in {self.of_set}"


def words_of_deadlock(waits: Mapping[int, Sequence[RankWait]], hosts: Sequence[str]) -> str:
    """The message for ranks that wait for each other; ``waits`` are by rank."""
    seen = list(dict.fromkeys(wait for rank in sorted(waits) for wait in waits[rank]))
    one, another = seen[0], next((wait for wait in seen if wait != seen[0]), seen[0])
    if one.kind != another.kind:
        first = f"Mismatched operations: One rank calls {one.kind}, but another rank calls {another.kind}."
    elif one.what != another.what:
        first = f"Mismatched names: One rank is in {one.what}, but another rank is in {another.what}."
    else:
        first = f"Mismatched process sets: One rank calls {one.kind} in {one.of_set}, but another in {another.of_set}."
    by_rank = {rank: " and ".join(map(str, entries)) for rank, entries in sorted(waits.items())}
    if any(wait.kind == OPTIMIZER.name for wait in seen):
        cause = f". {_CAUSES_OF_OPTIMIZER}"
    else:
        cause = f". {CAUSES}" if one.kind != another.kind or one.what != another.what else ""
    return f"{first} These ranks wait for each other: {by_value(by_rank, hosts)}{cause}"
