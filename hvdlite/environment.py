"""
The tables of hvdlite's own environment variables: names, parsers, defaults and meanings.

    Environment      the variables that `hvd.init` reads; each field is a row of the table
    READ_ELSEWHERE   the variables that `hvdlite-run` and `rendezvous.rank_info` read
    SET_FOR_WORKERS  the variables that `hvdlite-run` sets for each worker

To add a variable, add one entry to one of these. Its parsing, its error messages, the warning about misspelt names
(`ignored`) and its row in docs/variables.md follow from the entry (tests/test_environment.py compares the rows). A
variable has up to three names: HVDLITE_ with a short name, HVDLITE_ with the name, HOROVOD_ with Horovod's name. The
first one that is set counts; an empty value counts as not set. The variables of other launchers are in
`rendezvous.launchers`.

`runtime.world` calls `read_environment` in `hvd.init`. The functions here take the environment as an argument and
change nothing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from hvdlite_wire import job_contract

from .ignored import remarks_of_ignored
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


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a variable's value: ``allowed`` describes it in the documentation, ``read`` parses a text.

    ``read`` raises a ValueError whose text completes the sentence "NAME='text' is ...".
    """

    allowed: str
    read: Callable[[str], object] = str


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("neither 1 nor 0")
    return _SWITCH[text.lower()]


def _bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError("not a number of bytes, such as 16777216, or 0 for no fusion")
    return int(text)


def _steps(text: str) -> bool | int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError(
            "neither 0, for no comparison of parameters, nor the number of steps from one to the next, such as 1000"
        )
    return int(text) or False


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError("not a rank, such as 2")
    return int(text)


def _seconds(text: str) -> float:
    seconds = _decimal(text)
    if not seconds > 0:
        raise ValueError("not a positive number of seconds, such as 60")
    return seconds


def _seconds_or_never(text: str) -> float | None:
    seconds = _decimal(text)
    if not seconds >= 0:
        raise ValueError("not a positive number of seconds, such as 60, or 0 for never")
    return seconds or None


def _percent_or_never(text: str) -> float | None:
    percent = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if not 0 <= percent < 100:
        raise ValueError("not a number of percent of a step from 0, for never, to below 100, such as 10")
    return percent / 100 or None


def _decimal(text: str) -> float:
    """Parses a number of seconds; nan if it is none. float() alone would accept non-ASCII digits, and 1_0."""
    number = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if number > LONGEST_S:
        raise ValueError(f"too many seconds: set {LONGEST_S:.0f} at most")
    return number


def _level(text: str) -> int:
    if text.lower() not in _LEVELS:
        raise ValueError(f"not a log level: use one of {', '.join(_LEVELS)}")
    return _LEVELS[text.lower()]


SWITCH = Format("1 or 0", _switch)
SWITCH_OFF = Format("1 or 0", lambda text: not _switch(text))
BYTES = Format("bytes", _bytes)
STEPS = Format("steps, or 0", _steps)
SECONDS = Format("seconds", _seconds)
SECONDS_OR_NEVER = Format("seconds, or 0", _seconds_or_never)
PERCENT_OR_NEVER = Format("percent, or 0", _percent_or_never)
LEVEL = Format("`trace` to `fatal`", _level)
FILE = Format("a file")
TIMELINE = Format(f"a file, a directory, or `{DYNAMIC}`")
NUMBER = Format("a number")
RANK = Format("a rank", _rank)


