"""
What a rank leaves in hvdlite-run's store at the end of its program, for those that are still in their last step.

    a program ends ── survive/ended ── a rank in whose step another was lost ── `runtime.survival`

The key holds a line of JSON for each such rank, and outlives generations: what a rank has passed stays true.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdlite_wire.codec import decode, encode
from hvdlite_wire.store_requests import StoreRequest

from .store_client import StoreClient

_ENDED = b"survive/ended"

# A step: the optimizer's number, and how many votes of it come before the step's.
Step = tuple[int, int]


class LastVotes(NamedTuple):
    """What a rank has left at the end of its program.

    ``passed``: by an optimizer's number, how many votes it has passed. ``discarded``: steps that are to be discarded,
    as far as it knows.
    """

    passed: dict[int, int]
    discarded: frozenset[Step] = frozenset()


def leave_last_votes(client: StoreClient, votes: LastVotes) -> None:
    """Adds what this rank says at the end of its program."""
    client.request(StoreRequest.APPEND, [_ENDED, encode(votes) + b"\n"])


def read_last_votes(client: StoreClient) -> list[LastVotes]:
    """Returns what ranks have said at the ends of their programs so far."""
    (is_there,) = client.request(StoreRequest.CHECK, [_ENDED])
    return [decode(LastVotes, line) for line in client.get([_ENDED])[0].splitlines()] if int(is_there) else []
