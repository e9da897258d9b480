"""
`ProcessSet`: a subset of the ranks, which users create and pass to collectives.

    ProcessSet(ranks) ── add_process_set, on all ranks ── a process_set_id, and a Group on each member ── removed

The `Registry` of a world numbers its sets and makes their groups; it runs each change as an operation of the
controller, so that all ranks make the changes in the same order. `functions` has the public functions and the set of
all ranks. Functions with an argument ``process_set`` check it with `check_process_set`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..calls.generation import Generation
from ..calls.operation import ADD_PROCESS_SET, Controller, Execution, Kind, Operation
from ..comm.group import Group
from ..errors import CommunicationError, WrongTypeError
from ..values import MOST, shown, whole_number


@dataclass(frozen=True, slots=True)
class SetMembership:
    """A registered set on one rank, whose global number is ``own_rank``; ``group`` is None if it is no member."""

    set_id: int
    own_rank: int
    group: Group | None
    generation: Generation


class ProcessSet:
    """A subset of the ranks, to pass to functions as ``process_set``.

    Register it first, with `hvd.add_process_set` or `hvd.init`.

    ``ranks_or_comm``: global ranks, in any order. `ranks` returns them sorted: the lowest is the set's rank 0.

    Copying returns the set itself. A pickle contains only the ranks, so an unpickled set must be registered again.
    """

    # Returns this process's global rank; `functions` sets it.
    _own_rank: ClassVar[staticmethod[[], int]]

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._ranks = _check_ranks(ranks_or_comm)
        self._registered: SetMembership | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, equal on all ranks; None if the set is not registered, or was removed."""
        return None if self._registered is None else self._registered.set_id

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members, sorted."""
        return list(self._ranks)

    def size(self) -> int | None:
        """The number of members; None, as in Horovod, if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is a member, or would be once the set is registered."""
        if self.process_set_id is None:
            return self._own_rank() in self.ranks
        return self.membership().group is not None

    def rank(self) -> int | None:
        """This rank's number among the members, from 0; None, as in Horovod, if the set is not registered.

        Raises a ValueError if this rank is not a member.
        """
        if self.process_set_id is None:
            return None
        group = self.membership().group
        if group is None:
            # The first sentence is Horovod's.
            raise ValueError(
                f"Process is not part of provided process set. Its ranks are {self.ranks}: call this only where "
                "process_set.included()"
            )
        return group.rank

    def membership(self) -> SetMembership:
        """Returns this rank's `SetMembership`; raises a ValueError if the set is not registered."""
        if self._registered is None:
            raise WrongTypeError(
                f"{self} is not registered, or was removed: call hvd.add_process_set(process_set) on every rank of "
                "the job first, or pass it to hvd.init(process_sets=[...])"
            )
        return self._registered

    def require_group(self, what: str) -> Group:
        """Returns the group of the members; raises a ValueError about ``what`` if this rank is not one."""
        membership = self.membership()
        if membership.group is None:
            # Horovod's text, with the ranks added.
            raise ValueError(
                f"{what[:1].upper()}{what[1:]}: Rank {membership.own_rank} is not a member of the provided "
                f"process set. Its ranks are {self.ranks}: only these may call it, under `if process_set.included():`"
            )
        return membership.group

    @classmethod
    def tell_own_rank(cls, function: Callable[[], int]) -> None:
        """Sets the function that returns this process's global rank; this module cannot import `world`."""
        cls._own_rank = staticmethod(function)

    def register(self, membership: SetMembership | None) -> None:
        """Stores the membership once all ranks have registered the set; None once they have removed it."""
        self._registered = membership

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__

    def __copy__(self) -> ProcessSet:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.ranks,)


def check_process_set(process_set: object, what: str) -> ProcessSet:
    """Returns the argument ``process_set`` of the function ``what``, or raises a TypeError."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{what}: process_set={shown(process_set)} is not a hvd.ProcessSet: pass what hvd.add_process_set returns, "
            "or leave it out for all ranks"
        )
    return process_set


def check_first_sets(process_sets: Iterable[ProcessSet] | str | None) -> list[ProcessSet]:
    """Returns the sets that `hvd.init` must register; ``"dynamic"`` means none, and the sets must differ."""
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(f'process_sets={shown(process_sets)} is neither a list of hvd.ProcessSet nor "dynamic"')
    found: list[ProcessSet] = []
    for number, process_set in enumerate(process_sets):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets: entry number {number}, {shown(process_set)}, is not a hvd.ProcessSet")
        if process_set.process_set_id == 0:  # the set of all ranks, which always exists
            continue
        if any(process_set.ranks == earlier.ranks for earlier in found):
            # Horovod's text.
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {number} is a duplicate: "
                f"{process_set}"
            )
        found.append(process_set)
    return found


def _check_ranks(ranks: Any) -> tuple[int, ...]:
    try:
        items = list(ranks)
    except (TypeError, RuntimeError):
        items = []
    numbers = [rank for rank in map(whole_number, items) if rank is not None and 0 <= rank <= MOST]
    if not items or len(set(numbers)) != len(items):
        raise ValueError(
            f"ProcessSet({shown(ranks)}): pass the global ranks of its members as a list, each once, such as [0, 1]; "
            "MPI communicators are not supported"
        ) from None
    return tuple(sorted(numbers))


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
        """Registers a set, or raises a ValueError on every rank. Each must call it, member or not, and waits."""
        operation = Operation(
            ADD_PROCESS_SET,
            partial(self._register, process_set),
            same={"ranks": process_set.ranks},
            # Rank 0's token is used in the store keys of the set's group: it must be new among all worlds of the store.
            own=uuid.uuid4().hex,
        )
        self._controller.submit(self._all_ranks, operation).wait()

    def remove(self, process_set: ProcessSet) -> bool:
        """Removes a set and closes its group, as `add`; returns False, without waiting, if it is not registered."""
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
