"""The flags of horovodrun that tune a job: a table of what each does here, or why it does nothing.

    Sets      a variable of the workers, which `hvdlite.environment` (or NCCL) reads
    Idle      nothing: a line on stderr says why; where there is no reason, it asks for what is so anyway
    Refused   an error, as the job would not be what was asked for

Those that say who runs where, or what is shown, are hvdlite-run's own as well, and are in `flag_parser`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

HELP = """\
Flags of horovodrun's that tune a job:

  --fusion-threshold-mb MIB
                        how much of the gradients travels at once (16); 0 is each for itself
  --autotune, --no-autotune
                        measure how much that should be, or do not
  --autotune-log-file FILE
                        add what was measured to a file
  --timeline-filename FILE
                        write when each gradient was ready, travelled and was waited for, for Perfetto
  --stall-check, --no-stall-check
                        look, or do not, for ranks that others wait for
  --stall-check-warning-time-seconds SECONDS
                        until a warning names them (60)
  --stall-check-shutdown-time-seconds SECONDS
                        until that ends the job (0: never)
  --gloo-timeout-seconds SECONDS
                        how long a collective waits for a rank that hangs (1800)
  --log-level LEVEL     what workers log to stderr: TRACE, DEBUG, INFO, WARNING, ERROR or FATAL
  --log-with-timestamp, --no-log-hide-timestamp, --log-without-timestamp, --log-hide-timestamp
                        with the time, or without
  --hierarchical-allreduce, --no-hierarchical-allreduce
                        sum within hosts and then between them, or do not; else what is faster on GPUs is measured
  --tcp                 keep NCCL off InfiniBand
  --gloo                between hosts CPU tensors travel over gloo, as they do without it

These have nothing to tune here, and say so:

  --cycle-time-ms, --cache-capacity, --disable-cache, --num-nccl-streams, --thread-affinity
  --hierarchical-allgather, --torus-allreduce, --timeline-mark-cycles
  --no-hierarchical-allgather, --no-torus-allreduce, --no-timeline-mark-cycles
  --autotune-warmup-samples, --autotune-steps-per-sample, --autotune-bayes-opt-max-samples
  --autotune-gaussian-process-noise
  --mpi, --jsrun, --mpi-args, --binding-args, --mpi-threads-disable, --no-mpi-threads-disable

These are refused, since elastic training is not there:

  --min-np, --min-num-proc, --max-np, --max-num-proc, --host-discovery-script, --slots-per-host
  --elastic-timeout, --reset-limit, --blacklist-cooldown-range
