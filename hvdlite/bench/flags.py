"""
The words of `python -m hvdlite.bench`: flags, what they may say, and the help. What comes of them is in `command_line`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from .errors import UsageError
from .memory import MEASURED
from .quantities import DEFAULT_SIZES, DTYPES, parse_dtypes, parse_names, parse_positive, parse_share, parse_sizes
from .scale import COMPRESSIONS
from .variants import USUAL, VARIANTS
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
DEVICES = ("auto", "cpu", "cuda")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


def make_parser() -> argparse.ArgumentParser:
    """What reads the words; it raises UsageErrors."""
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
    _add_variants(parser, tuple(VARIANTS), USUAL)
    _add_batch(parser)
    _add_rounds(parser, "--steps", 20, "steps of each")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_variants(parser, tuple(name for name in VARIANTS if name != "horovod"), MEASURED)
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


def _add_variants(parser: argparse.ArgumentParser, choices: tuple[str, ...], usual: tuple[str, ...]) -> None:
    unusual = ", ".join(name for name in choices if name not in usual)
    parser.add_argument(
        "--variants", type=_read(parse_names, choices, "a variant"), metavar="NAME,…",
        help=f"of {', '.join(choices)} (all but {unusual})",
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