class Given(NamedTuple):
    """A variable's name that counts, and the text it is set to (empty where it is not set)."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: a row of the table.

    ``name`` and ``short`` are prefixed with HVDLITE_, ``horovods`` with HOROVOD_ (None: Horovod has no such variable).
    ``default`` and ``meaning`` are texts for the documentation.
    """

    name: str
    format: Format
    default: str
    meaning: str
    horovods: str | None = None
    short: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its full names with prefix, in the order in which `given_in` looks them up."""
        ours = [f"HVDLITE_{each}" for each in (self.short, self.name) if each is not None]
        return (*ours, *([] if self.horovods is None else [f"HOROVOD_{self.horovods}"]))

    def given_in(self, environ: Mapping[str, str]) -> Given:
        name = next((each for each in self.names if each in environ), self.names[0])
        return Given(name, environ.get(name, "").strip())

    def read(self, given: Given) -> object:
        """Parses a non-empty text. Raises a ValueError that names the variable, the text and what is allowed."""
        try:
            return self.format.read(given.text)
        except ValueError as error:
            raise ValueError(f"{given.name}={given.text!r} is {error}") from None


def _shared(value: object, name: str, format: Format, default: str, meaning: str, *, short: str | None = None) -> Any:
    """Makes a field of `Environment` for a variable that Horovod has under the same name; ``value`` is its default."""
    return field(default=value, metadata={"variable": Variable(name, format, default, meaning, name, short)})


def _own(value: object, name: str, format: Format, default: str, meaning: str) -> Any:
    """Makes a field of `Environment` for a variable that Horovod does not have."""
    return field(default=value, metadata={"variable": Variable(name, format, default, meaning)})


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of the user's variables. `hvd.init` reads them once, and the world keeps them.

    None means "not set" for ``fusion_threshold_bytes``, ``log_level`` and ``debug_rank``, "never" for
    ``stall_shutdown_s`` and ``straggler_warning`` (a part of a step), and "chosen at start" for ``hierarchical``.
    ``check_parameters`` has the meaning that it has in `hvd.init`. ``remarks`` are warnings for the user about
    variables that are set but have no effect.
    """

    fusion_threshold_bytes: int | None = _shared(
        None,
        "FUSION_THRESHOLD",
        BYTES,
        "16777216",
        "the size of a gradient bucket, unless `bucket_cap_mb` is passed; 0: one bucket per gradient",
    )
    autotune: bool = _shared(False, "AUTOTUNE", SWITCH, "0", "1: measure the best bucket size")
    autotune_log: str | None = _shared(None, "AUTOTUNE_LOG", FILE, "–", "rank 0 appends the measurements to it")
    timeline: str | None = _shared(
        None,
        "TIMELINE",
        TIMELINE,
        "–",
        "the timeline is written to it, a directory gets a file for each rank; `DYNAMIC`: when the program calls "
        "`hvd.start_timeline`",
    )
    stall_check: bool = _shared(
        True, "STALL_CHECK_DISABLE", SWITCH_OFF, "0", "1: do not warn of ranks that others wait for, nor end the job"
    )
    stall_warning_s: float = _shared(
        DEFAULT_STALL_WARNING_S,
        "STALL_CHECK_TIME_SECONDS",
        SECONDS,
        "60",
        "how long ranks wait for others before a warning names these",
        short="STALL_CHECK_TIME_S",
    )
    stall_shutdown_s: float | None = _shared(
        None,
        "STALL_SHUTDOWN_TIME_SECONDS",
        SECONDS_OR_NEVER,
        "0",
        "how long ranks wait for others before the job is ended; 0: without limit",
        short="STALL_SHUTDOWN_S",
    )
    straggler_warning: float | None = _own(
        0.1,
        "STRAGGLER_WARNING",
        PERCENT_OR_NEVER,
        "10",
        "a warning names the rank that costs the others more than this part of a step, for a minute; 0: never",
    )
    stragglers: bool = _own(
        True, "STRAGGLERS", SWITCH, "1", "0: the phases of this rank's steps are not measured for `hvd.stragglers`"
    )
    log_level: int | None = _shared(
        None, "LOG_LEVEL", LEVEL, "–", "the log goes to stderr, from this level on (`debug`: with whole tracebacks)"
    )
    log_hide_time: bool = _shared(False, "LOG_HIDE_TIME", SWITCH, "0", "1: lines of the log have no time")
    verbose: bool = _own(
        False,
        "VERBOSE",
        SWITCH,
        "0",
        "1: rank 0 prints at the start which ranks there are and how tensors are sent, as with `hvdlite-run --verbose`",
    )
    hierarchical: bool | None = _shared(
        None,
        "HIERARCHICAL_ALLREDUCE",
        SWITCH,
        "measured, of CUDA tensors",
        "1: all-reduces add up within each host first, and then between hosts; 0: in one step",
    )
    check: bool = _own(True, "CHECK", SWITCH, "1", "0: collectives start without a check that all ranks call the same")
    check_parameters: CheckParameters = _own(  # noqa: RUF009 - numbers and texts do not change
        True,
        "CHECK_PARAMETERS",
        STEPS,
        "at the first step",
        "N: ranks compare parameters at an optimizer's first step and every N-th after it; 0: never",
    )
    survive: bool = _own(
        False,
        "SURVIVE",
        SWITCH,
        "0",
        "1: in an elastic job the other ranks finish the step in which one is lost, as `hvdlite-run --survive` has it",
    )
    debug_rank: int | None = _own(
        None,
        "DEBUG_RANK",
        RANK,
        "–",
        "this rank waits in `hvd.init` until a debugger is connected, and the others wait for it without limit, as "
        "with `hvdlite-run --debug-rank`",
    )
    independent: bool = _own(
        False,
        "INDEPENDENT",
        SWITCH,
        "0",
        "1: the ranks are to train without each other: no warning at the end that they did, as with `hvdlite-run "
        "--independent`",
    )
    shm: bool = _own(True, "SHM", SWITCH, "1", "0: do not use shared memory between the ranks of a host")
    timeout_s: float = _shared(
        DEFAULT_TIMEOUT_S, "GLOO_TIMEOUT_SECONDS", SECONDS, "1800", "`timeout_s` of `hvd.init`, unless that is passed"
    )
    remarks: tuple[str, ...] = ()


