"""
hvdlite's own environment variables: names, parsers and defaults, and remarks about variables without effect.

    Environment         the variables that `hvd.init` reads; each field is a row of the table
    read_environment    their values, with a remark about each that is set and has no effect

To add a variable, add a field here and its row in docs/variables.md; tests/test_environment.py compares both. A
variable has up to three names: HVDLITE_ with a short name, HVDLITE_ with the name, HOROVOD_ with the name if Horovod
has it. The first one that is set counts; an empty value counts as not set. The variables of other launchers are in
`rendezvous.launchers`.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from hvdlite_wire import job_contract

from .values import LONGEST_S

DYNAMIC = "DYNAMIC"
"""A value of `Environment.timeline`: recording starts only when the program calls `hvd.start_timeline`."""

DEFAULT_STALL_WARNING_S = 60.0

# torch.distributed's own default. It is long, because rank 0 may evaluate or save while the others wait; the stall
# check warns earlier.
DEFAULT_TIMEOUT_S = 1800.0

TRACE = 5

# When parameters are compared, as `hvd.init` takes it.
CheckParameters = bool | int | Literal["warn"]
_LEVELS: Mapping[str, int] = MappingProxyType(
    {
        "trace": TRACE,
        "debug": logging.DEBUG,
        "info": logging.INFO,
        "warning": logging.WARNING,
        "error": logging.ERROR,
        "fatal": logging.CRITICAL,
    }
)
_SWITCH: Mapping[str, bool] = MappingProxyType(
    {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
)
_DECIMAL = re.compile(r"\+?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")


# Parsers of a variable's text. Each raises a ValueError whose text completes the sentence "NAME='text' is ...".


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("neither 1 nor 0")
    return _SWITCH[text.lower()]


def _switch_off(text: str) -> bool:
    return not _switch(text)


def _whole(text: str, most_digits: int, otherwise: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= most_digits):
        raise ValueError(otherwise)
    return int(text)


def _bytes(text: str) -> int:
    return _whole(text, 15, "not a number of bytes, such as 16777216, or 0 for no fusion")


def _steps(text: str) -> bool | int:
    otherwise = "neither 0, for no comparison of parameters, nor the number of steps from one to the next, such as 1000"
    return _whole(text, 9, otherwise) or False


def _rank(text: str) -> int:
    return _whole(text, 9, "not a rank, such as 2")


def _decimal(text: str) -> float:
    """Parses a number; nan if it is none. float() alone would accept non-ASCII digits, and 1_0."""
    return float(text) if _DECIMAL.fullmatch(text) else math.nan


def _seconds(text: str) -> float:
    seconds = _decimal(text)
    if not seconds > 0:
        raise ValueError("not a positive number of seconds, such as 60")
    if seconds > LONGEST_S:
        raise ValueError(f"too many seconds: set {LONGEST_S:.0f} at most")
    return seconds


def _seconds_or_never(text: str) -> float | None:
    try:
        return None if _decimal(text) == 0 else _seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, or 0 for never") from None


def _percent_or_never(text: str) -> float | None:
    percent = _decimal(text)
    if not 0 <= percent < 100:
        raise ValueError("not a number of percent of a step from 0, for never, to below 100, such as 10")
    return percent / 100 or None


def _level(text: str) -> int:
    if text.lower() not in _LEVELS:
        raise ValueError(f"not a log level: use one of {', '.join(_LEVELS)}")
    return _LEVELS[text.lower()]


class Given(NamedTuple):
    """A variable's name that counts, and the text it is set to (empty where it is not set)."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. ``name`` and ``short`` are without HVDLITE_; ``is_horovods``: Horovod has it too."""

    name: str
    parse: Callable[[str], object] = str
    is_horovods: bool = True
    short: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its full names, in the order in which `given_in` looks them up."""
        ours = [f"HVDLITE_{each}" for each in (self.short, self.name) if each is not None]
        return (*ours, f"HOROVOD_{self.name}") if self.is_horovods else tuple(ours)

    def given_in(self, environ: Mapping[str, str]) -> Given:
        name = next((each for each in self.names if each in environ), self.names[0])
        return Given(name, environ.get(name, "").strip())

    def read(self, given: Given) -> object:
        """Parses a non-empty text. Raises a ValueError that names the variable, the text and what is allowed."""
        try:
            return self.parse(given.text)
        except ValueError as error:
            raise ValueError(f"{given.name}={given.text!r} is {error}") from None


def _shared(default: object, name: str, parse: Callable[[str], object], short: str | None = None) -> Any:
    """Makes a field of `Environment` for a variable that Horovod has under the same name."""
    return field(default=default, metadata={"variable": Variable(name, parse, short=short)})


def _own(default: object, name: str, parse: Callable[[str], object]) -> Any:
    """Makes a field of `Environment` for a variable that Horovod does not have."""
    return field(default=default, metadata={"variable": Variable(name, parse, is_horovods=False)})


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of the user's variables, which docs/variables.md explains. `hvd.init` reads them once.

    None means "not set" for ``fusion_threshold_bytes``, ``log_level`` and ``debug_rank``, "never" for
    ``stall_shutdown_s`` and ``straggler_warning`` (a part of a step), and "chosen at start" for ``hierarchical``.
    ``check_parameters`` has the meaning that it has in `hvd.init`. ``remarks`` are warnings for the user about
    variables that are set but have no effect.
    """

    fusion_threshold_bytes: int | None = _shared(None, "FUSION_THRESHOLD", _bytes)
    autotune: bool = _shared(False, "AUTOTUNE", _switch)
    autotune_log: str | None = _shared(None, "AUTOTUNE_LOG", str)
    timeline: str | None = _shared(None, "TIMELINE", str)
    stall_check: bool = _shared(True, "STALL_CHECK_DISABLE", _switch_off)
    stall_warning_s: float = _shared(
        DEFAULT_STALL_WARNING_S, "STALL_CHECK_TIME_SECONDS", _seconds, short="STALL_CHECK_TIME_S"
    )
    stall_shutdown_s: float | None = _shared(
        None, "STALL_SHUTDOWN_TIME_SECONDS", _seconds_or_never, short="STALL_SHUTDOWN_S"
    )
    straggler_warning: float | None = _own(0.1, "STRAGGLER_WARNING", _percent_or_never)
    stragglers: bool = _own(True, "STRAGGLERS", _switch)
    log_level: int | None = _shared(None, "LOG_LEVEL", _level)
    log_hide_time: bool = _shared(False, "LOG_HIDE_TIME", _switch)
    verbose: bool = _own(False, "VERBOSE", _switch)
    hierarchical: bool | None = _shared(None, "HIERARCHICAL_ALLREDUCE", _switch)
    check: bool = _own(True, "CHECK", _switch)
    check_parameters: CheckParameters = _own(True, "CHECK_PARAMETERS", _steps)  # noqa: RUF009 - values do not change
    survive: bool = _own(False, "SURVIVE", _switch)
    debug_rank: int | None = _own(None, "DEBUG_RANK", _rank)
    independent: bool = _own(False, "INDEPENDENT", _switch)
    shm: bool = _own(True, "SHM", _switch)
    timeout_s: float = _shared(DEFAULT_TIMEOUT_S, "GLOO_TIMEOUT_SECONDS", _seconds)
    remarks: tuple[str, ...] = ()


