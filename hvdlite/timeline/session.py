"""
Starts and stops a timeline of all ranks: clocks are compared, and rank 0 joins all parts into one file.

    start ── can rank 0 write it? ── clocks compared ── each rank records its part
    stop  ── clocks compared again ── parts to rank 0 ── one file

The parts are on one clock from the start, so that they are of use if there is no such end: then rank 0, if it lives,
joins those that it finds beside the file. What the current world is, is not known here.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

from ..comm.group import Group
from ..comm.recorder import Recorder, Recording
from ..control.controller import Controller
from ..control.handle import Handle
from ..control.operation import Kind, Operation
from ..log import log
from . import parts
from .clocks import clock_ahead_ns

_LAST_WAIT_S = 5.0
_START, _STOP = "start_timeline", "stop_timeline"


def start(recorder: Recorder, group: Group, controller: Controller, path: str | os.PathLike[str]) -> None:
    """Record, on every rank, into a file that rank 0 will write; its path counts. Waits for all."""
    if recorder.recording is not None:
        raise ValueError(
            f"start_timeline: a timeline is being recorded already, to {str(recorder.recording.path)!r}: call "
            "hvd.stop_timeline() first"
        )
    # Made absolute now: the program may go elsewhere before it is written.
    own = os.path.abspath(path)
    begin = Operation(
        Kind(_START), lambda execution: _begin(execution.group, recorder, Path(execution.owns[0])), own=own
    )
    controller.submit(group, begin).wait()


def stop(recorder: Recorder, group: Group, controller: Controller) -> None:
    """Write the file. Waits for all; does nothing where nothing is recorded."""
    if recorder.recording is None:
        log.info("stop_timeline: no timeline is being recorded")
        return
    try:
        _submit_end(recorder, group, controller).wait()
    finally:
        recorder.forget()


def leave(recorder: Recorder, group: Group, controller: Controller) -> None:
    """`stop`, if the other ranks come to it soon, else `save`. Raises nothing.

    Soon is a few seconds; where the controller carries out what it is asked for at once, the engine's timeout.
    """
    if recorder.recording is None:
        return
    try:
        handle = _submit_end(recorder, group, controller)
        if handle.ended_within(_LAST_WAIT_S):
            handle.wait()
            recorder.forget()
            return
        cause = f"not all ranks came to their end within {_LAST_WAIT_S:g} s"
    except Exception as error:  # noqa: BLE001 - a program that is about to end well is not to fail by this
        cause = str(error)
    log.warning("the timeline may lack events of other ranks: %s", cause)
    save(recorder, group)


def save(recorder: Recorder, group: Group) -> None:
    """Leave what was recorded in this rank's part, and let rank 0 join those that it finds. Talks to nobody."""
    recording = recorder.recording
    if recording is None:
        return
    recorder.forget()
    if group.rank == 0:
        try:
            parts.join_what_is_there(recording.path)
        except OSError as error:
            log.warning("the timeline cannot be written: %s", error)


def _submit_end(recorder: Recorder, group: Group, controller: Controller) -> Handle:
    return controller.submit(group, Operation(Kind(_STOP), lambda execution: _end(execution.group, recorder)))


def _begin(group: Group, recorder: Recorder, path: Path) -> None:
    problem = None
    if group.rank == 0:
        try:
            parts.prepare(path)
        # A ValueError is that of a path that no file can have, such as one with a NUL in it.
        except (OSError, ValueError) as error:
            problem = str(error)
    now_ns, problem = group.all_gather_json((time.monotonic_ns(), problem), _START)[0]
    if problem is not None:
        raise OSError(f"the timeline {str(path)!r} cannot be written on {group.describe_rank(0)}: {problem}")
    ahead_ns = clock_ahead_ns(group, _START)
    file = parts.open_part(path, group.rank)
    name = group.describe_rank(group.rank)
    recorder.begin(Recording(path, file, group.rank, name, now_ns + ahead_ns, ahead_ns, since_ns=time.monotonic_ns()))


def _end(group: Group, recorder: Recorder) -> None:
    recording = recorder.recording
    assert recording is not None, "who ends has asked before"
    gained_ns = clock_ahead_ns(group, _STOP) - recording.ahead_ns
    recorder.end()
    recording.file.seek(0)
    data = recording.file.read()
    if gained_ns:
        data = parts.set_right(data, gained_ns, time.monotonic_ns() - recording.zero_ns)
    problem = None
    everyones = _gather(group, data)
    if group.rank == 0:
        try:
            parts.write_whole(recording.path, everyones)
        except OSError as error:
            problem = str(error)
    problem = group.all_gather_json(problem, _STOP)[0]
    if problem is not None:
        raise OSError(
            f"the timeline {str(recording.path)!r} cannot be written on {group.describe_rank(0)}: {problem}; each "
            "rank's part lies beside it"
        )
    parts.remove_part(recording.path, group.rank)


def _gather(group: Group, data: bytes) -> list[bytes]:
    """Everyone's data on rank 0, and something on the others. One at a time, and packed: they may be large."""
    packed = zlib.compress(data, level=1)
    result = []
    for rank in range(group.size):
        received = group.broadcast_signed(packed if rank == group.rank else None, rank, _STOP)
        if group.rank == 0:
            result.append(zlib.decompress(received))
    return result
