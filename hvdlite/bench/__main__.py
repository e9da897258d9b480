"""
`python -m hvdlite.bench`: runs a command on all ranks, and keeps what was measured however the run ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch

from ..errors import says_peer_lost
from ..rendezvous.launchers import read_placement
from ..runtime.bootstrap import World
from ..runtime.world import current_world, init
from .arguments import UsageError
from .command_line import PROGRAM, Request, parse
from .ranks import Ranks

_USAGE = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run the command; returns the exit code. Every rank must call it, in a process that then ends."""
    for each in _SIGNALS:
        # One that is ignored, as in a background job, stays so.
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)
    try:
        return _run()
    except SystemExit:
        # argparse has printed the help.
        _write("", sys.stdout, end="")
        raise
    except KeyboardInterrupt as interrupt:
        # An orderly exit would wait for collectives that never end.
        os._exit(128 + interrupt.args[0])


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signum)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in _SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def _run() -> int:
    placement = read_placement(os.environ)
    rank = 0 if placement is None else placement.rank
    request = problem = None
    try:
        request = parse(None, is_first=rank == 0)
    except UsageError as error:
        problem = str(error)
        if placement is None:
            return _complain(problem)
    init()
    world = current_world()
    # Ranks may differ in what is installed, and rank 0 alone writes files: all go on, or none.
    problems = world.group.all_gather_json(problem, "start of the benchmark")
    problem = next((each for each in problems if each is not None), None)
    if problem is None:
        assert request is not None, "there is no problem"
        try:
            return _measure(request, world)
        except UsageError as error:
            problem = f"{PROGRAM} {request.command.name}: {error}"
    code = _complain(problem) if rank == 0 else _USAGE
    # If a rank ended before rank 0 has written, the launcher would end that one too.
    world.group.all_gather_json(None, "end of the benchmark")
    return code


def _measure(request: Request, world: World) -> int:
    ranks = Ranks(world, request.device_type)
    request.command.prepare(ranks)
    ranks.show_progress(request.command.turns)
    code, complete = 0, False
    try:
        request.command.run(ranks)
        complete = True
    except RuntimeError as error:
        if says_peer_lost(error):
            # On Ctrl-C other ranks may end before the signal arrives here.
            time.sleep(1)
        raise
    finally:
        with _signals_ignored():
            ranks.hide_progress()
            if ranks.rank == 0:
                code = _report(request, ranks, complete)
    ranks.close()
    return code


def _report(request: Request, ranks: Ranks, complete: bool) -> int:
    """Print the report and write the files; returns the exit code."""
    try:
        own_version = version("hvdlite")
    except PackageNotFoundError:
        own_version = "of a source tree"
    name, report, code = request.command.name, request.command.report(), 0
    about: dict[str, Any] = {
        "command": name,
        "options": request.options,
        "complete": complete,
        "hvdlite": own_version,
        "torch": torch.__version__,
        "ranks": ranks.size,
        "hosts": sorted(set(ranks.group.hosts)),
        "device": ranks.device.type,
        "threads_per_rank": torch.get_num_threads(),
    }
    try:
        _write(str(report) + ("" if complete else "\n\ninterrupted: this is what was measured by then"), sys.stdout)
    except OSError as error:
        code = _complain(f"{PROGRAM} {name}: standard output cannot be written: {error.strerror}", 1)
    try:
        for path in request.files.write(report, about):
            _write(f"{PROGRAM}: wrote {path}", sys.stderr)
    except OSError as error:
        code = _complain(f"{PROGRAM} {name}: {error}", 1)
    return code


def _complain(what: str, code: int = _USAGE) -> int:
    _write(what, sys.stderr)
    return code


def _write(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Write and flush. Where nobody reads any more (``| head``), this and later text is dropped."""
    if stream is None:
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError as error:
        # What is left in the stream would raise again as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


if __name__ == "__main__":
    sys.exit(main())
