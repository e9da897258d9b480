"""
The environment variables that hvdlite-run sets for each worker, and the files in the job's directory.

    hvdlite-run ── variables ──► worker ── empty files, a socket, stacks ──► the host's agent

`hvdlite_launcher.plan.worker_environment` sets the variables; what each means is told there. `hvdlite.environment` has
their rows of the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

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
