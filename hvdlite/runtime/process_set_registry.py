"""
The process sets of one world: registered by all ranks together, under numbers that are equal on all.

    add ── all ranks have asked for it ── the members open channels among themselves ── Membership on every rank

Needs the controller, since all ranks must do it in one order; what a set is to its user is in `process_set`.
"""

from __future__ import annotations

import itertools
import uuid
from functools import partial

from ..comm.group import Group
from ..control.controller import Controller
from ..control.generation import Generation
from ..control.operation import ADD_PROCESS_SET, Execution, Kind, Operation
from ..errors import CommunicationError
from .process_set import Membership, ProcessSet

_REMOVE_PROCESS_SET = Kind("remove_process_set")


class Registry:
    """Knows the sets that are registered, but for the one of all ranks, and is asked by all ranks alike."""

    def __init__(self, all_ranks: Group, controller: Controller, generation: Generation) -> None:
        self._all_ranks = all_ranks
        self._generation = generation
        self._controller = controller
        self._sets: dict[int, ProcessSet] = {}
        self._numbers = itertools.count(1)

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Every rank must call it, member or not, with equal ranks; it waits for all.

        A ValueError on every rank if there is such a set already, or no such rank.
        """
        operation = Operation(
            ADD_PROCESS_SET,
            partial(self._register, process_set),
            same={"ranks": process_set.ranks},
            # Whose token is taken names the channels: no set, in this world or another over the same store, had it.
            own=uuid.uuid4().hex,
        )
        self._controller.submit(self._all_ranks, operation).wait()

    def remove(self, process_set: ProcessSet) -> bool:
        """Forget a set and close its channels. Every rank must call it; it waits for all.

        False, without waiting, for a set that is not registered.
        """
        set_id = process_set.process_set_id
        if set_id is None or self._sets.get(set_id) is not process_set:
            return False
        same = {"process_set_id": set_id}
        operation = Operation(_REMOVE_PROCESS_SET, lambda execution: self._unregister(set_id), same=same)
        self._controller.submit(self._all_ranks, operation).wait()
        return True

    def groups(self) -> list[Group]:
        """Of the sets that this rank is a member of."""
        memberships = [process_set.membership() for process_set in self._sets.values()]
        return [membership.group for membership in memberships if membership.group is not None]

    def close(self) -> None:
        """Forget all sets. Waits for nobody."""
        for set_id in list(self._sets):
            self._forget(set_id)

    def _register(self, process_set: ProcessSet, execution: Execution) -> None:
        # On the controller's thread, in one order on all ranks: so are the numbers.
        self._check(process_set)
        set_id = next(self._numbers)
        group, failure = None, None
        if self._all_ranks.rank in process_set.ranks:
            try:
                group = self._open(process_set, set_id, execution.owns[0])
            except RuntimeError as error:
                failure = error
        failed = execution.group.all_gather_json(None if failure is None else str(failure), execution.what)
        for rank, words in enumerate(failed):
            if words is not None:
                raise CommunicationError(
                    f"{process_set} was not added: its ranks cannot reach each other, on "
                    f"{execution.group.describe_rank(rank)}: {words}"
                ) from failure
        self._sets[set_id] = process_set
        if group is not None:
            self._controller.open_channel(group)
        process_set.register(Membership(set_id, self._all_ranks.rank, group, self._generation))

    def _check(self, process_set: ProcessSet) -> None:
        ranks, size = process_set.ranks, self._all_ranks.size
        if ranks[-1] >= size:
            raise ValueError(f"{process_set}: there is no rank {ranks[-1]}, the {size} ranks are 0 to {size - 1}")
        if ranks == list(range(size)) or any(ranks == known.ranks for known in self._sets.values()):
            # Horovod's words.
            raise ValueError(f"Attempted to add a duplicate process set: {process_set}")

    def _open(self, process_set: ProcessSet, set_id: int, token: str) -> Group:
        ranks = process_set.ranks
        return self._all_ranks.among(ranks, set_id=set_id, token=token)

    def _unregister(self, set_id: int) -> None:
        group = self._sets[set_id].membership().group
        if group is not None:
            self._controller.close_channel(group)
        self._forget(set_id)

    def _forget(self, set_id: int) -> None:
        process_set = self._sets.pop(set_id)
        group = process_set.membership().group
        process_set.register(None)
        if group is not None:
            group.close()
            self._generation.reducers.forget(group)
