"""
`Seat`: a worker's rank in one generation of an elastic job, which hvdlite-run gives through its store.

    Worker(number, last generation) ── INIT_STARTED ── hvdlite-run ── seat/<number>/<last generation> ── Seat

A worker of an elastic job (``hvdlite-run --min-np``) finds its number in the environment, and no rank: it asks for one
in each `hvd.init`. `launchers` makes a `Placement` of the seat, and `runtime.bootstrap` calls these functions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum

from ..errors import CommunicationError, WorkerRemovedError
from ..log import log
from .store_client import StoreClient


class Newcomers(IntEnum):
    """Whether a worker can go on in a generation that has workers which were in none before."""

    WELCOME = 0
    IF_NEEDED = 1
    """Only if there are fewer than --min-np without them: its step is then begun again."""
    AFTERWARDS = 2
    """In the generation after that, for which they must be there if there are fewer than --min-np without them."""
    NEVER = 3
    """Its program could not give them the state of its training."""


@dataclass(frozen=True, slots=True)
class Seat:
    """This worker's rank in a generation; ``newcomers`` counts its ranks that were in none before."""

    generation: int
    rank: int
    size: int
    newcomers: int

    @property
    def prefix(self) -> str:
        """The prefix of the keys in the store under which the ranks of this generation connect."""
        return f"world{self.generation}"


def wait_for_seat(client: StoreClient, worker: int, after: int) -> Seat:
    """Returns this worker's seat in a generation later than ``after``; waits until hvdlite-run has given one.

    hvdlite-run must have been told that the worker's init has started. There is no timeout here: hvdlite-run has one
    (``--elastic-timeout``). Raises a `WorkerRemovedError` if there is no seat for this worker any more.
    """
    log.info("worker %d waits for hvdlite-run to give it a rank, after generation %d", worker, after)
    try:
        (answer,) = client.get([f"seat/{worker}/{after}".encode()])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: worker {worker} was given no rank: {error}") from error
    told = json.loads(answer)
    if "dismissed" in told:
        raise WorkerRemovedError(f"worker {worker} has been removed from the job: {told['dismissed']}")
    return Seat(told["generation"], told["rank"], told["size"], told["newcomers"])
