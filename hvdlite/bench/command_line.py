"""
The words of `python -m hvdlite.bench`, and what they ask for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from .allreduce import AllReduce
from .calibration import read_calibration
from .errors import UsageError
from .memory import MEASURED, Memory
from .progress import Progress
from .quantities import (
    DEFAULT_SIZES,
    DTYPES,
    parse_dtypes,
    parse_names,
    parse_positive,
    parse_share,
    parse_sizes,
)
from .ranks import Ranks
from .report import Files, Report
from .scale import COMPRESSIONS, Measured, Remembered
from .step import Step
from .variants import VARIANTS
from .workloads import WORKLOADS

PROGRAM = "hvdlite.bench"
_EPILOG = """\
Run it where you train, by any launcher, and alone for a single rank:

  hvdlite-run -np 2 python -m hvdlite.bench allreduce
  hvdlite-run --hostfile hosts python -m hvdlite.bench step --models mlp,gpt --json step.json --plot step.png
  torchrun --nproc-per-node 4 -m hvdlite.bench memory

What is compared takes turns in one process; tables are of medians with quartiles, of the slowest rank. Ctrl-C keeps
what has been measured by then. hvdlite/bench/README.md says what each figure means.
"""


class Command(Protocol):
    """What measures. `prepare` raises UsageErrors; both it and `run` are called by all ranks, `report` at any time."""

    @property
    def name(self) -> str: ...
    @property
    def turns(self) -> int: ...
    def prepare(self, ranks: Ranks) -> None: ...
    def run(self, ranks: Ranks, progress: Progress) -> None: ...
    def report(self) -> Report: ...


@dataclass(frozen=True)
class Request:
    """What is asked for; ``device_type`` is cpu or cuda."""

    command: Command
    files: Files
    device_type: str
    options: dict[str, str]


def parse(words: Sequence[str] | None, *, quiet: bool) -> Request:
    """What the command line asks for, or a UsageError; ``quiet`` ranks leave the help to rank 0, and exit alike."""
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        given = _make_parser().parse_args(words)
    try:
        return Request(
            _COMMANDS[given.command](given),
            Files(given.json, given.plot),
            _device_type(given.device),
            {name: str(value) for name, value in vars(given).items() if value is not None},
        )
    except UsageError as error:
        raise UsageError(f"{PROGRAM} {given.command}: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="How fast hvdlite is on this cluster, beside what else there is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (text, add) in _ARGUMENTS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add(command)
        command.add_argument(
            "--device", type=_read(parse_names, DEVICES, "a device"), default=("auto",), metavar="auto|cpu|cuda",
            help="where tensors are; auto is cuda where there is one",
        )  # fmt: skip
        command.add_argument("--json", type=Path, metavar="FILE", help="write all figures and samples there")
        command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them there (needs matplotlib)")
    return parser


DEVICES = ("auto", "cpu", "cuda")


def _read(parse: Callable[..., Any], *arguments: object) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text, *arguments)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _add_allreduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", type=_read(parse_sizes), default=DEFAULT_SIZES, metavar="BYTES,…",
        help="such as 4,64,4K,1M,100M (4 to 256M by factors of 4)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", type=_read(parse_dtypes), default=(torch.float32,), metavar="NAME,…",
        help=f"of {', '.join(DTYPES)} (float32)",
    )  # fmt: skip
    _add_rounds(parser, "--rounds", 15, "turns of each")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", type=_read(parse_names, WORKLOADS, "a model"), metavar="NAME,…",
        help=f"of {', '.join(WORKLOADS)} (all)",
    )  # fmt: skip
    _add_variants(parser, tuple(VARIANTS))
    _add_batch(parser)
    _add_rounds(parser, "--steps", 20, "steps of each")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_variants(parser, MEASURED)
    _add_batch(parser)
    _add_rounds(parser, "--rounds", 3, "turns of each")


def _add_scale(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_batch(parser)
    parser.add_argument(
        "--compression", type=_read(parse_names, COMPRESSIONS, "a compression"), metavar="NAME",
        help=f"one of {', '.join(COMPRESSIONS)} (none)",
    )  # fmt: skip
    _add_rounds(parser, "--rounds", 15, "turns of each all-reduce")
    _add_rounds(parser, "--steps", 20, "steps")
    parser.add_argument(
        "--threshold", type=_read(parse_share), default=0.5, metavar="SHARE",
        help="a rank more pays if it adds this much of what one does alone (0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE.json", help="measure nothing: that run's --json says what there was"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=_read(parse_names, WORKLOADS, "a model"), metavar="NAME",
        help=f"one of {', '.join(WORKLOADS)} (mlp)",
    )  # fmt: skip


def _add_variants(parser: argparse.ArgumentParser, choices: tuple[str, ...]) -> None:
    parser.add_argument(
        "--variants", type=_read(parse_names, choices, "a variant"), metavar="NAME,…",
        help=f"of {', '.join(choices)} (all)",
    )  # fmt: skip


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=_read(parse_positive), metavar="ROWS", help="of each rank (the model's own)")


def _add_rounds(parser: argparse.ArgumentParser, flag: str, default: int, what: str) -> None:
    parser.add_argument(flag, type=_read(parse_positive), default=default, metavar="COUNT", help=f"{what} ({default})")


_ARGUMENTS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "allreduce": (
        "time and bandwidth of an all-reduce, beside gloo or NCCL and a copy of the same bytes",
        _add_allreduce,
    ),
    "step": ("a training step with hvdlite, DDP, Horovod, and without any communication", _add_step),
    "memory": ("the most memory that training takes above the model, beside DDP's", _add_memory),
    "scale": ("expected step time and efficiency of 2 to 4096 ranks, from a run of some", _add_scale),
}


def _make_allreduce(given: argparse.Namespace) -> Command:
    return AllReduce(given.sizes, given.dtypes, given.rounds)


def _make_step(given: argparse.Namespace) -> Command:
    return Step(
        [WORKLOADS[name] for name in given.models or WORKLOADS],
        given.variants or tuple(VARIANTS),
        given.batch,
        given.steps,
        named_models=given.models is not None,
        named_variants=given.variants is not None,
    )


def _make_memory(given: argparse.Namespace) -> Command:
    return Memory(
        WORKLOADS[_only(given.model, "--model") or "mlp"], given.variants or MEASURED, given.batch, given.rounds
    )


def _make_scale(given: argparse.Namespace) -> Command:
    if given.calibration is not None:
        for flag in ("model", "batch", "compression"):
            if getattr(given, flag) is not None:
                raise UsageError(f"--calibration has a {flag} of its own: leave --{flag} away")
        return Remembered(read_calibration(given.calibration), given.threshold)
    return Measured(
        WORKLOADS[_only(given.model, "--model") or "mlp"],
        given.batch,
        _only(given.compression, "--compression") or "none",
        rounds=given.rounds,
        steps=given.steps,
        least_added=given.threshold,
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], Command]] = {
    "allreduce": _make_allreduce,
    "step": _make_step,
    "memory": _make_memory,
    "scale": _make_scale,
}


def _only(names: tuple[str, ...] | None, flag: str) -> str | None:
    if names is None:
        return None
    if len(names) > 1:
        raise UsageError(f"{flag}: one at a time, and not {','.join(names)}")
    return names[0]


def _device_type(names: tuple[str, ...]) -> str:
    name = _only(names, "--device")
    assert name is not None, "it has a default"
    has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if name == "cuda" and not has_cuda:
        raise UsageError("--device cuda: there is no CUDA device here, or torch has no NCCL")
    return ("cuda" if has_cuda else "cpu") if name == "auto" else name
