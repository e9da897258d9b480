"""
The ranks of an elastic job's workers, which hvdlite-run writes into its store and the workers read there.

    a worker asks after generation g ── assignment_key(worker, g) ── RankAssignment or Dismissal
    a worker that has asked takes that back ── standby_key(worker) ── 1 if it can, 0 if it has been given a rank

`hvdlite_launcher.elastic.rank_assignments` writes them, `hvdlite.rendezvous.wait_for_rank` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .codec import Family
from .field_types import Count


class NewWorkerPolicy(IntEnum):
    """Whether a worker can go on in a generation that has workers which were in none before."""

    WELCOME = 0
    IF_NEEDED = 1
    """Only if there are fewer than --min-np without them: its step is then begun again."""
    AFTERWARDS = 2
    """Not in the next generation, but in the one after. If there are fewer than --min-np ranks without the new workers,
    the job first waits for them."""
    NEVER = 3
    """Its program could not give them the state of its training."""


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A worker's rank in one generation; ``newcomers`` counts the ranks that were in none before."""

    generation: Count
    rank: Count
    size: Count
    newcomers: Count

    @property
    def prefix(self) -> str:
        """The prefix of the keys in the store under which the ranks of this generation connect."""
        return f"world{self.generation}"


@dataclass(frozen=True, slots=True)
class Dismissal:
    """The worker has no rank in any later generation. ``why`` is for the user."""

    why: str


def assignment_key(worker: int, after: int) -> bytes:
    """Returns the key for a worker that asks for a rank in a generation later than ``after``."""
    return b"rank/%d/%d" % (worker, after)


def standby_key(worker: int) -> bytes:
    return b"standby/%d" % worker


ANSWERS: Family[RankAssignment | Dismissal] = Family({"assigned": RankAssignment, "dismissed": Dismissal})
"""The encoding of what `assignment_key` holds."""