"""

# From a flag's name, as Horovod has it in messages, and what a user wrote, to what is kept of that.
Read = Callable[[str, str], str]

_MEBIBYTE = 1 << 20
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Sets:
    """A flag that sets ``variable``, to what ``read`` makes of its value; a switch sets it to ``value``."""

    names: tuple[str, ...]
    variable: str
    read: Read | None = None
    value: str = "1"


@dataclass(frozen=True)
class Idle:
    """A flag without effect; ``why`` is told to the user, None if it asks for what is so anyway.

    ``read`` is None of a switch.
    """

    names: tuple[str, ...]
    why: str | None
    read: Read | None = None


@dataclass(frozen=True)
class Refused:
    """A flag that is an error; ``values`` is how many words follow it."""

    names: tuple[str, ...]
    values: int = 1


def decimal(text: str) -> float:
    """A number as everybody writes it, in digits of ASCII; nan if it is none. float() reads those of all scripts."""
    return float(text) if _DECIMAL.fullmatch(text.strip()) else math.nan


def _number(name: str, text: str) -> str:
    """At least 0; Horovod's words if it is not."""
    number = decimal(text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a number, such as 60")
    if number < 0:
        raise ValueError(f"{name}={text} must be >= 0")
    return text.strip()


def _positive(name: str, text: str) -> str:
    if float(_number(name, text)) == 0:
        raise ValueError(f"{name}={text} must be > 0")
    return text.strip()


def _share(name: str, text: str) -> str:
    if float(_number(name, text)) > 1:
        raise ValueError(f"{name}={text} must be in [0, 1]")
    return text.strip()


def _bytes_of_mebibytes(name: str, text: str) -> str:
    return str(int(float(_number(name, text)) * _MEBIBYTE))


def _level(_: str, text: str) -> str:
    if text.upper() not in _LEVELS:
        raise ValueError(f"{text!r} is none of {', '.join(_LEVELS)}")
    return text.lower()


def _path(_: str, text: str) -> str:
    if not text:
        raise ValueError("'' is no file")
    # Workers may change their directory before they open it.
    return os.path.abspath(text)


def _timeline(name: str, text: str) -> str:
    # DYNAMIC is no file: the program starts the timeline.
    return text if text == "DYNAMIC" else _path(name, text)


def _any(_: str, text: str) -> str:
    return text


_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")
_STALL_CHECK_DISABLE = "HVDLITE_STALL_CHECK_DISABLE"
_HIERARCHICAL = "HVDLITE_HIERARCHICAL_ALLREDUCE"
_LOG_HIDE_TIME = "HVDLITE_LOG_HIDE_TIME"
_NO_CYCLES = "there are no cycles: a collective starts when it is asked for"
_NO_HIERARCHY = "how the ranks of a host and those between hosts divide this work is gloo's and NCCL's own to choose"
_NO_SAMPLES = "autotune measures once, before the first step, and there is nothing to say of how"
_NO_MPI = "no mpirun is called"
_ITSELF = "hvdlite-run starts the workers itself"

ROWS: tuple[Sets | Idle | Refused, ...] = (
    Sets(("--fusion-threshold-mb",), "HVDLITE_FUSION_THRESHOLD", _bytes_of_mebibytes),
    Sets(("--autotune",), "HVDLITE_AUTOTUNE"),
    Sets(("--no-autotune",), "HVDLITE_AUTOTUNE", value="0"),
    Sets(("--autotune-log-file",), "HVDLITE_AUTOTUNE_LOG", _path),
    Sets(("--timeline-filename",), "HVDLITE_TIMELINE", _timeline),
    Sets(("--stall-check",), _STALL_CHECK_DISABLE, value="0"),
    Sets(("--no-stall-check",), _STALL_CHECK_DISABLE),
    Sets(("--stall-check-warning-time-seconds",), "HVDLITE_STALL_CHECK_TIME_S", _positive),
    Sets(("--stall-check-shutdown-time-seconds",), "HVDLITE_STALL_SHUTDOWN_S", _number),
    Sets(("--gloo-timeout-seconds",), "HVDLITE_GLOO_TIMEOUT_SECONDS", _positive),
    Sets(("--log-level",), "HVDLITE_LOG_LEVEL", _level),
    Sets(("--log-with-timestamp", "--no-log-hide-timestamp"), _LOG_HIDE_TIME, value="0"),
    Sets(("--log-without-timestamp", "--log-hide-timestamp"), _LOG_HIDE_TIME),
    Sets(("--hierarchical-allreduce",), _HIERARCHICAL),
    Sets(("--no-hierarchical-allreduce",), _HIERARCHICAL, value="0"),
    Sets(("--tcp",), "NCCL_IB_DISABLE"),
    Idle(("--gloo",), None),
    Idle(("--cycle-time-ms",), _NO_CYCLES, _number),
    Idle(("--timeline-mark-cycles",), _NO_CYCLES),
    Idle(("--no-timeline-mark-cycles",), None),
    Idle(("--cache-capacity",), "what travels together is agreed on once, so that there is nothing to cache", _number),
    Idle(("--disable-cache",), "each job looks at its hosts anew, and keeps nothing for the next"),
    Idle(("--num-nccl-streams",), "torch gives NCCL a stream of its own", _number),
    Idle(("--thread-affinity",), "the system places threads; numactl before the command binds them", _number),
    *(
        row
        for name in ("hierarchical-allgather", "torus-allreduce")
        for row in (Idle((f"--{name}",), _NO_HIERARCHY), Idle((f"--no-{name}",), None))
    ),
    Idle(("--autotune-warmup-samples",), _NO_SAMPLES, _number),
    Idle(("--autotune-steps-per-sample",), _NO_SAMPLES, _number),
    Idle(("--autotune-bayes-opt-max-samples",), _NO_SAMPLES, _number),
    Idle(("--autotune-gaussian-process-noise",), _NO_SAMPLES, _share),
    Idle(("--mpi",), f"{_ITSELF}; to have MPI do that: mpirun -np 4 python train.py"),
    Idle(("--jsrun",), _ITSELF),
    Idle(("--mpi-args",), _NO_MPI, _any),
    Idle(("--binding-args",), f"{_NO_MPI}; numactl before the command binds workers", _any),
    Idle(("--mpi-threads-disable",), _NO_MPI),
    Idle(("--no-mpi-threads-disable",), _NO_MPI),
    Refused(("--min-np", "--min-num-proc")),
    Refused(("--max-np", "--max-num-proc")),
    Refused(("--host-discovery-script",)),
    Refused(("--slots-per-host",)),
    Refused(("--elastic-timeout",)),
    Refused(("--reset-limit",)),
    Refused(("--blacklist-cooldown-range",), values=2),
)


TEXTS = ("HVDLITE_AUTOTUNE_LOG", "HVDLITE_TIMELINE", "HVDLITE_LOG_LEVEL", "mpi_args", "binding_args")
"""Of what `add_flags` keeps, what is a text and no number."""


def _dest(row: Sets | Idle) -> str:
    # Two that set the same variable say one thing: the later counts.
    return row.variable if isinstance(row, Sets) else _name(row)


def _name(row: Sets | Idle) -> str:
    return row.names[0].lstrip("-").replace("-", "_")


DESTS = frozenset(_dest(row) for row in ROWS if not isinstance(row, Refused))
"""Under which names `add_flags` keeps what was given."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` read them all; what is not given is None."""
    for row in ROWS:
        if isinstance(row, Refused):
            parser.add_argument(*row.names, nargs=None if row.values == 1 else row.values, action=_Refuse)
        elif row.read is None:
            value = row.value if isinstance(row, Sets) else "1"
            parser.add_argument(*row.names, dest=_dest(row), action="store_const", const=value)
        else:
            parser.add_argument(*row.names, dest=_dest(row), type=partial(_read, row))


def variables(options: argparse.Namespace) -> dict[str, str]:
    """What the flags that were given set for the workers."""
    values = {row.variable: getattr(options, _dest(row)) for row in ROWS if isinstance(row, Sets)}
    return {variable: value for variable, value in values.items() if value is not None}


def remarks(options: argparse.Namespace) -> Iterator[str]:
    """A line for each flag that was given to no effect."""
    for row in ROWS:
        if isinstance(row, Idle) and row.why is not None and getattr(options, _dest(row)) is not None:
            yield f"{row.names[0]} has no effect: {row.why}"


def _read(row: Sets | Idle, text: str) -> str:
    assert row.read is not None
    try:
        return row.read(_name(row), text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Refuse(argparse.Action):
    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(
            self, "elastic training is not there: workers that end are not replaced; say how many with -np"
        )
