"""Control messages as the lists that are sent: ``["go", ticket, owns, divisor]`` is `Go`."""

from __future__ import annotations

import json
from typing import Any

from hvdlite.calls.messages import FROM_RANK_0, TO_RANK_0, FromRank0, ToRank0


def sent(message: FromRank0) -> list[Any]:
    """Returns a message of rank 0 as what it is on the wire."""
    return json.loads(FROM_RANK_0.encode(message))


def said(message: ToRank0) -> list[Any]:
    """Returns a message to rank 0 as what it is on the wire."""
    return json.loads(TO_RANK_0.encode(message))


def to_rank_0(*words: Any) -> ToRank0:
    return TO_RANK_0.decode(json.dumps(words))


def from_rank_0(*words: Any) -> FromRank0:
    return FROM_RANK_0.decode(json.dumps(words))
