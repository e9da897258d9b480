"""
Starts and stops a timeline of all ranks: compares the clocks, and has rank 0 write all parts where they are wanted.

`start`: rank 0 checks that it can write there, the ranks compare their clocks, and each rank records its part.
`stop`: they compare the clocks again, and rank 0 receives the parts and writes them.

The parts are on one clock from the start, so they are useful without `stop`: then rank 0, if it is alive, writes the
parts that it finds on its host. The callers are `runtime.functions`, `runtime.make_world` and
`runtime.world`, which pass the current world.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable

from ..calls.handle import Handle
from ..calls.operation import Controller, Kind, Operation
from ..comm.group import Group
from ..comm.recorder import Recorder, Recording
from ..log import log
from .destination import destination_at, open_part, set_right, shown_path


class NotWrittenError(OSError):
    """Rank 0 cannot write the timeline: raised on every rank."""


_LAST_WAIT_S = 5.0
_CLOCK_ROUNDS = 10
_START, _STOP = "start_timeline", "stop_timeline"


def start(recorder: Recorder, group: Group, controller: Controller, path: str | os.PathLike[str]) -> None:
    """Begin recording on every rank, to what rank 0 will write at its ``path``. Waits for all ranks.

    A path that ends in a slash, or of a directory that is there on rank 0's host, gets a file for each rank.
    """
    if recorder.recording is not None:
        raise ValueError(
            f"start_timeline: a timeline is being recorded already, to {recorder.recording.path!r}: call "
            "hvd.stop_timeline() first"
        )
    begin = Operation(
        Kind(_START), lambda execution: _begin(execution.group, recorder, execution.owns[0]), own=shown_path(path)
    )
    controller.submit(group, begin).wait()


def stop(recorder: Recorder, group: Group, controller: Controller) -> None:
    """Write what was recorded. Waits for all ranks; does nothing if nothing is recorded."""
    if recorder.recording is None:
        log.info("stop_timeline: no timeline is being recorded")
        return
    try:
        _submit_end(recorder, group, controller).wait()
    finally:
        recorder.forget()


def leave(recorder: Recorder, group: Group, controller: Controller) -> None:
    """Call `stop` if the other ranks do so soon, else `save`. Raises nothing.

    It waits a few seconds; where the controller carries out operations as they are submitted, the engine's timeout.
    """
    if recorder.recording is None:
        return
    try:
        handle = _submit_end(recorder, group, controller)
        if handle.ended_within(_LAST_WAIT_S):
            handle.wait()
            recorder.forget()
            return
        cause = f"not all ranks ended their programs within {_LAST_WAIT_S:g} s"
    except NotWrittenError as error:
        recorder.forget()
        if group.rank == 0:  # one line for the job
            log.warning("%s", error)
        return
    except Exception as error:  # noqa: BLE001 - a program that is ending normally must not fail because of this
        cause = str(error)
    log.warning("the timeline may lack events of other ranks: %s", cause)
    save(recorder, group)


def save(recorder: Recorder, group: Group) -> None:
    """Finish this rank's part, and on rank 0 write the parts that it finds. It does not communicate."""
    recording = recorder.recording
    if recording is None:
        return
    recorder.forget()
    if group.rank == 0:
        destination = destination_at(recording.path, group.size)
        try:
            # They stay: their ranks may still be writing.
            destination.write({rank: part.read_bytes() for rank, part in destination.parts_there().items()})
        except OSError as error:
            log.warning("the timeline cannot be written: %s", error)


def _submit_end(recorder: Recorder, group: Group, controller: Controller) -> Handle:
    return controller.submit(group, Operation(Kind(_STOP), lambda execution: _end(execution.group, recorder)))


def _begin(group: Group, recorder: Recorder, path: str) -> None:
    destination, problem = destination_at(path, group.size), None
    if group.rank == 0:
        try:
            destination.prepare()
        # A ValueError means that no file can have this path, such as one with a NUL.
        except (OSError, ValueError) as error:
            problem = str(error)
    now_ns, problem = group.all_gather_json((time.monotonic_ns(), problem), _START)[0]
    if problem is not None:
        raise NotWrittenError(f"the timeline {path!r} cannot be written on {group.describe_rank(0)}: {problem}")
    ahead_ns = clock_ahead_ns(group, _START)
    file = open_part(destination.part_path(group.rank))
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
        data = set_right(data, gained_ns, time.monotonic_ns() - recording.zero_ns)
    problem = None
    everyones = _gather(group, data)
    destination = destination_at(recording.path, group.size)
    if group.rank == 0:
        try:
            destination.write(dict(enumerate(everyones)))
        except OSError as error:
            problem = str(error)
    problem = group.all_gather_json(problem, _STOP)[0]
    if problem is not None:
        raise NotWrittenError(
            f"the timeline {recording.path!r} cannot be written on {group.describe_rank(0)}: {problem}; each "
            "rank's part is in the same directory"
        )
    destination.part_path(group.rank).unlink(missing_ok=True)


def _gather(group: Group, data: bytes) -> list[bytes]:
    """Returns every rank's data on rank 0, and an empty list on the others.

    One rank sends at a time, compressed, because the data may be large.
    """
    packed = zlib.compress(data, level=1)
    result = []
    for rank in range(group.size):
        received = group.broadcast_signed(packed if rank == group.rank else None, rank, _STOP)
        if group.rank == 0:
            result.append(zlib.decompress(received))
    return result


def clock_ahead_ns(group: Group, what: str, now_ns: Callable[[], int] = time.monotonic_ns) -> int:
    """Returns how far this rank's clock is ahead of the clock of the group's first rank.

    The ranks all-gather their times, a few rounds. The shortest interval between two ranks, in each direction, bounds
    the difference of their clocks. On one host all processes read the same clock; between hosts `time.monotonic_ns`
    has arbitrary origins.

    It is 0 if the measurement allows that. Every rank must call it. The error is at most half of a round trip.
    """
    # shortest[i] is the shortest time from sending on rank i, by its clock, to receiving here, by ours. It is the
    # difference between the clocks plus the transfer time.
    shortest: list[int] = []
    for _ in range(_CLOCK_ROUNDS):
        sent = group.all_gather_json(now_ns(), what)
        received = now_ns()
        took = [received - time_ns for time_ns in sent]
        shortest = [min(pair) for pair in zip(shortest or took, took, strict=True)]
    of_all = group.all_gather_json(shortest, what)
    return between(-of_all[0][group.rank], of_all[group.rank][0])


def between(at_least: int, at_most: int) -> int:
    """Returns 0 if it is in the range, else the middle."""
    return 0 if at_least <= 0 <= at_most else (at_least + at_most) // 2
