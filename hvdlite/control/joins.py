"""
This rank's part in joins: its own `hvd.join()`, and the optimizers that it keeps alive for joins of other ranks.

    begin ── "join", with the living optimizers ── stand_in (others' all-reduces), sit_out (others' steps) ── end
    pin (another rank has joined) ── "pinned", with the living optimizers ── unpin

Living optimizers are those that are neither closed nor garbage-collected; pinned ones are kept. Rank 0 finds the steps
to sit out (see `coordinator.scene`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..calls.generation import ReducerRegistry, SitsOut
from ..calls.handle import Handle
from ..calls.messages import GoAsStandIn, LivingOptimizers
from ..calls.operation import Execution, SitOut, StandIn, kind_named
from ..comm.group import Group
from .executor import Executor, Request

_Pinned = dict[int, dict[int, SitsOut]]  # by process set and number


@dataclass(frozen=True, slots=True)
class _Joining:
    """A join in progress, with the optimizers pinned for it."""

    handle: Handle
    stand_in: StandIn
    sit_out: SitOut
    pinned: _Pinned


class Joins:
    """The join that this rank is in, if any, and the optimizers that are pinned for joins."""

    def __init__(
        self, reducers: ReducerRegistry, groups: Mapping[int, Group], executor: Executor, lock: threading.Lock
    ) -> None:
        """``groups`` is the live table of this rank's groups, by process set."""
        self._reducers = reducers
        self._groups = groups
        self._executor = executor
        self._lock = lock
        self._joining: _Joining | None = None
        # Optimizers pinned for a join of other ranks.
        self._pinned: _Pinned = {}

    @property
    def is_joining(self) -> bool:
        return self._joining is not None

    @property
    def is_waiting(self) -> bool:
        """Whether some rank is known to have joined, and not all others yet."""
        return bool(self._joining or self._pinned)

    def begin(self, handle: Handle, stand_in: StandIn, sit_out: SitOut) -> tuple[LivingOptimizers, ...]:
        """Begins this rank's join, once at a time; returns its living optimizers for rank 0, by process set."""
        groups = [group for group in list(self._groups.values()) if group.size > 1]
        with self._lock:
            if self._joining is not None:
                raise RuntimeError(
                    "hvd.join() was called before on this rank, and not all ranks have joined yet: call it once"
                )
            pinned = {group.set_id: self._reducers.of(group).pin() for group in groups}
            self._joining = _Joining(handle, stand_in, sit_out, pinned)
        return tuple(
            LivingOptimizers(each.set_id, each.ranks if each.set_id else (), tuple(pinned[each.set_id]))
            for each in groups
        )

    def stand_in(self, message: GoAsStandIn, group: Group) -> None:
        """Takes part, with nothing to give, in an operation that the other ranks have requested, on ``group``."""
        # Rank 0 may still write to a rank that has been revoked, and whose join has failed.
        if (joining := self._joining) is None:
            return

        def run(execution: Execution) -> Any:
            # Made on the executor, so that an error in it becomes the operation's.
            return joining.stand_in(kind_named(message.kind), message.same)(execution)

        self._executor.put(Request(Handle(message.what), run, group), message.owns, message.divisor)

    def sit_out(self, set_id: int, numbers: Sequence[int]) -> None:
        """Begins to take part in the steps of these optimizers, which are alive on all ranks of the set."""
        with self._lock:
            if (joining := self._joining) is None:
                return
            # The numbers may be from this rank's answer to "pin", or from its own join.
            members = {**self._pinned.get(set_id, {}), **joining.pinned.get(set_id, {})}
        for number in numbers:
            joining.sit_out(members[number], joining.handle)

    def pin(self, set_id: int) -> tuple[int, ...]:
        """Keeps this rank's living optimizers for another rank's join; returns their numbers. Never blocks."""
        group = self._groups.get(set_id)
        pinned = {} if group is None else self._reducers.of(group).pin()
        self._pinned[set_id] = pinned
        return tuple(pinned)

    def end(self, finish: Callable[[Handle], None]) -> None:
        """Ends the join of all ranks, and finishes its handle here, unless it has failed."""
        with self._lock:
            joining, self._joining = self._joining, None
        if joining is not None:
            self.unpin(joining)
            # On the executor, so after the operations in which this rank is a stand-in.
            self._executor.put_call(partial(finish, joining.handle))

    def unpin(self, joining: _Joining | None = None) -> None:
        """Unpins on the executor, since that may close groups, and before the join's handle is finished."""
        self._executor.put_call(partial(_unpin_all, self._take_pinned(joining)))

    def fail(self, error_of: Callable[[str], BaseException]) -> None:
        """Fails the join, since no answer will arrive, and unpins all optimizers."""
        with self._lock:
            joining, self._joining = self._joining, None
        _unpin_all(self._take_pinned(joining))
        if joining is not None:
            joining.handle.fail(error_of(joining.handle.what))

    def _take_pinned(self, joining: _Joining | None) -> list[SitsOut]:
        with self._lock:
            asked, self._pinned = self._pinned, {}
        everything = [asked] if joining is None else [asked, joining.pinned]
        return [member for each in everything for pinned in each.values() for member in pinned.values()]


def _unpin_all(members: Iterable[SitsOut]) -> None:
    for member in members:
        member.unpin()
