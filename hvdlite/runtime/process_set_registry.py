"""
`Registry`: the process sets of one world. All ranks add and remove sets together, under the same numbers.

    add ── all ranks have called it ── the members open a Group ── SetMembership on every rank

`process_set_functions` and `world.init` call it. It runs each change as an operation of the controller, so that all
ranks make the changes in the same order.
"""

from __future__ import annotations

import itertools
import uuid
from functools import partial

from ..calls.controller import Controller
from ..calls.generation import Generation
from ..calls.operation import ADD_PROCESS_SET, Execution, Kind, Operation
from ..comm.group import Group
from ..errors import CommunicationError
from .process_set import ProcessSet, SetMembership

_REMOVE_PROCESS_SET = Kind("remove_process_set")


class Registry:
    """The registered sets of one world, except the set of all ranks."""

    def __init__(
        self, all_ranks: Group, controller: Controller, generation: Generation, *, is_elastic: bool = False
    ) -> None:
        """``is_elastic``: a set may have all ranks, since it may have been made where there were more."""
        self._all_ranks = all_ranks
        self._is_elastic = is_elastic
        self._generation = generation
        self._controller = controller
        self._sets: dict[int, ProcessSet] = {}
        self._numbers = itertools.count(1)

    def add(self, process_set: ProcessSet) -> None:
        """Registers a set. Every rank must call it, member or not, with equal ranks, and waits for all.

        Raises a ValueError on every rank if a set of these ranks is registered already, or if there is no such rank.
        """
        operation = Operation(
            ADD_PROCESS_SET,
            partial(self._register, process_set),
            same={"ranks": process_set.ranks},
            # Rank 0's token is used in the store keys of the set's group: it must be new among all worlds of the store.
            own=uuid.uuid4().hex,
        )
        self._controller.submit(self._all_ranks, operation).wait()

    def remove(self, process_set: ProcessSet) -> bool:
        """Removes a set and closes its group; returns True. Every rank must call it, and waits for all.

        Returns False, without waiting, for a set that is not registered.
        """
        set_id = process_set.process_set_id
        if set_id is None or self._sets.get(set_id) is not process_set:
            return False
        same = {"process_set_id": set_id}
        operation = Operation(_REMOVE_PROCESS_SET, lambda execution: self._unregister(set_id), same=same)
        self._controller.submit(self._all_ranks, operation).wait()
        return True

    def groups(self) -> list[Group]:
        """Returns the groups of the sets that this rank is a member of."""
        memberships = [process_set.membership() for process_set in list(self._sets.values())]
        return [membership.group for membership in memberships if membership.group is not None]

    @property
    def has_any(self) -> bool:
        """Whether there is a set besides that of all ranks."""
        return bool(self._sets)

    def close(self) -> None:
        """Removes all sets and closes their groups, without waiting for other ranks."""
        for set_id in list(self._sets):
            self._forget(set_id)

    def forget(self) -> None:
        """Removes all sets from a forked child, whose parent keeps their groups open."""
        for process_set in self._sets.values():
            process_set.register(None)

    def _register(self, process_set: ProcessSet, execution: Execution) -> None:
        # Runs on the controller's thread, in the same order on all ranks: so the numbers are equal.
        self._check(process_set)
        set_id = next(self._numbers)
        group, failure = None, None
        if self._all_ranks.rank in process_set.ranks:
            try:
                group = self._all_ranks.among(process_set.ranks, set_id=set_id, token=execution.owns[0])
            except RuntimeError as error:
                failure = error
        try:
            self._require_opened(process_set, execution, failure)
            if group is not None:
                self._controller.open_group(group)
        except BaseException:
            if group is not None:
                group.close()
            raise
        # Last, since other threads read the sets, such as the one that ends the waits for a lost rank.
        process_set.register(SetMembership(set_id, self._all_ranks.rank, group, self._generation))
        self._sets[set_id] = process_set

    def _require_opened(self, process_set: ProcessSet, execution: Execution, failure: RuntimeError | None) -> None:
        """Raises a CommunicationError on all ranks if one of them could not connect to the others of the set."""
        failed = execution.group.all_gather_json(None if failure is None else str(failure), execution.what)
        for rank, words in enumerate(failed):
            if words is not None:
                raise CommunicationError(
                    f"{process_set} was not added: its ranks cannot connect to each other. "
                    f"{execution.group.describe_rank(rank)}: {words}"
                ) from failure

    def _check(self, process_set: ProcessSet) -> None:
        ranks, size = process_set.ranks, self._all_ranks.size
        if ranks[-1] >= size:
            way_out = (
                f" now. With --min-np {ranks[-1] + 1} it always has that rank; or add sets in a reset callback of the "
                "state, for the ranks that there are"
            )
            raise ValueError(
                f"{process_set}: there is no rank {ranks[-1]}; the job has the ranks 0 to {size - 1}"
                f"{way_out if self._is_elastic else ''}"
            )
        is_of_all = ranks == list(range(size)) and not self._is_elastic
        if is_of_all or any(ranks == known.ranks for known in self._sets.values()):
            # Horovod's text.
            raise ValueError(f"Attempted to add a duplicate process set: {process_set}")

    def _unregister(self, set_id: int) -> None:
        group = self._sets[set_id].membership().group
        if group is not None:
            self._controller.close_group(group)
        self._forget(set_id)

    def _forget(self, set_id: int) -> None:
        process_set = self._sets.pop(set_id)
        group = process_set.membership().group
        process_set.register(None)
        if group is not None:
            group.close()
            self._generation.reducers.forget(group)
