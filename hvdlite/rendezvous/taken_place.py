"""Marks a rank's place as taken, for the programs that the rank starts: they inherit its environment, and are no ranks.

    init ── mark ── HVDLITE_PLACE_TAKEN, in os.environ ── a child's init ── require_free ── LaunchEnvironmentError

Without it a child would come between its parent and the other ranks: their data would not fit, or would never come.
Which place it is, is part of the mark: a job that a rank starts has other places.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableMapping

from ..environment import PLACE_TAKEN
from ..errors import LaunchEnvironmentError
from .launchers import ElasticWorker, read_elastic_worker, read_placement
from .placement import Placement

# Where launchers name the job, which a placement does not.
_OF_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT"),
)


def place_in(environ: MutableMapping[str, str]) -> ElasticWorker | Placement | None:
    """Returns the place in a job that these variables give to a process; None if they give none, or none that is whole.

    A process whose group was made before `hvd.init`, as Ray's are, may have some of a launcher's variables.
    """
    try:
        return read_elastic_worker(environ) or read_placement(environ)
    except LaunchEnvironmentError:
        return None


def mark_taken(environ: MutableMapping[str, str] = os.environ) -> None:
    """Notes that this process has the place in ``environ``, unless it is the only one of its job."""
    place = place_in(environ)
    if place is None or (isinstance(place, Placement) and place.size == 1):
        return
    environ[PLACE_TAKEN] = f"{os.getpid()} {_digest(place, environ)}"


def require_free(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raises a LaunchEnvironmentError if another process has the place in ``environ``, and has started this one."""
    pid, _, digest = environ.get(PLACE_TAKEN, "").partition(" ")
    if not digest or pid == str(os.getpid()):
        return
    place = place_in(environ)
    if place is not None and _digest(place, environ) == digest:
        raise LaunchEnvironmentError(
            f"hvd.init(): this process (pid {os.getpid()}) was started by a rank of the job (pid {pid}), and has "
            "that rank's place by its environment: leave hvd.init() out here; or start it with an environment without "
            "the launcher's variables, to be the only rank of a job of its own"
        )


def _digest(place: ElasticWorker | Placement, environ: MutableMapping[str, str]) -> str:
    named = [environ.get(name) for name in _OF_JOB]
    return hashlib.sha256(repr((place, named)).encode()).hexdigest()[:16]
