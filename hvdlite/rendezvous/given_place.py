"""
`GivenPlace`: a rank that a program has given to this process, in place of a launcher's variables.

`hvdlite.ray` makes one in each of Ray's workers; `runtime.world.take_place` keeps it, and `runtime.bootstrap` connects
with it in `hvd.init`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hvdlite_wire.store_requests import StoreRequest

from .placement import Placement


class StoreConnection(Protocol):
    """What carries requests to the store that all ranks share, as `store_client.StoreClient` does."""

    def request(
        self, operation: StoreRequest, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        """Blocks until the answer is there. TimeoutError, ConnectionError and ValueError as in `StoreClient`."""

    def __hash__(self) -> int:
        """By identity: a process keeps one torch store for each connection."""

    def close(self) -> None:
        """Called when a world is left; a later request must work all the same."""


@dataclass(frozen=True)
class GivenPlace:
    """This process's rank and host, and the way to the store through which the ranks find each other.

    ``placement.store_url`` is equal on all ranks of the job, and no other job of this process has it. ``address`` is
    this host's towards the job's other hosts, whose interface gloo then uses; None if there are none.
    """

    placement: Placement
    store: StoreConnection
    address: str | None = None
