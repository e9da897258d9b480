"""
`python -m hvdlite.bench`: runs a command on all ranks, and keeps what was measured however the run ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
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


class Interruption:
    """Raises KeyboardInterrupt on SIGINT and SIGTERM. One that is ignored, as in a background job, stays so."""

    def __init__(self) -> None:
        self.signum: int | None = None
        caught = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._raise) for each in caught}

    def _raise(self, signum: int, frame: FrameType | None) -> NoReturn:
        self.signum = signum
        raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore both from now on, while results are written."""
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the handlers that were there before."""
        for each, handler in self._before.items():
            signal.signal(each, handler)


def main() -> int:
    """Run the command; returns the exit code. Every rank must call it, in a process that then ends."""
    interruption = Interruption()
    try:
        return _run(interruption)
    except SystemExit:
        # argparse has printed the help.
        _write("", sys.stdout, end="")
        raise
    except KeyboardInterrupt:
        # An orderly exit would wait for collectives that never end.
        assert interruption.signum is not None, "only its handler raises it"
        os._exit(128 + interruption.signum)


def _run(interruption: Interruption) -> int:
    placement = read_placement(os.environ)
    rank = 0 if placement is None else placement.rank
    request = problem = None
    try:
        request = parse(None, quiet=rank > 0)
        if rank == 0:
            request.files.check()
    except UsageError as error:
        problem = str(error) if request is None else f"{PROGRAM} {request.command.name}: {error}"
    if request is not None and request.command.turns == 0:
        if rank > 0:
            return 0
        return _show(request, {}) if problem is None else _complain(problem)
    if problem is not None and placement is None:
        return _complain(problem)
    init()
    world = current_world()
    # Ranks may differ in what is installed, and rank 0 alone writes files.
    problems = world.group.all_gather_json(problem, "start of the benchmark")
    problem = next((each for each in problems if each is not None), None)
    if problem is None:
        assert request is not None, "there is no problem"
        try:
            return _measure(request, world, interruption)
        except UsageError as error:
            problem = f"{PROGRAM} {request.command.name}: {error}"
    code = _complain(problem) if rank == 0 else _USAGE
    # If a rank ended before rank 0 has written, the launcher would end that one too.
    world.group.all_gather_json(None, "end of the benchmark")
    return code


def _measure(request: Request, world: World, interruption: Interruption) -> int:
    ranks = Ranks(world, request.device_type)
    request.command.prepare(ranks)
    if ranks.rank == 0:
        ranks.show_progress(request.command.turns)
    try:
        try:
            request.command.run(ranks)
        except RuntimeError as error:
            if says_peer_lost(error):
                # On Ctrl-C other ranks may end before the signal arrives here.
                time.sleep(1)
            raise
    except BaseException:
        _finish(request, ranks, interruption, complete=False)
        raise
    code = _finish(request, ranks, interruption, complete=True)
    interruption.restore()
    ranks.close()
    return code


def _finish(request: Request, ranks: Ranks, interruption: Interruption, *, complete: bool) -> int:
    interruption.ignore()
    ranks.hide_progress()
    if ranks.rank > 0:
        return 0
    try:
        own_version = version("hvdlite")
    except PackageNotFoundError:
        own_version = "of a source tree"
    about = {
        "command": request.command.name,
        "options": request.options,
        "complete": complete,
        "hvdlite": own_version,
        "torch": torch.__version__,
        "ranks": ranks.size,
        "hosts": sorted(set(ranks.group.hosts)),
        "device": ranks.device.type,
        "threads_per_rank": torch.get_num_threads(),
    }
    return _show(request, about)


def _show(request: Request, about: dict[str, Any]) -> int:
    """Print the report and write the files; ``about`` is what JSON says of the run."""
    name, report, code = request.command.name, request.command.report(), 0
    interrupted = about.get("complete") is False
    try:
        _write(
            f"{report}\n\ninterrupted: this is what was measured by then" if interrupted else str(report), sys.stdout
        )
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
