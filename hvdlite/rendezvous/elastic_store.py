"""
What a worker of an elastic job hears from hvdlite-run, and says to it or to other workers, through its store.

    hvdlite-run ── world<generation>/hosts/<n> ── KeyListener ── on_value      (changed hosts, on rank 0)
                ├─ the keys of the generation are revoked ────── on_end        (on every rank)
                └─ ping/<worker>/<n> ─────────────────────────── on_value      (questions, see `respond`)
    Worker(number, last generation) ── INIT_STARTED ── hvdlite-run ── assignment_key ── wait_for_rank
    rank 0, in a function of `hvd.elastic.run` ── elastic/program ── a new worker, or one that waits for a rank
    the latter takes back that it has asked ── INIT_FAILED ── hvdlite-run ── standby/<number> ── take_back
    a program ends ── survive/ended ── a rank in whose step another was lost ── `runtime.survival`

hvdlite-run revokes a generation as soon as one of its workers has ended: ranks that wait for that one might not notice
by themselves, if its host has vanished. Where the others are in a function of `hvd.elastic.run`, a new worker makes its
model before it asks for a rank: so nobody waits for it meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from hvdlite_wire.codec import HostLinks, decode, encode
from hvdlite_wire.store_requests import ANSWERS, Dismissal, RankAssignment, StoreRequest, assignment_key, standby_key

from ..errors import CommunicationError, WorkerRemovedError
from ..log import log
from .launchers import ElasticWorker
from .store_client import StoreClient

_ENDS_WITHIN_S = 1.0
_PAUSE_S = 0.01
_MOST_MS = 10**9 - 1

_PROGRAM = "elastic/program"
_ENDED = b"survive/ended"


class KeyListener:
    """Reads the keys ``<key>/0``, ``<key>/1``, ... of the store in a thread, each as soon as hvdlite-run sets it."""

    def __init__(
        self, client: StoreClient, key: str, on_value: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        """``on_end`` is called with the reason when the keys are revoked."""
        self._client = client
        self._key = key
        self._on_value = on_value
        self._on_end = on_end
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-elastic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        for _ in range(int(_ENDS_WITHIN_S / _PAUSE_S)):
            # More than once, because the thread may just be connecting.
            self._client.hang_up()
            self._thread.join(_PAUSE_S)
            if not self._thread.is_alive():
                break
        self._client.close()

    def _run(self) -> None:
        for number in itertools.count():
            if self._is_closing:
                return
            try:
                (value,) = self._client.get([f"{self._key}/{number}".encode()])
            except OSError:
                # It is closing, or the agent of hvdlite-run is gone, which ends this process too.
                return
            except ValueError as error:
                if not self._is_closing:
                    log.info("elastic: this generation has ended: %s", error)
                    self._on_end(str(error))
                return
            self._on_value(value)


class Keepalive(Protocol):
    """For how long nothing has come from other hosts: `Connections` and `OpeningGroups` of `comm.gloo_sockets`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    def silences(self) -> Mapping[str, float]: ...


def respond(
    worker: ElasticWorker, waited_s: Callable[[], float], keepalive: Callable[[], Keepalive | None]
) -> KeyListener:
    """Starts the thread that shows hvdlite-run that this worker is alive, in all worlds and between them.

    While the process is stopped, or a C extension holds the interpreter's lock, it cannot answer. ``waited_s`` returns
    for how long this process has waited for other ranks, 0 if it does not; ``keepalive`` returns that of the
    connections to other hosts, None if there are none. Both are called on that thread.
    """
    client = StoreClient.from_url(worker.store_url)

    def answer(number: bytes) -> None:
        waited_ms = min(int(1000 * waited_s()), _MOST_MS)
        parts = [b"%d" % worker.number, number, b"%d" % waited_ms]
        # Where this process can open no more files, nothing is known of its links; it answers all the same.
        with contextlib.suppress(OSError):
            if (now := keepalive()) is not None:
                parts.append(encode(HostLinks(now.addresses, now.silences())))
        # Without an agent this process is ended, too.
        with contextlib.suppress(OSError):
            client.request(StoreRequest.ALIVE, parts)

    return KeyListener(client, f"ping/{worker.number}", answer, lambda _: None)


# A step: the optimizer's number, and how many votes of it come before the step's.
Step = tuple[int, int]


class LastVotes(NamedTuple):
    """What a rank has left at the end of its program.

    ``passed``: how many votes it has passed, by an optimizer's number. ``discarded``: steps that it knows are to be
    discarded.
    """

    passed: dict[int, int]
    discarded: frozenset[Step] = frozenset()


def leave_last_votes(client: StoreClient, votes: LastVotes) -> None:
    """Tells other ranks what this one has passed, at the end of its program: it outlives generations."""
    client.request(StoreRequest.APPEND, [_ENDED, encode(votes) + b"\n"])


def read_last_votes(client: StoreClient) -> list[LastVotes]:
    (is_there,) = client.request(StoreRequest.CHECK, [_ENDED])
    return [decode(LastVotes, line) for line in client.get([_ENDED])[0].splitlines()] if int(is_there) else []


def tell_of_program(client: StoreClient, hosts: Sequence[str]) -> None:
    """Tells new workers that the ranks on these hosts are in a function of `hvd.elastic.run`."""
    client.set({f"{_PROGRAM}/0".encode(): json.dumps(list(hosts)).encode()})


def find_program(client: StoreClient) -> tuple[str, ...] | None:
    """Returns the hosts, by rank, of the program that a new worker can join; None if there is none yet."""
    key = f"{_PROGRAM}/0".encode()
    with _answering():
        (is_there,) = client.request(StoreRequest.CHECK, [key])
        return tuple(json.loads(client.get([key])[0])) if int(is_there) else None


@contextlib.contextmanager
def _answering(words: str = "hvdlite-run's agent does not answer") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: {words}: {error}") from error


def wait_for_rank_or_program(
    client: StoreClient, listening: StoreClient, worker: int
) -> RankAssignment | tuple[str, ...]:
    """Waits as `wait_for_rank` for a first rank, or returns what `find_program` does if there is one first.

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
    """Whether a worker that has told hvdlite-run that it takes back its request has been given no rank meanwhile."""
    with _answering():
        return client.get([standby_key(worker)]) == [b"1"]


def wait_for_rank(client: StoreClient, worker: int, after: int) -> RankAssignment:
    """Returns this worker's assignment in a generation later than ``after``; waits until hvdlite-run has given one.

    hvdlite-run must have been told that the worker's init has started. It has a timeout of its own
    (``--elastic-timeout``). Raises a `WorkerRemovedError` if there is no assignment for this worker any more.
    """
    log.info("worker %d waits for hvdlite-run to give it a rank, after generation %d", worker, after)
    with _answering(f"worker {worker} was given no rank"):
        (answer,) = client.get([assignment_key(worker, after)])
    told = ANSWERS.decode(answer)
    if isinstance(told, Dismissal):
        raise WorkerRemovedError(f"worker {worker} has been removed from the job: {told.why}")
    return told
