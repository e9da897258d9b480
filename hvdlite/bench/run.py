"""
One run: words, ranks, measuring, and what is kept of it, however it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch

from ..errors import says_peer_lost
from ..rendezvous.launchers import read_placement
from ..runtime.world import current_world, init
from .command_line import Request, parse
from .errors import UsageError
from .flags import PROGRAM
from .interruption import Interruption
from .progress import Progress
from .ranks import Ranks

_USAGE = 2


def main(words: Sequence[str] | None = None) -> int:
    """Do what the words ask for; the exit code. Every rank must call it, in a process that then ends."""
    interruption = Interruption()
    try:
        return _run(words, interruption)
    except SystemExit:
        # After --help, which the parser has printed.
        _say("", sys.stdout, end="")
        raise
    except KeyboardInterrupt:
        # Collectives are under way that nobody will ever finish: to leave in order would be to wait for them.
        assert interruption.signum is not None, "who else raises it"
        os._exit(128 + interruption.signum)


def _run(words: Sequence[str] | None, interruption: Interruption) -> int:
    placement = read_placement(os.environ)
    rank = 0 if placement is None else placement.rank
    request, trouble = _understand(words, rank)
    if trouble is not None and placement is None:
        return _complain(trouble)
    if request is not None and request.command.turns == 0:
        return 0 if rank else _show(request, {})
    init()
    ranks, trouble = _gather(request, trouble)
    if trouble is not None:
        code = _complain(trouble) if rank == 0 else _USAGE
        # A rank that ended before rank 0 has spoken would have the launcher end that one too.
        current_world().group.all_gather_json(None, "end of the benchmark")
        return code
    assert ranks is not None
    assert request is not None
    return _measure(request, ranks, interruption)


def _understand(words: Sequence[str] | None, rank: int) -> tuple[Request | None, str | None]:
    try:
        request = parse(words, quiet=rank > 0)
        if rank == 0:
            try:
                request.files.check()
            except UsageError as error:
                raise UsageError(f"{PROGRAM} {request.command.name}: {error}") from None
    except UsageError as error:
        return None, str(error)
    return request, None


def _gather(request: Request | None, trouble: str | None) -> tuple[Ranks | None, str | None]:
    """Those who measure, or what is the matter with one of them; each must call it."""
    group = current_world().group

    def first(trouble: str | None) -> str | None:
        # The ranks may differ: in what is installed, in GPUs, and rank 0 has files to write.
        everybodys = group.all_gather_json(trouble, "start of the benchmark")
        return next((each for each in everybodys if each is not None), None)

    trouble = first(trouble)
    if trouble is not None:
        return None, trouble
    assert request is not None
    ranks = None
    try:
        ranks = Ranks(current_world(), request.device_type)
    except UsageError as error:
        trouble = f"{PROGRAM} {request.command.name}: {error}"
    trouble = first(trouble)
    if trouble is None:
        assert ranks is not None
        try:
            request.command.prepare(ranks)
        except UsageError as error:
            trouble = f"{PROGRAM} {request.command.name}: {error}"
        trouble = first(trouble)
    return ranks, trouble


def _measure(request: Request, ranks: Ranks, interruption: Interruption) -> int:
    progress = Progress(request.command.turns, shown=ranks.rank == 0)
    try:
        try:
            request.command.run(ranks, progress)
        except RuntimeError as error:
            if says_peer_lost(error):
                interruption.expect()
            raise
    except BaseException:
        # Ctrl-C, or what went wrong: here as there what was measured is kept.
        interruption.settle()
        progress.close()
        if ranks.rank == 0:
            _show(request, _about(request, ranks, complete=False))
        raise
    interruption.settle()
    progress.close()
    code = _show(request, _about(request, ranks, complete=True)) if ranks.rank == 0 else 0
    interruption.release()
    ranks.close()
    return code


def _show(request: Request, about: dict[str, Any]) -> int:
    report = request.command.report()
    text, code = str(report), 0
    if about.get("complete") is False:
        text += "\n\ninterrupted: this is what was measured by then"
    try:
        _say(text, sys.stdout)
    except OSError as error:
        code = _complain(f"{PROGRAM} {request.command.name}: standard output cannot be written: {error.strerror}", 1)
    try:
        for path in request.files.write(report, about):
            _say(f"{PROGRAM}: wrote {path}", sys.stderr)
    except OSError as error:
        return _complain(f"{PROGRAM} {request.command.name}: {error}", 1)
    return code


def _complain(what: str, code: int = _USAGE) -> int:
    _say(what, sys.stderr)
    return code


def _say(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Write it now. Where nobody reads on (``| head``) it is dropped, and so is what comes later."""
    if stream is None:
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError as error:
        # What is left in the stream would raise again as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _about(request: Request, ranks: Ranks, *, complete: bool) -> dict[str, Any]:
    try:
        own_version = version("hvdlite")
    except PackageNotFoundError:
        own_version = "of a source tree"
    return {
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
