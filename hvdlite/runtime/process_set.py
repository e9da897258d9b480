"""
`ProcessSet`: a subset of the ranks, which users create and pass to collectives.

    ProcessSet(ranks) ── add_process_set, on all ranks ── process_set_id, and a Group on its members ── removed

`process_set_registry` registers and numbers them; the set of all ranks is in `process_set_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..comm.group import Group
from ..control.generation import Generation
from ..errors import WrongTypeError
from ..values import MOST, shown, whole_number


@dataclass(frozen=True, slots=True)
class Membership:
    """What a registered set is to one rank, whose global number is ``own_rank``; no group if it is no member.

    ``generation`` is that of the world in which it is registered.
    """

    set_id: int
    own_rank: int
    group: Group | None
    generation: Generation


class ProcessSet:
    """Some of the ranks, to pass as ``process_set`` once `hvd.add_process_set`, or `hvd.init`, has registered it.

    ``ranks_or_comm``: global ranks, in any order. `ranks` are sorted: the set's first rank is the lowest.

    A copy is the set itself. Pickled, it is its ranks: what is loaded must be registered anew.
    """

    # This rank's number among all, as who knows the world says it.
    _own_rank: ClassVar[staticmethod[[], int]]

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._ranks = _check_ranks(ranks_or_comm)
        self._registered: Membership | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, equal on all ranks; None before it is registered, and after it is removed."""
        return None if self._registered is None else self._registered.set_id

    @property
    def ranks(self) -> list[int]:
        """The global ranks of its members, in order."""
        return list(self._ranks)

    def size(self) -> int | None:
        """How many ranks are members; None, as in Horovod, where the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is a member, or would be once the set is registered."""
        if self.process_set_id is None:
            return self._own_rank() in self.ranks
        return self.membership().group is not None

    def rank(self) -> int | None:
        """This rank's place among the members, from 0; a ValueError if it is none.

        None, as in Horovod, where the set is not registered.
        """
        if self.process_set_id is None:
            return None
        group = self.membership().group
        if group is None:
            # The first words are Horovod's.
            raise ValueError(
                f"Process is not part of provided process set. Its ranks are {self.ranks}: ask for a place only where "
                "process_set.included()"
            )
        return group.rank

    def membership(self) -> Membership:
        """What the set is to this rank, or a ValueError that says to register it."""
        if self._registered is None:
            raise WrongTypeError(
                f"{self} is not registered, or was removed: call hvd.add_process_set(process_set) on every rank of "
                "the job first, or pass it to hvd.init(process_sets=[...])"
            )
        return self._registered

    def require_group(self, what: str) -> Group:
        """The members, or a ValueError if this rank is none of them; ``what`` is what it wanted to do."""
        membership = self.membership()
        if membership.group is None:
            # But for the ranks, Horovod's words.
            raise ValueError(
                f"{what[:1].upper()}{what[1:]}: Rank {membership.own_rank} is not a member of the provided "
                f"process set. Its ranks are {self.ranks}: only these may call it, under `if process_set.included():`"
            )
        return membership.group

    @classmethod
    def tell_own_rank(cls, function: Callable[[], int]) -> None:
        """Have sets ask here which rank this is, since they stand below whatever knows it."""
        cls._own_rank = staticmethod(function)

    def register(self, membership: Membership | None) -> None:
        """Note that all ranks know the set under this number, or None that they do not any more."""
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
    """Raise a TypeError unless it is a process set; ``what`` is whose argument it is."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{what}: process_set={shown(process_set)} is not a hvd.ProcessSet: pass what hvd.add_process_set returns, "
            "or leave it out for all ranks"
        )
    return process_set


def check_first_sets(process_sets: Iterable[ProcessSet] | str | None) -> list[ProcessSet]:
    """What `hvd.init` is to register; a ValueError if that is not a list of different sets, or ``"dynamic"``."""
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(f'process_sets={shown(process_sets)} is neither a list of hvd.ProcessSet nor "dynamic"')
    found: list[ProcessSet] = []
    for number, process_set in enumerate(process_sets):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets: entry number {number}, {shown(process_set)}, is not a hvd.ProcessSet")
        if process_set.process_set_id == 0:
            # That of all ranks, which is there anyway.
            continue
        if any(process_set.ranks == earlier.ranks for earlier in found):
            # Horovod's words.
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
        raise ValueError(
            f"ProcessSet({shown(ranks)}): pass the global ranks of its members as a list, such as [0, 1]; "
            "communicators of MPI's are not known here"
        ) from None
    if not items:
        raise ValueError("ProcessSet([]): a process set has one rank at least")
    numbers = [_check_rank(item) for item in items]
    repeated = next((rank for rank in numbers if numbers.count(rank) > 1), None)
    if repeated is not None:
        raise ValueError(f"ProcessSet({numbers}): rank {repeated} appears twice")
    return tuple(sorted(numbers))


def _check_rank(item: Any) -> int:
    rank = whole_number(item)
    if rank is None or not 0 <= rank <= MOST:
        raise ValueError(f"ProcessSet: {shown(item)} is not a rank, a whole number from 0")
    return rank
