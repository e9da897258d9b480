"""The flags of horovodrun that tune a job: a table with the effect of each, or the reason why it has none.

`flag_parser` and `hvdlite_run` use the table. Flags about hosts, ranks and what is shown are hvdlite-run's own too, and
in `flag_parser`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

from ..system.terminal_text import say
from .flag_values import decimal

HELP = """\
Flags of horovodrun that tune a job:

  --fusion-threshold-mb MIB
                        size of a gradient bucket (16); 0: one bucket per gradient
  --autotune, --no-autotune
                        measure the best bucket size, or do not
  --autotune-log-file FILE
                        append the measurements to a file
  --timeline-filename FILE
                        write a timeline for Perfetto: when each gradient was ready, was sent and was waited for; a
                        directory (DIR/) gets a file for each rank
  --stall-check, --no-stall-check
                        warn about ranks that others wait for, or do not
  --stall-check-warning-time-seconds SECONDS
                        time that they are waited for before the warning (60)
  --stall-check-shutdown-time-seconds SECONDS
                        time that they are waited for before the job is ended (0: never)
  --gloo-timeout-seconds SECONDS
                        how long a collective waits for a rank that hangs (1800)
  --log-level LEVEL     what workers log to stderr: TRACE, DEBUG, INFO, WARNING, ERROR or FATAL
  --log-with-timestamp, --no-log-hide-timestamp, --log-without-timestamp, --log-hide-timestamp
                        log with the time, or without
  --hierarchical-allreduce, --no-hierarchical-allreduce
                        all-reduce within each host and then between hosts, or do not; by default what is faster is
                        measured on GPUs
  --tcp                 keep NCCL off InfiniBand
  --gloo                use gloo for CPU tensors between hosts, which is the default

These are accepted, but have no effect:

  --cycle-time-ms, --cache-capacity, --disable-cache, --num-nccl-streams, --thread-affinity
  --hierarchical-allgather, --torus-allreduce, --timeline-mark-cycles
  --no-hierarchical-allgather, --no-torus-allreduce, --no-timeline-mark-cycles
  --autotune-warmup-samples, --autotune-steps-per-sample, --autotune-bayes-opt-max-samples
  --autotune-gaussian-process-noise
  --mpi, --jsrun, --mpi-args, --binding-args, --mpi-threads-disable, --no-mpi-threads-disable
