"""
`WorkerStatus`: what one worker does and how far it is, from where it is measured to where it is shown.

    the rank itself: OwnStatus ──► its host's agent: WorkerStatus ──► hvdlite-run: RankStatus ──► report, views, files

The types say what is allowed. Programs choose most of the texts, such as the names of threads: what may not be printed
is replaced, and what is too long is cut. A new measured column is a field here, its value in `hvdlite.runtime.world`
(what the rank knows) or in `host.status_collector` (what its host knows), and rows in the tables of what views show, in
`status.rank_status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Annotated, Any, TypeVar

from .codec import Address, Between, WorkerNumber

_MOST, _MOST_OF_NAME = 1000, 200
_MOST_OPTIMIZERS = 100

Anything = TypeVar("Anything")


def _shown(text: str) -> str:
    # Nothing of what a program has named may control the terminal.
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST])


def _named(text: str) -> str:
    return _shown(text[:_MOST_OF_NAME])


def _first(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return items[:_MOST]


def _few(steps: Mapping[str, int]) -> Mapping[str, int]:
    return dict(islice(steps.items(), _MOST_OPTIMIZERS))


Shown = Annotated[str, _shown]
Name = Annotated[str, _named]
Several = Annotated[tuple[Anything, ...], _first]
Amount = Annotated[int, Between(0, 1 << 60)]
Duration = Annotated[float, Between(0, 1e12)]
Part = Annotated[float, Between(0, 1)]
PidOrNone = Annotated[int, Between(0, 2**31 - 1)]


class Source(Enum):
    """How the stacks of a worker are known."""

    ANSWER = "answer"  # of its program
    SIGNAL = "signal"  # since it does not answer, or not before hvd.init()
    NONE = "none"


@dataclass(frozen=True)
class Frame:
    file: Shown
    line: Amount
    function: Shown

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """``frames``: the outermost first."""

    name: Shown
    is_main: bool
    frames: Several[Frame]


@dataclass(frozen=True)
class Wait:
    """What a rank waits for in other ranks."""

    what: Shown
    waited_s: Duration


@dataclass(frozen=True)
class StepStatus:
    """How far an optimizer is in its current step.

    ``sent`` is how many of the step's ``buckets`` have been sent. ``missing`` are names of parameters without a
    complete gradient in the first one that has not, at most a few. ``phase`` says what the step waits for.
    """

    optimizer: Shown
    step: Amount
    phase: Shown
    buckets: Amount
    sent: Amount
    missing: Several[Shown] = ()


@dataclass(frozen=True)
class Pace:
    """``cost``: the part of each step that the job would save if this rank were as fast as the others.

    Most of it is in ``phase``; `hvd.stragglers` describes both.
    """

    rank: WorkerNumber
    cost: Part
    phase: Name | None


@dataclass(frozen=True)
class Process:
    """A process, as the system describes it; ``memory`` is in bytes."""

    pid: PidOrNone
    name: Shown
    state: Shown
    cpu_s: Duration
    memory: Amount
    command: Shown


@dataclass(frozen=True)
class OwnStatus:
    """What a process that has called hvd.init() says of itself.

    ``steps``: of each optimizer, by its name. ``samples``: all that it has trained on. ``paces``: of all ranks, from
    rank 0 alone. ``waits``: the longest first. ``error``: why it cannot say more. In full, for a report, also the
    ``optimizers`` and ``threads``, how the paths of files begin that are not the user's (``libraries``), its own
    ``addresses`` on connections to ranks on other hosts, and for how many seconds nothing has come from other addresses
    (``silent_s``).
    """

    worker: WorkerNumber = 0
    steps: Annotated[Mapping[Name, Amount], _few] = field(default_factory=dict)
    samples: Amount | None = None
    paces: Several[Pace] | None = None
    waits: Several[Wait] = ()
    optimizers: Several[StepStatus] = ()
    threads: Several[Thread] = ()
    libraries: Several[Shown] = ()
    addresses: Several[Address] = ()
    silent_s: Mapping[Address, Duration] = field(default_factory=dict)
    error: Shown = ""


@dataclass(frozen=True)
class HostUsage:
    """How a host's network and GPUs are used: bytes since the job began, of all programs; None if not known.

    ``gpus``: the part of the time in which each GPU computes.
    """

    sent: Amount | None = None
    received: Amount | None = None
    gpus: Several[Part] = ()


@dataclass(frozen=True)
class WorkerStatus(OwnStatus):
    """What a worker says of itself, and what its host knows of it.

    ``pid``: of the process that has called hvd.init(), or else the worker's own, with its ``cpu_s`` and ``memory``
    (bytes). ``gpu_use``: the part of the time in which its GPU computes, None if not known. ``can_answer``: its program
    has called hvd.init(), and has not ended. ``is_ending``: its part in the job is over, and it answers no more.
    ``usage``: of the host, told with one of its workers. In full also its ``processes``, the worker's own with the
    descendants, the host's ``load`` and ``cores``, and what ``nccl`` says of the job, if this worker was asked for it.
    """

    pid: PidOrNone = 0
    cpu_s: Duration = 0.0
    memory: Amount = 0
    gpu_use: Part | None = None
    source: Source = Source.NONE
    can_answer: bool = False
    is_ending: bool = False
    usage: HostUsage | None = None
    processes: Several[Process] = ()
    load: Duration | None = None
    cores: Amount | None = None
    nccl: Several[Shown] = ()

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer, though its program has called hvd.init()."""
        return self.can_answer and self.source is not Source.ANSWER and not self.is_ending
