"""
`python -m hvdlite.bench`: runs a command on all ranks, and reports what was measured, even after Ctrl-C or an error.

    words ── parse ── a Command ── Command.run, on all Ranks ── BenchReport ── files
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist

from ..errors import says_peer_lost
from ..rendezvous.launchers import read_placement
from ..runtime.make_world import World, own_version
from ..runtime.world import current_world, init
from .allreduce import AllReduceComparison
from .arguments import OptionError
from .links import SlowLinks
from .ranks import Ranks
from .report import SUFFIXES, Command, figure_of, require_matplotlib
from .variants import Memory, StepComparison

PROGRAM = "hvdlite.bench"
_EPILOG = """\
Start it with the launcher that you train with, or by itself for a single rank:

  hvdlite-run -np 2 python -m hvdlite.bench allreduce
  hvdlite-run --hostfile hosts python -m hvdlite.bench step --models mlp,gpt --json step.json --plot step.png
  torchrun -nproc-per-node 4 -m hvdlite.bench memory

One starts a job of its own:

  python -m hvdlite.bench links --rates 1gbit,100mbit

Whatever is compared takes turns in one process. Tables show medians and quartiles, of the slowest rank. Ctrl-C keeps
what has been measured so far. docs/measuring.md, in the sources, explains each figure.
"""
_COMMANDS: dict[str, type[Command]] = {
    each.name: each for each in (AllReduceComparison, StepComparison, Memory, SlowLinks)
}
_USAGE = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def device_type(device: str) -> str:
    """Returns ``cpu`` or ``cuda``. Raises OptionError if ``cuda`` is requested and there is no GPU or no NCCL."""
    has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if device == "cuda" and not has_cuda:
        raise OptionError("--device cuda: there is no CUDA device here, or torch has no NCCL")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device


def _check_files(json_path: Path | None, plot: Path | None) -> None:
    """Raises OptionError if a file cannot be written. Creates no file."""
    if plot is not None:
        if plot.suffix.lower() not in SUFFIXES:
            raise OptionError(f"--plot: {str(plot)!r} does not end in {', '.join(SUFFIXES)}")
        require_matplotlib()
    for name, path in (("--json", json_path), ("--plot", plot)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise OptionError(
                f"{name}: {str(path)!r} cannot be written: it is a directory, or there is no directory for it, or "
                "permission is denied"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message.removeprefix('argument ')}")


def parse(words: Sequence[str] | None, *, is_first: bool) -> tuple[Command, argparse.Namespace]:
    """Returns the command and all flags. Raises OptionError. Only the first rank prints help and checks the files."""
    parser = _Parser(
        prog=PROGRAM,
        description="How fast hvdlite is on this cluster, compared with DDP, Horovod, gloo and NCCL.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    where = "where the tensors are; auto: cuda if there is a GPU"
    for name, kind in _COMMANDS.items():
        command = parsers.add_parser(name, help=kind.help, description=kind.help, allow_abbrev=False)
        for each in fields(kind):
            if each.metadata:
                command.add_argument(f"--{each.name}", default=each.default, **each.metadata)
        choices = ("auto", "cpu", "cuda")
        command.add_argument("--device", default="auto", choices=choices, metavar="|".join(choices), help=where)
        command.add_argument("--json", type=Path, metavar="FILE", help="write all figures and samples to this file")
        command.add_argument("--plot", type=Path, metavar="FILE.png", help="plot them to this file (needs matplotlib)")
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
        given = parser.parse_args(words)
    kind = _COMMANDS[given.command]
    try:
        made = kind(**{each.name: getattr(given, each.name) for each in fields(kind) if each.metadata})
        device_type(given.device)
        if is_first:
            _check_files(given.json, given.plot)
    except OptionError as error:
        raise OptionError(f"{PROGRAM} {given.command}: {error}") from None
    return made, given


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


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in _SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def _run() -> int:
    placement = read_placement(os.environ)
    parsed = problem = None
    try:
        parsed = parse(None, is_first=placement is None or placement.rank == 0)
    except OptionError as error:
        problem = str(error)
    init()
    world = current_world()
    # A problem may exist on one rank only: ranks may have different packages, and only rank 0 checks the files. All
    # ranks must continue, or none.
    problems = world.group.all_gather_json(problem, "start of the benchmark")
    problem = next((each for each in problems if each is not None), None)
    if parsed is not None and problem is None:
        try:
            return _measure(*parsed, world)
        except OptionError as error:
            problem = f"{PROGRAM} {parsed[0].name}: {error}"
    if world.group.rank == 0:
        _write(problem or "", sys.stderr)
    # No rank may exit before rank 0 has written: the launcher would kill rank 0.
    world.group.all_gather_json(None, "end of the benchmark")
    return _USAGE


def _measure(command: Command, given: argparse.Namespace, world: World) -> int:
    ranks = Ranks(world, device_type(given.device))
    command.prepare(ranks)
    ranks.show_progress(command.turns)
    code, complete = 0, False
    try:
        command.run(ranks)
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
                code = _report(command, given, ranks, complete)
    ranks.close()
    return code


def _report(command: Command, given: argparse.Namespace, ranks: Ranks, complete: bool) -> int:
    """Writes the files, prints the report, and returns the exit code."""
    report = command.report()
    code = report.code
    about = {
        "command": command.name,
        "options": {name: str(value) for name, value in vars(given).items() if value is not None},
        "complete": complete,
        "hvdlite": own_version(),
        "torch": torch.__version__,
        "ranks": ranks.size,
        "hosts": sorted(set(ranks.group.hosts)),
        "device": ranks.device.type,
        "threads_per_rank": torch.get_num_threads(),
    }
    try:
        if given.json is not None:
            given.json.write_text(json.dumps({**about, **report.data}, indent=1) + "\n")
            _write(f"{PROGRAM}: wrote {given.json.absolute()}", sys.stderr)
        if given.plot is not None:
            figure_of(report.chart).savefig(given.plot, dpi=150)
            _write(f"{PROGRAM}: wrote {given.plot.absolute()}", sys.stderr)
    except OSError as error:
        _write(f"{PROGRAM} {command.name}: {error}", sys.stderr)
        code = 1
    _write(report.text + ("" if complete else "\n\ninterrupted: this was measured so far"), sys.stdout)
    return code


def _write(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Writes and flushes the text. If the reader of a pipe has ended (``| head``), drops this and all later text."""
    try:
        print(text, file=stream, end=end, flush=True)
    except BrokenPipeError:
        # The interpreter flushes the stream again as it exits, which would raise again.
        assert stream is not None, "it has a reader"
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
