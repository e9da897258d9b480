"""
The messages between the ranks and rank 0. The types of their fields say what is allowed in them.

    rank ── TO_RANK_0 ──► Coordinator ── FROM_RANK_0 ──► rank

`hvdlite_wire.codec` encodes and decodes them. What no type can say, such as whether there is a rank of this number,
the coordinator checks. A connection that closes without a `Leaving` means that the rank has crashed or was killed, and
so does a malformed message. A collective is identified by its group's label and its number there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hvdlite_wire.codec import Family

from ..comm.step_clock import Phase, RankPace, Reading
from .call_sites import LONGEST

_MOST_BLOCKED = 64


def _not_too_many(blocked: Sequence[Any]) -> Sequence[Any]:
    if len(blocked) > _MOST_BLOCKED:
        raise ValueError(f"there are more than {_MOST_BLOCKED} of them")
    return blocked


def _of_a_clock(reading: Reading) -> Reading:
    counts = (reading.set_id, reading.steps, reading.sat_out, reading.in_forward, reading.elsewhere)
    if min(counts) < 0 or len(reading.seconds) != len(Phase):
        raise ValueError("it is no reading of a step clock")
    return reading


def _not_too_long(line: str) -> str:
    if len(line) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    return line


class ToRank0:
    """A message from a rank to rank 0."""

    __slots__ = ()


class FromRank0:
    """A message from rank 0 to a rank."""

    __slots__ = ()


# They are not frozen: making a frozen object takes longer, and each small call makes one.

# ---------------------------------------------------------------- from a rank


@dataclass(slots=True)
class Here(ToRank0):
    """The first message of a rank."""

    pid: int


@dataclass(frozen=True, slots=True)
class CallingThread:
    """A thread that calls an operation without a name.

    ``has_rivals``: two threads that were alive at the same time have called such operations. ``has_twins``: another
    thread with the same label has called them, or may have; then full names are compared, not labels.
    ``others``: the labels of the other living threads at this thread's first call.
    """

    label: str
    name: str
    has_rivals: bool = False
    has_twins: bool = False
    others: tuple[str, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether this rank may have meant the operation of another thread."""
        return self.has_rivals or self.has_twins or bool(self.others)

    def may_be(self, other: CallingThread) -> bool:
        """Whether it may have the same role as the other rank's thread."""
        if self.name == other.name:
            return True
        has_twins = self.has_twins or other.has_twins
        if self.label == other.label and not has_twins:
            return True
        # The labels differ. They still match if neither rank has another thread that could be meant.
        return not (
            has_twins or self.has_rivals or other.has_rivals or other.label in self.others or self.label in other.others
        )


@dataclass(slots=True)
class OperationRequest(ToRank0):
    """Requests an operation: its kind's name, and `name`, `same` and `own` as in `Operation`.

    ``ticket`` is the rank's own number for it, which the answer carries. ``members`` is sent empty for all ranks.
    ``caller`` is the calling thread, None if the user named the operation.
    """

    ticket: int
    set_id: int
    kind: str
    name: str | None
    what: str
    members: tuple[int, ...]
    same: Mapping[str, Any]
    own: Any
    caller: CallingThread | None = None

    @property
    def pairs_with(self) -> tuple[int, str, str | None]:
        """The key of the operation, equal on ranks that request the same one."""
        return self.set_id, self.kind, self.name

    @property
    def of_set(self) -> str:
        return "the global process set" if self.set_id == 0 else f"process set {list(self.members)}"


@dataclass(slots=True)
class WaitsIn(ToRank0):
    """All threads that call operations are blocked, one in this; ``begun`` counts collectives by group label."""

    ticket: int
    begun: dict[str, int]


@dataclass(slots=True)
class LivingOptimizers:
    """The numbers of one process set's optimizers that are alive on a rank; ``members`` is sent empty for all ranks."""

    set_id: int
    members: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(slots=True)
class HasJoined(ToRank0):
    average_of_active: bool
    living: tuple[LivingOptimizers, ...]


@dataclass(slots=True)
class Pinned(ToRank0):
    """Answers `Pin`: these optimizers are alive, and are kept until that join ends."""

    join: int
    set_id: int
    numbers: tuple[int, ...]


@dataclass(slots=True)
class WaitingThread:
    """What a thread is blocked in, such as a bucket.

    ``collective`` has its label, its number and its members, None for all ranks; it is None if that is not known.
    """

    what: str
    waited_s: float
    is_operation: bool
    collective: tuple[str, int, tuple[int, ...] | None] | None


@dataclass(slots=True)
class Busy(ToRank0):
    """What a rank's threads are blocked in. Sent when that changes."""

    threads: Annotated[tuple[WaitingThread, ...], _not_too_many]
    is_stuck: bool
    begun: dict[str, int]


@dataclass(slots=True)
class StillWaiting(ToRank0):
    """Sent about twice a second while a rank waits; ``over_count``: how many operations that rank 0 let begin ended."""

    over_count: int


