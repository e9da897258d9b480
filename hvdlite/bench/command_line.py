"""
The command line of `python -m hvdlite.bench`: its help, and the command that it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .allreduce import AllReduce
from .arguments import DEVICE, Flag, UsageError
from .memory import Memory
from .report import Command, Files
from .scale import Scale
from .step import Step

PROGRAM = "hvdlite.bench"
_EPILOG = """\
Run it where you train, by any launcher, and alone for a single rank:

  hvdlite-run -np 2 python -m hvdlite.bench allreduce
  hvdlite-run --hostfile hosts python -m hvdlite.bench step --models mlp,gpt --json step.json --plot step.png
  torchrun --nproc-per-node 4 -m hvdlite.bench memory

What is compared takes turns in one process; tables are of medians with quartiles, of the slowest rank. Ctrl-C keeps
what has been measured by then. hvdlite/bench/README.md says what each figure means.
"""
_COMMANDS: tuple[type[Command], ...] = (AllReduce, Step, Memory, Scale)
# Of every command.
_FLAGS = (
    DEVICE,
    Flag("--json", Path, "FILE", "write all figures and samples there"),
    Flag("--plot", Path, "FILE.png", "draw them there (needs matplotlib)"),
)


class Request(NamedTuple):
    """What the command line asks for. ``device_type`` is cpu or cuda, ``options`` are the flags for JSON."""

    command: Command
    files: Files
    device_type: str
    options: dict[str, str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


def parse(words: Sequence[str] | None, *, is_first: bool) -> Request:
    """What the command line asks for; raises UsageError. The first rank alone prints help, and checks its files."""
    parser = _Parser(
        prog=PROGRAM,
        description="How fast hvdlite is on this cluster, beside what else there is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for each in _COMMANDS:
        command = parsers.add_parser(each.name, help=each.help, description=each.help, allow_abbrev=False)
        command.set_defaults(make=each)
        for flag in (*each.flags, *_FLAGS):
            command.add_argument(flag.name, type=flag.read, default=flag.default, metavar=flag.metavar, help=flag.help)
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
        given = vars(parser.parse_args(words))
    options = {name: str(value) for name, value in given.items() if value is not None and name != "make"}
    make, name, files = given.pop("make"), given.pop("command"), Files(given.pop("json"), given.pop("plot"))
    try:
        device_type = _device_type(given.pop("device"))
        command = make(**given)
        if is_first:
            files.check()
    except UsageError as error:
        raise UsageError(f"{PROGRAM} {name}: {error}") from None
    return Request(command, files, device_type, options)


def _device_type(device: str) -> str:
    has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if device == "cuda" and not has_cuda:
        raise UsageError("--device cuda: there is no CUDA device here, or torch has no NCCL")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device
