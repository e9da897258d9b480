"""
What the words of `python -m hvdlite.bench` ask for: a command that is ready to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from .allreduce import AllReduce
from .calibration import read_calibration
from .errors import UsageError
from .flags import PROGRAM, make_parser
from .memory import MEASURED, Memory
from .progress import Progress
from .ranks import Ranks
from .report import Files, Report
from .scale import Measured, Remembered
from .step import Step
from .variants import USUAL
from .workloads import WORKLOADS


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
        given = make_parser().parse_args(words)
    try:
        return Request(
            _COMMANDS[given.command](given),
            Files(given.json, given.plot),
            _device_type(given.device),
            {name: str(value) for name, value in vars(given).items() if value is not None},
        )
    except UsageError as error:
        raise UsageError(f"{PROGRAM} {given.command}: {error}") from None


def _make_allreduce(given: argparse.Namespace) -> Command:
    return AllReduce(given.sizes, given.dtypes, given.rounds)


def _make_step(given: argparse.Namespace) -> Command:
    return Step(
        [WORKLOADS[name] for name in given.models or WORKLOADS],
        given.variants or USUAL,
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
                raise UsageError(f"--calibration has a {flag} of its own: leave out --{flag}")
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