READ_BY_INIT: Mapping[str, Variable] = MappingProxyType(
    {each.name: each.metadata["variable"] for each in fields(Environment) if each.metadata}
)
"""The variable of each field of `Environment`, by the field's name."""

SPARK_START_TIMEOUT = Variable("SPARK_START_TIMEOUT", _seconds)
"""It is read by `spark`."""

OF_USERS = (
    *READ_BY_INIT.values(),
    # hvdlite-run reads the first two, and `rendezvous.rank_info` the secret.
    Variable("START_TIMEOUT"),
    Variable("ELASTIC_TIMEOUT"),
    SPARK_START_TIMEOUT,
    Variable("SECRET", is_horovods=False),
    Variable("SECRET_FILE", is_horovods=False),
)
"""All variables that a user may set, in the order of docs/variables.md."""

SET_FOR_WORKERS = frozenset(
    {
        *(job_contract.RANK, job_contract.SIZE, job_contract.LOCAL_RANK, job_contract.LOCAL_SIZE),
        *(job_contract.CROSS_RANK, job_contract.CROSS_SIZE, job_contract.WORKER, job_contract.ELASTIC),
        *(job_contract.HOST, job_contract.STORE, job_contract.CHAOS, job_contract.JOB_DIR),
        *job_contract.HOROVODS.values(),
    }
)
"""The names of the variables that hvdlite-run sets for each worker."""