@dataclass(slots=True)
class HasLostRank(ToRank0):
    """An error here was caused by the end of another rank."""


@dataclass(slots=True)
class HasFailed(ToRank0):
    """This operation has failed here."""

    label: str
    number: int
    words: str


@dataclass(slots=True)
class ProgramLine(ToRank0):
    """Answers `AskLine`: where the program is."""

    line: Annotated[str, _not_too_long]


@dataclass(slots=True)
class CloseRound(ToRank0):
    """Asks to close this round of votes (see `control.voting`), having waited long enough."""

    number: int


@dataclass(slots=True)
class PaceReading(ToRank0):
    """A reading of a rank's step clock."""

    reading: Annotated[Reading, _of_a_clock]


@dataclass(slots=True)
class Leaving(ToRank0):
    """The rank leaves in an orderly way, as by hvd.shutdown(), and not because a rank was lost."""


TO_RANK_0: Family[ToRank0] = Family(
    {
        "here": Here,
        "ask": OperationRequest,
        "wait": WaitsIn,
        "join": HasJoined,
        "pinned": Pinned,
        "busy": Busy,
        "alive": StillWaiting,
        "lost": HasLostRank,
        "failed": HasFailed,
        "at": ProgramLine,
        "close_round": CloseRound,
        "pace": PaceReading,
        "bye": Leaving,
    }
)

# ---------------------------------------------------------------- from rank 0


@dataclass(slots=True)
class Welcome(FromRank0):
    """The first message from rank 0. The limits of its `StallRules` are in seconds, None for never."""

    pid: int
    warn_after_s: float | None
    end_after_s: float | None


@dataclass(slots=True)
class Go(FromRank0):
    """Run this operation now, after all that were started before. ``owns`` and ``divisor`` are `Execution`'s."""

    ticket: int
    owns: list[Any]
    divisor: int


@dataclass(slots=True)
class GoAsStandIn(FromRank0):
    """`Go` for a rank that has joined and did not request the operation."""

    set_id: int
    owns: list[Any]
    divisor: int
    kind: str
    what: str
    same: Mapping[str, Any]


@dataclass(slots=True)
class No(FromRank0):
    """The operation is refused; ``error`` is the name of a class of `errors`."""

    ticket: int
    error: str
    words: str


@dataclass(slots=True)
class Pin(FromRank0):
    """List and keep the optimizers alive in this set. Answered even while operations are running."""

    join: int
    set_id: int


@dataclass(slots=True)
class Unpin(FromRank0):
    """Release the pinned optimizers: the join has failed."""


@dataclass(slots=True)
class SitOutSteps(FromRank0):
    """To a rank that has joined: sit out the steps of these optimizers."""

    set_id: int
    numbers: list[int]


@dataclass(slots=True)
class AllJoined(FromRank0):
    last_rank: int


@dataclass(slots=True)
class JoinFailed(FromRank0):
    error: str
    words: str


@dataclass(slots=True)
class RankLeft(FromRank0):
    """This rank was the first to end, or has ended during an operation that connects it to the receiver."""

    rank: int
    ended_normally: bool


@dataclass(slots=True)
class FailedOnRank(FromRank0):
    """An operation has failed on that rank: the others do not wait for it there."""

    rank: int
    label: str
    number: int
    words: str


@dataclass(slots=True)
class MissingRanks:
    """The first ranks that have not requested the receiver's operation, and how many there are."""

    ticket: int
    ranks: tuple[int, ...]
    count: int


@dataclass(slots=True)
class StillHere(FromRank0):
    """Answers `StillWaiting`, with what is missing for the receiver's oldest requests."""

    missing: tuple[MissingRanks, ...]


@dataclass(slots=True)
class AskLine(FromRank0):
    """Report where the program is: ranks wait for this one, or together with it."""


@dataclass(slots=True)
class Paces(FromRank0):
    paces: tuple[RankPace, ...]


@dataclass(slots=True)
class EndProcess(FromRank0):
    """End this process: it has waited too long."""

    words: str


@dataclass(slots=True)
class Rank0HasLostRank(FromRank0):
    """If rank 0 ends, it was not the first."""


@dataclass(slots=True)
class Over(FromRank0):
    """Rank 0 ends normally. ``words`` name the first rank that ended; ``is_peer_loss``: by a crash."""

    words: str
    is_peer_loss: bool


FROM_RANK_0: Family[FromRank0] = Family(
    {
        "welcome": Welcome,
        "go": Go,
        "stand_in": GoAsStandIn,
        "no": No,
        "pin": Pin,
        "unpin": Unpin,
        "sit_out": SitOutSteps,
        "joined": AllJoined,
        "not_joined": JoinFailed,
        "left": RankLeft,
        "failed": FailedOnRank,
        "alive": StillHere,
        "where": AskLine,
        "paces": Paces,
        "end": EndProcess,
        "lost": Rank0HasLostRank,
        "over": Over,
    }
)
