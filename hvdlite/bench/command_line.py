"""
The command line of `python -m hvdlite.bench`: its parser and help, and the files that a report is written to.

`__main__` calls `parse`, which creates one of the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .allreduce import AllReduceComparison
from .arguments import OptionError, flag, one_of
from .links import SlowLinks
from .memory import Memory
from .report import SUFFIXES, BenchReport, Command, draw, require_matplotlib
from .step import Step

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
_COMMANDS: dict[str, type[Command]] = {each.name: each for each in (AllReduceComparison, Step, Memory, SlowLinks)}
_DEVICES = one_of(("auto", "cpu", "cuda"), "a device")
_DEVICE = flag("auto|cpu|cuda", _DEVICES, "where the tensors are; auto: cuda if there is a GPU")


@dataclass(frozen=True)
class CommonFlags:
    """The flags that every command has: the device of tensors, and the files to write a report to."""

    device: str = field(default="auto", metadata=_DEVICE)
    json: Path | None = field(default=None, metadata=flag("FILE", Path, "write all figures and samples to this file"))
    plot: Path | None = field(
        default=None, metadata=flag("FILE.png", Path, "plot them to this file (needs matplotlib)")
    )

    def device_type(self) -> str:
        """Returns ``cpu`` or ``cuda``. Raises OptionError if ``cuda`` is requested and there is no GPU or no NCCL."""
        has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
        if self.device == "cuda" and not has_cuda:
            raise OptionError("--device cuda: there is no CUDA device here, or torch has no NCCL")
        return ("cuda" if has_cuda else "cpu") if self.device == "auto" else self.device

    def check_files(self) -> None:
        """Raises OptionError if a file cannot be written. Creates no file."""
        if self.plot is not None:
            if self.plot.suffix.lower() not in SUFFIXES:
                raise OptionError(f"--plot: {str(self.plot)!r} does not end in {', '.join(SUFFIXES)}")
            require_matplotlib()
        for name, path in (("--json", self.json), ("--plot", self.plot)):
            if path is None:
                continue
            if path.is_dir():
                raise OptionError(f"{name}: {str(path)!r} is a directory")
            if not path.parent.is_dir():
                why = f"there is no directory {str(path.parent)!r}"
            elif not os.access(path if path.exists() else path.parent, os.W_OK):
                why = "permission denied"
            else:
                continue
            raise OptionError(f"{name}: {str(path)!r} cannot be written: {why}")

    def write_files(self, report: BenchReport, about: Mapping[str, Any]) -> Iterator[Path]:
        """Writes the requested files, and yields the path of each. ``about`` describes the run, in the JSON file."""
        if self.json is not None:
            self.json.write_text(json.dumps({**about, **report.data}, indent=1) + "\n")
            yield self.json.absolute()
        if self.plot is not None:
            draw(report.chart, self.plot)
            yield self.plot.absolute()


class BenchRequest(NamedTuple):
    """The parsed command line. ``device_type`` is cpu or cuda; ``given`` has the values of all flags."""

    command: Command
    common: CommonFlags
    device_type: str
    given: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message.removeprefix('argument ')}")


def parse(words: Sequence[str] | None, *, is_first: bool) -> BenchRequest:
    """Parses the command line. Raises OptionError. Only the first rank prints help and checks the files."""
    parser = _Parser(
        prog=PROGRAM,
        description="How fast hvdlite is on this cluster, compared with DDP, Horovod, gloo and NCCL.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, kind in _COMMANDS.items():
        command = parsers.add_parser(name, help=kind.help, description=kind.help, allow_abbrev=False)
        for each in (*_flags_of(kind), *_flags_of(CommonFlags)):
            command.add_argument(f"--{each.name}", default=each.default, **each.metadata)
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
        given = vars(parser.parse_args(words))

    def made(kind: type[Any]) -> Any:
        return kind(**{each.name: given[each.name] for each in _flags_of(kind)})

    try:
        common: CommonFlags = made(CommonFlags)
        kind = _COMMANDS[given["command"]]
        request = BenchRequest(made(kind), common, common.device_type(), given)
        if is_first:
            common.check_files()
    except OptionError as error:
        raise OptionError(f"{PROGRAM} {given['command']}: {error}") from None
    return request


def _flags_of(kind: type[Any]) -> list[Field[Any]]:
    return [each for each in fields(kind) if each.metadata]