READ_BY_INIT: Mapping[str, Variable] = MappingProxyType(
    {each.name: each.metadata["variable"] for each in fields(Environment) if each.metadata}
)
"""The variable of each field of `Environment`, by the field's name."""

_START_TIMEOUT = "`hvdlite-run --start-timeout`, unless that is given"
_ELASTIC_TIMEOUT = "`hvdlite-run --elastic-timeout`, unless that is given"
_SECRET = (
    "a secret, equal on all ranks, by which they authenticate each other; under torchrun and a plain srun "
    "[set one](security.md)"
)
READ_ELSEWHERE = (
    Variable("START_TIMEOUT", SECONDS, "60", _START_TIMEOUT, horovods="START_TIMEOUT"),
    Variable("ELASTIC_TIMEOUT", SECONDS, "600", _ELASTIC_TIMEOUT, horovods="ELASTIC_TIMEOUT"),
    Variable("SECRET", Format("a secret"), "–", _SECRET),
    Variable("SECRET_FILE", FILE, "–", "contains the secret"),
)
"""The other variables that the user may set; `hvdlite-run` and `rendezvous.rank_info` read them."""


def _set(name: str, format: Format, meaning: str) -> Variable:
    """Makes the row of a variable that hvdlite-run sets."""
    own, horovods = name.removeprefix("HVDLITE_"), job_contract.HOROVODS.get(name)
    return Variable(own, format, "–", meaning, None if horovods is None else horovods.removeprefix("HOROVOD_"))


SET_FOR_WORKERS = (
    _set(job_contract.RANK, NUMBER, "the worker's rank among all"),
    _set(job_contract.SIZE, NUMBER, "the number of workers"),
    _set(job_contract.LOCAL_RANK, NUMBER, "the worker's rank among those on its host"),
    _set(job_contract.LOCAL_SIZE, NUMBER, "the number of workers on its host"),
    _set(job_contract.CROSS_RANK, NUMBER, "its host's rank among the hosts with this local rank"),
    _set(job_contract.CROSS_SIZE, NUMBER, "the number of hosts with this local rank"),
    _set(job_contract.WORKER, NUMBER, "the worker's number, which stays: in a job that is not elastic, its rank"),
    _set(job_contract.ELASTIC, SWITCH, "1 in an elastic job: ranks and sizes change"),
    _set(job_contract.HOST, Format("a name"), "its host, as the user wrote it"),
    _set(job_contract.STORE, Format("a URL"), "the store through which the workers connect"),
    _set(job_contract.CHAOS, Format("faults"), "the worker's own faults of `hvdlite-run --chaos`"),
    _set(job_contract.JOB_DIR, Format("a directory"), "private to the job on this host, and removed at its end"),
)
"""The variables that hvdlite-run sets for each worker; `hvdlite_wire.job_contract` has their names."""

OF_USERS = (*READ_BY_INIT.values(), *READ_ELSEWHERE)
"""All variables that a user may set, in the order of docs/variables.md."""

PLACE_TAKEN = "HVDLITE_PLACE_TAKEN"
"""The variable that a rank sets for the programs that it starts; see `rendezvous.launchers`."""

KNOWN = frozenset(name for each in (*OF_USERS, *SET_FOR_WORKERS) for name in each.names) | {PLACE_TAKEN}


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Reads and parses the variables. Raises a ValueError that names a wrong one and what is allowed."""
    given = {name: variable.given_in(environ) for name, variable in READ_BY_INIT.items()}
    values: dict[str, Any] = {name: READ_BY_INIT[name].read(each) for name, each in given.items() if each.text}
    read = _settle_autotune(_settle_stall_times(_settle_debugging(Environment(**values), given), given), given)
    return replace(read, remarks=(*read.remarks, *remarks_of_ignored(environ, KNOWN)))


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
