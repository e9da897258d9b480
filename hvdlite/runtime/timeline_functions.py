"""
The public functions `start_timeline` and `stop_timeline`; they check the arguments and call `timeline.session`.

`buckets.step_trace` and `comm.recorder` record what the timeline contains.
"""

from __future__ import annotations

import os

from .. import forks
from ..log import log
from ..outside_graphs import keep_outside_graphs
from ..timeline import session as timeline
from ..values import is_file_name, shown
from .world import current_world


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks until `stop_timeline`, as a Chrome trace for ui.perfetto.dev.

    Every rank must call it, and waits for all. The trace is one file on rank 0's host, in rank 0's time. Each rank is a
    process in it, with rows for its steps, its buckets of gradients and its other operations. The file is complete when
    `stop_timeline` has returned or the program has ended. Until then, each rank writes a part next to it, as
    ``<file_path>.rank.N.part``; a part can be opened too, and remains if its rank crashes.

    If ``file_path`` ends in a slash, or is a directory on rank 0's host, each rank N gets a file ``rankN.json`` in it
    instead (its part is ``rankN.json.part``), which begins with a ``distributedInfo`` as torch.profiler's traces do.
    Such files of an earlier timeline are replaced, and those of ranks that this job does not have are removed.

    Raises an OSError on every rank if rank 0 cannot write there, and a ValueError if a timeline is already being
    recorded. The variable ``HVDLITE_TIMELINE``, or ``hvdlite-run --timeline-filename``, starts a timeline in `init`.
    ``mark_cycles`` has no effect: hvdlite has no cycles like Horovod's, and steps are always marked.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"start_timeline: file_path={shown(file_path)} is not a path: pass a str or a pathlib.Path")
    if not is_file_name(path):
        raise ValueError(
            f"start_timeline: file_path={shown(file_path)} is not a valid file name: it is empty, or has a NUL in it"
        )
    world = current_world()
    forks.require_rank("hvd.start_timeline()")
    if mark_cycles:
        log.info("start_timeline: mark_cycles has no effect: hvdlite has no cycles, and always marks steps")
    timeline.start(world.generation.recorder, world.group, world.controller, path)


def stop_timeline() -> None:
    """Stop recording and write the timeline. Every rank must call it, and waits for all.

    If no timeline was started, it only logs that. Raises an OSError on every rank if rank 0 cannot write the file.
    """
    world = current_world()
    forks.require_rank("hvd.stop_timeline()")
    timeline.stop(world.generation.recorder, world.group, world.controller)


keep_outside_graphs(globals())
