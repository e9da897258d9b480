"""
`Seat`: a worker's rank in one generation of an elastic job, which hvdlite-run gives through its store.

    Worker(number, last generation) ── INIT_STARTED ── hvdlite-run ── seat/<number>/<last generation> ── Seat

A worker of an elastic job (``hvdlite-run --min-np``) finds its number in the environment, and no rank: it asks for one
in each `hvd.init`. `launchers` makes a `Placement` of the seat, and `runtime.elastic_world` calls these functions.

Where the program of the ranks that there are is in a function of `hvd.elastic.run`, a new worker first makes its model
and whatever comes before that function, and asks for a rank after that: so nobody waits for it meanwhile.

    rank 0, in the function ── elastic/program ── a new worker, or one that waits for a seat ── Program
    the latter takes back that it has asked ── INIT_FAILED ── hvdlite-run ── standby/<number> ── `take_back`
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..errors import CommunicationError, WorkerRemovedError
from ..log import log
from .key_listener import KeyListener
from .store_client import StoreClient, StoreRequest

_PROGRAM = "elastic/program"
_PAUSE_S = 0.01


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


@dataclass(frozen=True, slots=True)
class Program:
    """A program that new workers can join: the hosts of its ranks, by rank."""

    hosts: tuple[str, ...]


def tell_of_program(client: StoreClient, hosts: Sequence[str]) -> None:
    """Tells new workers that the ranks on these hosts are in a function of `hvd.elastic.run`."""
    client.set({f"{_PROGRAM}/0".encode(): json.dumps(list(hosts)).encode()})


def find_program(client: StoreClient) -> Program | None:
    """Returns the program that a new worker can join; None if there is none yet."""
    key = f"{_PROGRAM}/0".encode()
    try:
        (is_there,) = client.request(StoreRequest.CHECK, [key])
        return Program(tuple(json.loads(client.get([key])[0]))) if int(is_there) else None
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: hvdlite-run's agent does not answer: {error}") from error


def wait_for_seat_or_program(client: StoreClient, listening: StoreClient, worker: int) -> Seat | Program:
    """Does what `wait_for_seat` does, for a first seat, or returns the program that it can join if that comes first.

    ``listening`` is another client of the same store.
    """
    found: list[Program] = []
    is_over = threading.Event()

    def interrupt(value: bytes) -> None:
        found.append(Program(tuple(json.loads(value))))
        # More than once, because the other thread may just begin to wait.
        while not is_over.wait(_PAUSE_S):
            client.hang_up()

    listener = KeyListener(listening, _PROGRAM, interrupt, lambda _: None)
    try:
        return wait_for_seat(client, worker, 0)
    except CommunicationError:
        if not found:
            raise
        return found[0]
    finally:
        is_over.set()
        listener.close()


def take_back(client: StoreClient, worker: int) -> bool:
    """Whether hvdlite-run gives this worker no first seat until it asks again: not if it has given one meanwhile.

    hvdlite-run must have been told that the worker takes back that it has asked; this waits for its answer.
    """
    try:
        (answer,) = client.get([f"standby/{worker}".encode()])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: hvdlite-run's agent does not answer: {error}") from error
    return answer == b"1"


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