"""

# Converts what a user wrote into the flag's value; the first argument is the flag's name as in Horovod's messages.
Read = Callable[[str, str], str]

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Flag:
    """A flag that sets ``variable``, which `hvdlite.environment` or NCCL reads; or has no effect if that is None.

    ``read`` converts its value; None for a switch, which sets ``value``. A line on stderr tells ``why`` it has no
    effect; "" if it asks for what hvdlite does anyway.
    """

    names: tuple[str, ...]
    variable: str | None
    read: Read | None = None
    value: str = "1"
    why: str = ""

    @property
    def name(self) -> str:
        """As in Horovod's messages."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def dest(self) -> str:
        # Flags that set the same variable share a dest, so the last one counts.
        return self.variable or self.name

    def parse(self, text: str) -> str:
        assert self.read is not None, "it is no switch"
        try:
            return self.read(self.name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _idle(name: str, why: str, read: Read | None = None) -> Flag:
    return Flag((f"--{name}",), None, read, why=why)


def _number(name: str, text: str) -> str:
    """Accepts a number of at least 0; its error has Horovod's words."""
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
    return str(int(float(_number(name, text)) * (1 << 20)))


def _level(_: str, text: str) -> str:
    if text.upper() not in _LEVELS:
        raise ValueError(f"{text!r} is not a log level: use one of {', '.join(_LEVELS)}")
    return text.lower()


def _path(_: str, text: str) -> str:
    if not text:
        raise ValueError("'' is not the name of a file")
    # Workers may change their working directory before they open it.
    return os.path.abspath(text)


def _timeline(name: str, text: str) -> str:
    if text == "DYNAMIC":  # no file: the program itself starts the timeline
        return text
    # A slash at the end, which abspath removes, asks for a directory.
    return os.path.join(_path(name, text), "") if text.endswith("/") else _path(name, text)


def _any(_: str, text: str) -> str:
    return text


_STALL_CHECK_DISABLE = "HVDLITE_STALL_CHECK_DISABLE"
_HIERARCHICAL = "HVDLITE_HIERARCHICAL_ALLREDUCE"
_LOG_HIDE_TIME = "HVDLITE_LOG_HIDE_TIME"
_NO_CYCLES = "hvdlite has no cycles: a collective starts when the ranks call it"
_NO_HIERARCHY = "gloo and NCCL choose the algorithm of this collective themselves"
_NO_SAMPLES = "autotune measures once, before the first step, and has no settings"
_NO_MPI = "hvdlite-run does not call mpirun"
_ITSELF = "hvdlite-run starts the workers itself"

FLAGS = (
    Flag(("--fusion-threshold-mb",), "HVDLITE_FUSION_THRESHOLD", _bytes_of_mebibytes),
    Flag(("--autotune",), "HVDLITE_AUTOTUNE"),
    Flag(("--no-autotune",), "HVDLITE_AUTOTUNE", value="0"),
    Flag(("--autotune-log-file",), "HVDLITE_AUTOTUNE_LOG", _path),
    Flag(("--timeline-filename",), "HVDLITE_TIMELINE", _timeline),
    Flag(("--stall-check",), _STALL_CHECK_DISABLE, value="0"),
    Flag(("--no-stall-check",), _STALL_CHECK_DISABLE),
    Flag(("--stall-check-warning-time-seconds",), "HVDLITE_STALL_CHECK_TIME_S", _positive),
    Flag(("--stall-check-shutdown-time-seconds",), "HVDLITE_STALL_SHUTDOWN_S", _number),
    Flag(("--gloo-timeout-seconds",), "HVDLITE_GLOO_TIMEOUT_SECONDS", _positive),
    Flag(("--log-level",), "HVDLITE_LOG_LEVEL", _level),
    Flag(("--log-with-timestamp", "--no-log-hide-timestamp"), _LOG_HIDE_TIME, value="0"),
    Flag(("--log-without-timestamp", "--log-hide-timestamp"), _LOG_HIDE_TIME),
    Flag(("--hierarchical-allreduce",), _HIERARCHICAL),
    Flag(("--no-hierarchical-allreduce",), _HIERARCHICAL, value="0"),
    Flag(("--tcp",), "NCCL_IB_DISABLE"),
    _idle("gloo", ""),
    _idle("cycle-time-ms", _NO_CYCLES, _number),
    _idle("timeline-mark-cycles", _NO_CYCLES),
    _idle("no-timeline-mark-cycles", ""),
    _idle("cache-capacity", "the ranks agree on their buckets once, so there is nothing to cache", _number),
    _idle("disable-cache", "hvdlite-run checks the hosts anew for each job and caches nothing"),
    _idle("num-nccl-streams", "PyTorch manages the streams of NCCL", _number),
    _idle(
        "thread-affinity",
        "the operating system places threads; to bind them, write numactl before the command",
        _number,
    ),
    *(
        flag
        for name in ("hierarchical-allgather", "torus-allreduce")
        for flag in (_idle(name, _NO_HIERARCHY), _idle(f"no-{name}", ""))
    ),
    _idle("autotune-warmup-samples", _NO_SAMPLES, _number),
    _idle("autotune-steps-per-sample", _NO_SAMPLES, _number),
    _idle("autotune-bayes-opt-max-samples", _NO_SAMPLES, _number),
    _idle("autotune-gaussian-process-noise", _NO_SAMPLES, _share),
    _idle("mpi", f"{_ITSELF}; to start them by MPI, use mpirun -np 4 python -m hvdlite.horovod train.py"),
    _idle("jsrun", _ITSELF),
    _idle("mpi-args", _NO_MPI, _any),
    _idle("binding-args", f"{_NO_MPI}; to bind workers, write numactl before the command", _any),
    _idle("mpi-threads-disable", _NO_MPI),
    _idle("no-mpi-threads-disable", _NO_MPI),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags to ``parser``; one that is not given is None."""
    for flag in FLAGS:
        if flag.read is None:
            parser.add_argument(*flag.names, dest=flag.dest, action="store_const", const=flag.value)
        else:
            parser.add_argument(*flag.names, dest=flag.dest, type=flag.parse)


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Returns the variables that the given flags set for the workers."""
    values = {flag.variable: getattr(options, flag.dest) for flag in FLAGS if flag.variable is not None}
    return {variable: value for variable, value in values.items() if value is not None}


def say_what_has_no_effect(options: argparse.Namespace) -> None:
    """Writes a line to stderr for each given flag that has no effect."""
    for flag in FLAGS:
        if flag.variable is None and flag.why and getattr(options, flag.dest) is not None:
            say(f"{flag.names[0]} has no effect: {flag.why}")
