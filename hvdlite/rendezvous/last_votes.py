"""
What a rank leaves in hvdlite-run's store at the end of its program, for those that are still in their last step.

    a program ends ── survive/ended ── a rank in whose step another was lost ── `runtime.survival`

The key holds a line of JSON for each such rank, and outlives generations: what a rank has passed stays true.
"""

from __future__ import annotations

import json
from typing import Any

from hvdlite_wire.store_requests import StoreRequest

from .store_client import StoreClient

_ENDED = b"survive/ended"


def leave_last_votes(client: StoreClient, votes: Any) -> None:
    """Adds what this rank says at the end of its program; it is JSON."""
    client.request(StoreRequest.APPEND, [_ENDED, json.dumps(votes).encode() + b"\n"])


def read_last_votes(client: StoreClient) -> list[Any]:
    """Returns what ranks have said at the ends of their programs so far."""
    (is_there,) = client.request(StoreRequest.CHECK, [_ENDED])
    return [json.loads(line) for line in client.get([_ENDED])[0].splitlines()] if int(is_there) else []
