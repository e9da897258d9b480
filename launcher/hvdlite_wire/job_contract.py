"""
The environment variables that hvdlite-run sets for each worker, the files in the job's directory, and --chaos's faults.

    hvdlite-run ── variables ──► worker ── empty files, a socket, stacks ──► the host's agent
    HVDLITE_CHAOS ── kill@vote:7,segv@voted:9 ──► worker ── ask_key ──► may it? ── answer_key: b"now" or b"later"

`hvdlite_launcher.plan.worker_environment` sets the variables, and docs/variables.md says what each means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

RANK, SIZE = "HVDLITE_RANK", "HVDLITE_SIZE"
LOCAL_RANK, LOCAL_SIZE = "HVDLITE_LOCAL_RANK", "HVDLITE_LOCAL_SIZE"
CROSS_RANK, CROSS_SIZE = "HVDLITE_CROSS_RANK", "HVDLITE_CROSS_SIZE"
WORKER, ELASTIC, HOST = "HVDLITE_WORKER", "HVDLITE_ELASTIC", "HVDLITE_HOST"
STORE, JOB_DIR, CHAOS = "HVDLITE_STORE", "HVDLITE_JOB_DIR", "HVDLITE_CHAOS"

HOROVODS: Mapping[str, str] = MappingProxyType(
    {
        HOST: "HOROVOD_HOSTNAME",
        **{
            name: name.replace("HVDLITE", "HOROVOD")
            for name in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE, ELASTIC)
        },
    }
)
"""The names under which horovodrun sets the same, by ours."""

STACKS_SIGNAL = 62
"""The signal on which a worker's processes write their stacks: a real-time signal that programs hardly use."""

Note = Literal["peer-lost", "peer-left", "left", "apart", "met", "progress"]
"""What a worker says by a file, before it ends.

``peer-lost``: it ends only because it lost a peer, so it does not count as the cause; ``peer-left`` besides: that peer
was ending its program without an error. ``left``: the worker itself does that. ``apart``: a program of the worker
trained and met no other rank. ``met``: one has met others. ``progress`` says how far it had come.
"""


def note_file(job_dir: str, worker: int | str, note: Note) -> str:
    return os.path.join(job_dir, f"worker.{worker}.{note}")


def report_socket(job_dir: str, pid: int) -> str:
    """Returns the path of the socket on which a worker's process answers for reports."""
    return os.path.join(job_dir, f"r{pid}")


def stacks_file(job_dir: str, pid: int) -> str:
    """Returns the path of the file to which a process writes its stacks on `STACKS_SIGNAL`."""
    return report_socket(job_dir, pid) + ".stacks"


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
    parts = [item.replace("@", ":").split(":") for item in text.split(",")]
    return [WorkerFault(kind, point, int(step)) for kind, point, step in parts]


def ask_key(worker: int) -> bytes:
    """Returns the key by which a worker asks: its value has the question's number, the fault's index and the step."""
    return ASKS + b"%d" % worker


def answer_key(worker: int, number: int) -> bytes:
    return b"chaos/answer/%d/%d" % (worker, number)
