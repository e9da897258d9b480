"""
The public functions `start_timeline` and `stop_timeline`.

How it is made is in `timeline.session`; what is in it, in `optim.step_trace` and `comm.recorder`.
"""

from __future__ import annotations

import os

from ..log import log
from ..timeline import session as timeline
from ..values import is_file_name, shown
from .world import current_world


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what happens when on all ranks, until `stop_timeline`, as a Chrome trace for ui.perfetto.dev.

    Every rank must call it; it waits for all. There is one file, on rank 0's host and clock, with a process for each
    rank and rows for its steps, its buckets of gradients and its other operations. It is there once `stop_timeline`
    has returned, or the program has ended; until then, and where a rank did not live to bring its own, each rank's
    part of it lies beside it, as ``<file_path>.rank.N.part``, which can be looked at too.

    An OSError on every rank if rank 0 cannot write the file; a ValueError where one is being recorded. The variable
    ``HVDLITE_TIMELINE``, or ``hvdlite-run --timeline-filename``, starts one in `init`. ``mark_cycles``: there are no
    cycles here, as Horovod has them; steps are marked in any case.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"start_timeline: file_path={shown(file_path)} is not a path: pass a str or a pathlib.Path")
    if not is_file_name(path):
        raise ValueError(
            f"start_timeline: file_path={shown(file_path)} can name no file: it is empty, or has a NUL in it"
        )
    world = current_world()
    if mark_cycles:
        log.info("start_timeline: mark_cycles marks nothing: there are no cycles, and steps are marked in any case")
    timeline.start(world.generation.recorder, world.group, world.controller, path)


def stop_timeline() -> None:
    """Write the timeline, and record nothing any more. Every rank must call it; it waits for all.

    Where none was started it says so in the log, and no more. An OSError on every rank if rank 0 cannot write it.
    """
    world = current_world()
    timeline.stop(world.generation.recorder, world.group, world.controller)