PLACE_TAKEN = "HVDLITE_PLACE_TAKEN"
"""The variable that a rank sets for the programs that it starts; see `rendezvous.launchers`."""

KNOWN = frozenset(name for each in OF_USERS for name in each.names) | SET_FOR_WORKERS | {PLACE_TAKEN}


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Reads and parses the variables. Raises a ValueError that names a wrong one and what is allowed."""
    given = {name: variable.given_in(environ) for name, variable in READ_BY_INIT.items()}
    values: dict[str, Any] = {name: READ_BY_INIT[name].read(each) for name, each in given.items() if each.text}
    read = _settle_autotune(_settle_stall_times(_settle_debugging(Environment(**values), given), given), given)
    return replace(read, remarks=(*read.remarks, *remarks_of_ignored(environ)))


def _settle_debugging(read: Environment, given: Mapping[str, Given]) -> Environment:
    """Has ranks wait for one that is debugged, without reports, for as long as may be."""
    if read.debug_rank is None:
        return read
    timeout_s = read.timeout_s if given["timeout_s"].text else LONGEST_S
    return replace(read, stall_check=False, timeout_s=timeout_s)


def _settle_stall_times(read: Environment, given: Mapping[str, Given]) -> Environment:
    """Drops a stall shutdown that can never happen with the other stall settings, and adds a remark that says so."""
    shutdown_s, warning_s = read.stall_shutdown_s, read.stall_warning_s
    if shutdown_s is None:
        return read
    if not read.stall_check:
        why = ", because the stall check is turned off"
    elif shutdown_s > warning_s:
        return read
    elif not given["stall_warning_s"].text:
        # The warning time is only the default here: lower it rather than ignore what the user has set.
        return replace(read, stall_warning_s=shutdown_s / 2)
    else:
        why = f": it must be longer than the {warning_s:g} s after which the warning comes"
    remark = f"{given['stall_shutdown_s']} has no effect{why}"
    return replace(read, stall_shutdown_s=None, remarks=(*read.remarks, remark))


def _settle_autotune(read: Environment, given: Mapping[str, Given]) -> Environment:
    """Turns autotune off if the user has set the bucket size that it would choose, and adds a remark that says so."""
    if not read.autotune or read.fusion_threshold_bytes is None:
        return read
    size = given["fusion_threshold_bytes"]
    remark = (
        f"{given['autotune']} has no effect, because {size} (--fusion-threshold-mb) sets the size of the buckets: "
        "unset it to have the size measured"
    )
    return replace(read, autotune=False, remarks=(*read.remarks, remark))


_NO_CYCLES = "hvdlite has no cycles: a collective starts when the ranks call it"
_NO_HIERARCHY = "gloo and NCCL choose the algorithm of this collective themselves"
_NO_SAMPLES = "autotune measures once, before the first step, and has no settings"
_NO_CHOICE = "CPU tensors are sent through shared memory and, between hosts, by gloo; CUDA tensors by NCCL"
_NO_BUFFER_COPIES = "gradients are computed in the buffer that is sent"
_NO_RENDEZVOUS = "ranks connect through hvdlite-run, or whatever launcher started them"
_NO_MPI = "hvdlite does not use MPI"
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "HOROVOD_CYCLE_TIME": _NO_CYCLES,
        "HOROVOD_TIMELINE_MARK_CYCLES": _NO_CYCLES,
        "HOROVOD_CACHE_CAPACITY": "ranks agree on the buckets once, and need no cache",
        "HOROVOD_HIERARCHICAL_ALLGATHER": _NO_HIERARCHY,
        "HOROVOD_TORUS_ALLREDUCE": _NO_HIERARCHY,
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_SAMPLES,
        "HOROVOD_CONTROLLER": _NO_CHOICE,
        "HOROVOD_CPU_OPERATIONS": _NO_CHOICE,
        "HOROVOD_GLOO_IFACE": "torch's gloo reads GLOO_SOCKET_IFNAME, and hvdlite-run has --network-interface",
        "HOROVOD_NUM_NCCL_STREAMS": "PyTorch gives NCCL a stream of its own",
        "HOROVOD_THREAD_AFFINITY": "the system places the threads: use taskset or numactl",
        "HOROVOD_MPI_THREADS_DISABLE": _NO_MPI,
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE": _NO_MPI,
        "HOROVOD_BATCH_D2D_MEMCOPIES": _NO_BUFFER_COPIES,
        "HOROVOD_DISABLE_GROUP_FUSION": _NO_BUFFER_COPIES,
        "HOROVOD_ENABLE_ASYNC_COMPLETION": "waiting for a CUDA tensor always blocks its stream and not the program",
        "HOROVOD_DISABLE_NVTX_RANGES": "hvdlite writes no NVTX ranges",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may be added and removed at any time",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_RENDEZVOUS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_RENDEZVOUS,
        "HOROVOD_ENABLE_XLA_OPS": "hvdlite is for PyTorch",
        "HOROVOD_CCL_CACHE": "hvdlite does not use oneCCL",
    }
)
"""Why each variable of Horovod's that has no effect here has none."""

