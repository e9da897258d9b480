"""
Waits for this worker's rank in one generation of an elastic job, which hvdlite-run gives through its store.

    Worker(number, last generation) ── INIT_STARTED ── hvdlite-run ── assignment_key ── RankAssignment

A worker of an elastic job (``hvdlite-run --min-np``) finds its number in the environment, and no rank: it asks for one
in each `hvd.init`. `launchers` makes a `Placement` of it, and `runtime.elastic_world` calls these functions.

Where the program of the ranks that there are is in a function of `hvd.elastic.run`, a new worker first makes its model
and whatever comes before that function, and asks for a rank after that: so nobody waits for it meanwhile.

    rank 0, in the function ── elastic/program ── a new worker, or one that waits for a rank ── its hosts
    the latter takes back that it has asked ── INIT_FAILED ── hvdlite-run ── standby/<number> ── `take_back`
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from hvdlite_wire.assignments import ANSWERS, Dismissal, RankAssignment, assignment_key, standby_key
from hvdlite_wire.store_requests import StoreRequest

from ..errors import CommunicationError, WorkerRemovedError
from ..log import log
from .key_listener import KeyListener
from .store_client import StoreClient

_PROGRAM = "elastic/program"
_PAUSE_S = 0.01


def tell_of_program(client: StoreClient, hosts: Sequence[str]) -> None:
    """Tells new workers that the ranks on these hosts are in a function of `hvd.elastic.run`."""
    client.set({f"{_PROGRAM}/0".encode(): json.dumps(list(hosts)).encode()})


def find_program(client: StoreClient) -> tuple[str, ...] | None:
    """Returns the hosts, by rank, of the program that a new worker can join; None if there is none yet."""
    key = f"{_PROGRAM}/0".encode()
    try:
        (is_there,) = client.request(StoreRequest.CHECK, [key])
        return tuple(json.loads(client.get([key])[0])) if int(is_there) else None
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: hvdlite-run's agent does not answer: {error}") from error


def wait_for_rank_or_program(
    client: StoreClient, listening: StoreClient, worker: int
) -> RankAssignment | tuple[str, ...]:
    """Does what `wait_for_rank` does, for a first rank, or what `find_program` does if there is one first.

    ``listening`` is another client of the same store.
    """
    found: list[tuple[str, ...]] = []
    is_over = threading.Event()

    def interrupt(value: bytes) -> None:
        found.append(tuple(json.loads(value)))
        # More than once, because the other thread may just begin to wait.
        while not is_over.wait(_PAUSE_S):
            client.hang_up()

    listener = KeyListener(listening, _PROGRAM, interrupt, lambda _: None)
    try:
        return wait_for_rank(client, worker, 0)
    except CommunicationError:
        if not found:
            raise
        return found[0]
    finally:
        is_over.set()
        listener.close()


def take_back(client: StoreClient, worker: int) -> bool:
    """Whether hvdlite-run gives this worker no first assignment until it asks again: not if it has given one meanwhile.

    hvdlite-run must have been told that the worker takes back that it has asked; this waits for its answer.
    """
    try:
        (answer,) = client.get([standby_key(worker)])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: hvdlite-run's agent does not answer: {error}") from error
    return answer == b"1"


def wait_for_rank(client: StoreClient, worker: int, after: int) -> RankAssignment:
    """Returns this worker's assignment in a generation later than ``after``; waits until hvdlite-run has given one.

    hvdlite-run must have been told that the worker's init has started. There is no timeout here: hvdlite-run has one
    (``--elastic-timeout``). Raises a `WorkerRemovedError` if there is no assignment for this worker any more.
    """
    log.info("worker %d waits for hvdlite-run to give it a rank, after generation %d", worker, after)
    try:
        (answer,) = client.get([assignment_key(worker, after)])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: worker {worker} was given no rank: {error}") from error
    told = ANSWERS.decode(answer)
    if isinstance(told, Dismissal):
        raise WorkerRemovedError(f"worker {worker} has been removed from the job: {told.why}")
    return told
