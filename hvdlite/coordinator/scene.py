"""
`Scene`: what rank 0 knows of all ranks. `negotiation` writes it; `deadlocks` and `stall` read it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..calls.messages import OperationRequest
from .pending import Id, Pending


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """One wait of a rank's thread: in an operation that is running, or in something else such as a bucket.

    ``collective`` is its group's label, its number in that group, and the ranks that take part.
    """

    what: str
    since_s: float
    is_operation: bool = False
    collective: tuple[str, int, tuple[int, ...]] | None = None


class Joined(NamedTuple):
    """A rank that has joined: whether averages are over the other ranks only, and when it joined."""

    average_of_active: bool
    since_s: float


@dataclass(slots=True)
class Scene:
    """The state of every rank, as far as rank 0 knows.

    ``pending`` are the operations that some ranks have requested and others have not, in the order of the requests. The
    others are by rank:

    - ``pids``: its process id on its host.
    - ``waiting``: the pending operations that it is blocked in. A blocked rank sends no other request.
    - ``busy``: everything else that it is blocked in, the longest wait first; ``stuck``: the blocked ranks in which no
      thread can request anything until a wait ends.
    - ``begun``: how many collectives of each group it had begun when it was last blocked.
    - ``under_way``: the operations that have begun there and are not reported as ended; ``over_count``: how many are.
    - ``joined``: those that have, in their order.
    - ``ended``: those that have, the first one first: whether normally, and not by a crash.
    """

    hosts: Sequence[str]
    everybody: tuple[int, ...] = field(init=False)
    pending: dict[Id, Pending] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, set[Id]] = field(default_factory=dict)
    busy: dict[int, list[BlockedThread]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    begun: dict[int, Mapping[str, int]] = field(default_factory=dict)
    under_way: defaultdict[int, deque[OperationRequest]] = field(default_factory=lambda: defaultdict(deque))
    over_count: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    joined: dict[int, Joined] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.everybody = tuple(range(len(self.hosts)))

    def set_busy(self, rank: int, blocked: Sequence[BlockedThread], *, is_stuck: bool) -> None:
        """Notes what ``rank`` is blocked in; an empty sequence if nothing."""
        if blocked:
            self.busy[rank] = sorted(blocked, key=lambda each: each.since_s)
        else:
            self.busy.pop(rank, None)
        (self.stuck.add if blocked and is_stuck else self.stuck.discard)(rank)

    def over(self, rank: int, count: int) -> None:
        """Notes how many of the operations that have begun on ``rank`` have ended there, in all."""
        under_way = self.under_way[rank]
        while self.over_count[rank] < count and under_way:
            under_way.popleft()
            self.over_count[rank] += 1