# Values that ask for what hvdlite does anyway: with these, a variable is not reported.
_HARMLESS = {
    "HOROVOD_TIMELINE_MARK_CYCLES": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
}

# Variables that configure the build of Horovod. They may still be set where it was built.
_OF_BUILDING = re.compile(r"HOROVOD_((WITH|WITHOUT|GPU|BUILD|CUDA|NCCL|ROCM|CCL|ALLOW)(_.*)?|SKIP_COMPILE)")


def remarks_of_ignored(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns one line about all HVDLITE_ and HOROVOD_ variables that are set and not `KNOWN`; () without any."""
    names_by_reason: dict[str, list[str]] = {}
    for name in sorted(environ):
        text = environ[name].strip()
        if text and name.startswith(("HVDLITE_", "HOROVOD_")) and name not in KNOWN:
            horovods = name.replace("HVDLITE_", "HOROVOD_", 1)
            if horovods not in IGNORED:
                names_by_reason.setdefault(_why_unknown(name), []).append(name)
            elif text.lower() != _HARMLESS.get(horovods):
                names_by_reason.setdefault(IGNORED[horovods], []).append(name)
    if not names_by_reason:
        return ()
    said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())
    return (f"these variables are set and have no effect in hvdlite: {said}",)


def _why_unknown(name: str) -> str:
    if _OF_BUILDING.fullmatch(name):
        return "hvdlite has nothing to build"
    meant = _meant_by(name)
    return "unknown" if meant is None else f"unknown; did you mean {meant}?"


def _meant_by(name: str) -> str | None:
    """Guesses the variable that the user meant by a misspelt one; None without a guess.

    For HOROVOD_CHECK_PARAMETERS it is HVDLITE_CHECK_PARAMETERS, because Horovod has no such variable.
    """
    prefixes = ("HVDLITE_",) if name.startswith("HVDLITE_") else ("HOROVOD_", "HVDLITE_")
    rest = name.removeprefix(prefixes[0])
    whole: dict[str, str] = {}
    for prefix in prefixes:
        for each in sorted(each for each in KNOWN if each.startswith(prefix)):
            whole.setdefault(each.removeprefix(prefix), each)
    # In the order of likelihood: the same name with the other prefix, a name that was cut short, a similar name.
    alike = [each for each in whole if each == rest]
    alike += [each for each in whole if rest and each.startswith(f"{rest}_")]
    alike += difflib.get_close_matches(rest, whole, n=1, cutoff=0.75)
    return whole[alike[0]] if alike else None
