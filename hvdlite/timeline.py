"""
Starts and stops a timeline of all ranks: compares the clocks, and has rank 0 write all parts where they are wanted.

    start ── rank 0 checks that it can write ── clocks are compared ── each rank records its part (`comm.recorder`)
    stop ── clocks are compared again ── rank 0 receives the parts and writes them

    FILE                   all ranks, for Perfetto; each rank's part is FILE.rank.N.part until then
    DIRECTORY/rankN.json   one rank, for tools that read a trace per rank; its part is DIRECTORY/rankN.json.part

The parts are on one clock from the start, so they are useful without `stop`: then rank 0, if it is alive, writes the
parts that it finds on its host. A part is Chrome-trace JSON, one event on each line, without the closing bracket, which
Perfetto does not need. `runtime` calls the functions here with the current world.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from hvdlite_wire import safe_paths

from .calls.handle import Handle
from .calls.operation import Controller, Kind, Operation
from .comm.group import Group
from .comm.recorder import Recorder, Recording
from .log import log


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
        destination = Destination(recording.path, group.size)
        try:
            # They stay: their ranks may still be writing.
            destination.write({rank: part.read_bytes() for rank, part in destination.parts_there().items()})
        except OSError as error:
            log.warning("the timeline cannot be written: %s", error)


def _submit_end(recorder: Recorder, group: Group, controller: Controller) -> Handle:
    return controller.submit(group, Operation(Kind(_STOP), lambda execution: _end(execution.group, recorder)))


def _begin(group: Group, recorder: Recorder, path: str) -> None:
    destination, problem = Destination(path, group.size), None
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
    destination = Destination(recording.path, group.size)
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
    """Returns how far this rank's clock is ahead of that of the group's first rank. Every rank must call it.

    The ranks all-gather their times, a few rounds. The shortest interval between two ranks, in each direction, bounds
    the difference of their clocks; it is 0 if that allows it, as on one host, where all processes read the same clock.
    The error is at most half of a round trip.
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
    at_least, at_most = -of_all[0][group.rank], of_all[group.rank][0]
    return 0 if at_least <= 0 <= at_most else (at_least + at_most) // 2


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, which ends in a slash if it is that of a directory: it does already, or there is one.

    Made absolute at the start of a timeline, because a program may change its directory before the end.
    """
    text = os.fspath(path)
    is_directory = text.endswith("/") or os.path.isdir(text)
    return os.path.join(os.path.abspath(text), "") if is_directory else os.path.abspath(text)


class Destination:
    """The files of a timeline on rank 0's host, and each rank's part on its own, at a path of `shown_path`'s."""

    def __init__(self, path: str, world_size: int) -> None:
        self._world_size = world_size
        self._path = Path(path)
        self._is_directory = path.endswith("/")
        self._directory = self._path if self._is_directory else self._path.parent
        # What stands before and after the rank in the name of a part.
        self._around = ("rank", ".json.part") if self._is_directory else (f"{self._path.name}.rank.", ".part")

    def prepare(self) -> None:
        """Check that the files can be written, an OSError if not, and remove parts of an earlier timeline."""
        safe_paths.require_directory(str(self._path))
        if self._is_directory:
            self._directory.mkdir(exist_ok=True)
            safe_paths.require_directory(str(self._trace_path(0)))
        elif self._path.exists() and not self._path.is_file():
            # The file is replaced in the end, which would destroy a device such as /dev/null.
            raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(self._path))
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=self._around[0]):
            pass
        _remove(self.parts_there())

    def part_path(self, rank: int) -> Path:
        """Returns the path of the part that a rank writes, on its own host."""
        before, after = self._around
        return self._directory / f"{before}{rank}{after}"

    def parts_there(self) -> dict[int, Path]:
        """Returns the parts found on this host, by rank."""
        return numbered(self._directory, *self._around)

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        """Write the ranks' parts as complete traces."""
        if not self._is_directory:
            write_trace(self._path, "", by_rank.values())
            return
        for rank, data in by_rank.items():
            # As in traces of torch.profiler, and before the events: tools look for the rank in the first lines.
            info = {"backend": "hvdlite", "rank": rank, "world_size": self._world_size}
            write_trace(self._trace_path(rank), f'"distributedInfo": {json.dumps(info)}, ', [data])
        # Whoever reads the directory must not take a rank of an earlier, larger job for one of this.
        earlier = numbered(self._directory, "rank", ".json")
        _remove({rank: path for rank, path in earlier.items() if rank not in by_rank})

    def _trace_path(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"


def _remove(paths: Mapping[int, Path]) -> None:
    for path in paths.values():
        path.unlink(missing_ok=True)


def open_part(path: Path) -> IO[bytes]:
    """Open a new part. If its directory is missing or cannot be written, it is a temporary file without a name."""
    try:
        return open(safe_paths.new_file(str(path)), "w+b", buffering=0)
    except OSError:
        return tempfile.TemporaryFile("w+b", buffering=0)


def events_of(data: bytes) -> list[str]:
    """Returns the events of a part as JSON; a line cut short because its rank was killed is left out."""
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [line.removesuffix(",") for line in lines if line.endswith("},")]


def set_right(data: bytes, gained_ns: int, over_ns: int) -> bytes:
    """Returns a part with its times corrected to the common clock.

    The rank's clock has gained ``gained_ns`` on it, evenly over the first ``over_ns`` of the part.
    """
    lines = []
    for line in events_of(data):
        event = json.loads(line)
        if "ts" in event:
            event["ts"] = round(event["ts"] * (1 - gained_ns / over_ns), 3)
        lines.append(json.dumps(event))
    return "".join(f"{line},\n" for line in lines).encode()


def write_trace(path: Path, head: str, parts: Iterable[bytes]) -> None:
    """Write the events of the parts as one complete trace, atomically. ``head`` is JSON of the fields before them."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with open(safe_paths.new_file(str(unfinished)), "w") as file:
            file.write(f'{{"displayTimeUnit": "ms", {head}"traceEvents": [\n')
            file.write(",\n".join(line for data in parts for line in events_of(data)))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def numbered(directory: Path, before: str, after: str) -> dict[int, Path]:
    """Returns the files of a directory whose names are a rank between ``before`` and ``after``, in order of ranks."""
    found = {
        int(number): entry
        for entry in directory.iterdir()
        if (number := entry.name.removeprefix(before).removesuffix(after)).isdecimal()
        and number.isascii()
        and entry.name == f"{before}{number}{after}"
        and not entry.is_symlink()
    }
    return dict(sorted(found.items()))
