"""
The faults that ``hvdlite-run --chaos`` causes: their kinds, the points at which they happen, and how a worker asks.

    HVDLITE_CHAOS ── kill@vote:7,segv@voted:9 ──► worker ── ask_key ──► may it? ── answer_key: b"now" or b"later"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

ASKS = b"chaos/ask/"
"""The prefix of the keys by which workers ask for their faults."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "kill": "the worker is killed (SIGKILL)",
        "segv": "a segmentation fault",
        "shm": "SIGBUS, as from a page of shared memory when /dev/shm is full",
        "exception": "a RuntimeError",
        "stop": "the worker is stopped (SIGSTOP)",
        "hang": "a loop that never ends, and that holds the interpreter's lock",
        "agent": "the agent of the worker's host is killed",
        "host": "all workers of its host are killed, and the agent",
        "link": "nothing comes any more over the worker's connections to other hosts",
    }
)
POINTS: Mapping[str, str] = MappingProxyType(
    {
        "begin": "before the first gradient of a step",
        "backward": "within backward, after a bucket was sent",
        "synchronize": "before the last buckets are sent",
        "vote": "all averages have arrived, and the vote on the step has not begun",
        "voted": "after the vote, and before the optimizer uses the averages",
        "stepped": "after the step",
        "leave": "a step's rank was lost, and the others have not left its generation",
        "report": "in the next generation, before the reports on this step",
        "settled": "after these reports",
        "init": "in the first hvd.init() of a worker that is to join",
        "join": "in a worker that joins: its program has made its model, and asks for its first rank",
        "handover": "rank 0, and the ranks that get its state, are about to send and to receive it",
        "commit": "in state.commit()",
    }
)


class WorkerFault(NamedTuple):
    """A fault of one worker: due when it passes ``point`` in or after its ``step``-th optimizer step, from 0."""

    kind: str
    point: str
    step: int


def worker_form(faults: Iterable[WorkerFault]) -> str:
    """Returns the value of HVDLITE_CHAOS for a worker with these faults."""
    return ",".join(f"{kind}@{point}:{step}" for kind, point, step in faults)


def worker_faults(text: str) -> list[WorkerFault]:
    """Returns the faults in a value of HVDLITE_CHAOS."""
    parts = [item.replace("@", ":").split(":") for item in text.split(",")]
    return [WorkerFault(kind, point, int(step)) for kind, point, step in parts]


def ask_key(worker: int) -> bytes:
    """Returns the key by which a worker asks: its value has the question's number, the fault's index and the step."""
    return ASKS + b"%d" % worker


def answer_key(worker: int, number: int) -> bytes:
    """Returns the key of the answer to a worker's question with this number, from 0."""
    return b"chaos/answer/%d/%d" % (worker, number)
