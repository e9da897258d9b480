"""
`python -m hvdlite.bench`: runs a command on all ranks, and reports what was measured, even after Ctrl-C or an error.

It parses the command line with `command_line`, creates `ranks.Ranks`, and calls the command.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import torch

from ..errors import says_peer_lost
from ..rendezvous.launchers import read_placement
from ..runtime.make_world import World, own_version
from ..runtime.world import current_world, init
from .arguments import OptionError
from .command_line import PROGRAM, BenchRequest, parse
from .ranks import Ranks

_USAGE = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Runs the command, and returns the exit code. Every rank must call it, in a process that then ends."""
    for each in _SIGNALS:
        # A signal that is ignored, as SIGINT in a background job, stays ignored.
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)
    try:
        return _run()
    except SystemExit:
        # argparse has printed the help.
        _write("", sys.stdout, end="")
        raise
    except KeyboardInterrupt as interrupt:
        # A normal exit would wait for collectives that never end.
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
    request = problem = None
    try:
        request = parse(None, is_first=placement is None or placement.rank == 0)
    except OptionError as error:
        problem = str(error)
    init()
    world = current_world()
    # A problem may exist on one rank only: ranks may have different packages, and only rank 0 checks the files. All
    # ranks must continue, or none.
    problems = world.group.all_gather_json(problem, "start of the benchmark")
    problem = next((each for each in problems if each is not None), None)
    if request is not None and problem is None:
        try:
            return _measure(request, world)
        except OptionError as error:
            problem = f"{PROGRAM} {request.command.name}: {error}"
    if world.group.rank == 0:
        _write(problem or "", sys.stderr)
    # No rank may exit before rank 0 has written: the launcher would kill rank 0.
    world.group.all_gather_json(None, "end of the benchmark")
    return _USAGE


def _measure(request: BenchRequest, world: World) -> int:
    ranks = Ranks(world, request.device_type)
    request.command.prepare(ranks)
    ranks.show_progress(request.command.turns)
    code, complete = 0, False
    try:
        request.command.run(ranks)
        complete = True
    except RuntimeError as error:
        if says_peer_lost(error):
            # On Ctrl-C other ranks may end before this rank gets the signal: give it time to arrive.
            time.sleep(1)
        raise
    finally:
        with _signals_ignored():
            ranks.hide_progress()
            if ranks.rank == 0:
                code = _report(request, ranks, complete)
    ranks.close()
    return code


def _report(request: BenchRequest, ranks: Ranks, complete: bool) -> int:
    """Prints the report, writes the files, and returns the exit code."""
    name, report = request.command.name, request.command.report()
    code = report.code
    about = {
        "command": name,
        "options": {name: str(value) for name, value in request.given.items() if value is not None},
        "complete": complete,
        "hvdlite": own_version(),
        "torch": torch.__version__,
        "ranks": ranks.size,
        "hosts": sorted(set(ranks.group.hosts)),
        "device": ranks.device.type,
        "threads_per_rank": torch.get_num_threads(),
    }
    try:
        _write(report.text + ("" if complete else "\n\ninterrupted: this was measured so far"), sys.stdout)
    except OSError as error:
        _write(f"{PROGRAM} {name}: standard output cannot be written: {error.strerror}", sys.stderr)
        code = 1
    try:
        for path in request.common.write_files(report, about):
            _write(f"{PROGRAM}: wrote {path}", sys.stderr)
    except OSError as error:
        _write(f"{PROGRAM} {name}: {error}", sys.stderr)
        code = 1
    return code


def _write(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Writes and flushes the text. If the reader of a pipe has ended (``| head``), drops this and all later text."""
    if stream is None:
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError as error:
        # The interpreter flushes the stream again as it exits, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


if __name__ == "__main__":
    sys.exit(main())
