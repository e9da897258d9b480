"""
hvdlite's own environment variables: a table of their names, readers, defaults and meanings.

    Environment      what `hvd.init` reads: a row of the table for each field
    READ_ELSEWHERE   what `hvdlite-run` and `rendezvous.secret` read
    SET_FOR_WORKERS  what `hvdlite-run` sets for each worker

A new variable is one entry in one of these. Reading, error messages, the warning of misspelt names (`ignored`) and
the README's list follow from the entry (tests/test_environment.py compares the list). A variable has up to three names:
HVDLITE_ and a short one, HVDLITE_ and the name, HOROVOD_ and Horovod's name. The first that is set counts; an empty
value is none. What other launchers set is in `rendezvous.launchers`.

Pure: nothing here reads `os.environ` or acts on a value.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from .ignored import remarks_of_ignored
from .values import LONGEST_S

DYNAMIC = "DYNAMIC"
"""The value of `Environment.timeline` with which nothing is recorded until the program calls `hvd.start_timeline`."""

DEFAULT_STALL_WARNING_S = 60.0

# As torch.distributed's own: rank 0 may evaluate or save for long while the others wait; a stall is warned of before.
DEFAULT_TIMEOUT_S = 1800.0

TRACE = 5
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
    """A way to write a value: ``allowed`` names it in the documentation, ``read`` turns the text into the value.

    ``read`` raises a ValueError that says what the text is not. The message continues "NAME='text' is ...".
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


def _decimal(text: str) -> float:
    """The number that ``text`` is, or nan. float() alone would read the digits of all scripts, and 1_0."""
    number = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if number > LONGEST_S:
        raise ValueError(f"more seconds than can be waited: give {LONGEST_S:g} at most")
    return number


def _level(text: str) -> int:
    if text.lower() not in _LEVELS:
        raise ValueError(f"no level of the log: use one of {', '.join(_LEVELS)}")
    return _LEVELS[text.lower()]


SWITCH = Format("1 or 0", _switch)
SWITCH_OFF = Format("1 or 0", lambda text: not _switch(text))
BYTES = Format("bytes", _bytes)
STEPS = Format("steps, or 0", _steps)
SECONDS = Format("seconds", _seconds)
SECONDS_OR_NEVER = Format("seconds, or 0", _seconds_or_never)
LEVEL = Format("`trace` to `fatal`", _level)
FILE = Format("a file")
TIMELINE = Format(f"a file, or `{DYNAMIC}`")
NUMBER = Format("a number")


class Given(NamedTuple):
    """A variable as it is set: the name that counts, and the text, which is empty where none is set."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table.

    ``name`` and ``short`` stand after HVDLITE_, ``horovods`` after HOROVOD_ (None: Horovod has no such variable).
    ``default`` and ``meaning`` are for the documentation: what counts where it is not set, and what the value says.
    """

    name: str
    format: Format
    default: str
    meaning: str
    horovods: str | None = None
    short: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its whole names, the one that counts first."""
        ours = [f"HVDLITE_{each}" for each in (self.short, self.name) if each is not None]
        return (*ours, *([] if self.horovods is None else [f"HOROVOD_{self.horovods}"]))

    def given_in(self, environ: Mapping[str, str]) -> Given:
        name = next((each for each in self.names if each in environ), self.names[0])
        return Given(name, environ.get(name, "").strip())

    def read(self, given: Given) -> object:
        """The value of a text that is not empty. A ValueError names the variable, the text and what is allowed."""
        try:
            return self.format.read(given.text)
        except ValueError as error:
            raise ValueError(f"{given.name}={given.text!r} is {error}") from None


def _shared(name: str, format: Format, default: str, meaning: str, *, short: str | None = None) -> dict[str, Any]:
    """The metadata of a field: a variable that Horovod has under the same name."""
    return {"variable": Variable(name, format, default, meaning, horovods=name, short=short)}


def _own(name: str, format: Format, default: str, meaning: str) -> dict[str, Any]:
    """The metadata of a field: a variable that hvdlite alone has."""
    return {"variable": Variable(name, format, default, meaning)}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the user's variables say, read once by `hvd.init` and kept by the world. Each field is a row of the table.

    None is: for ``fusion_threshold_bytes`` and ``log_level`` not set, for ``stall_shutdown_s`` never, for
    ``hierarchical`` measured. ``check_parameters`` is as in `hvd.init`. ``remarks`` are lines for the user about
    variables that are set to no effect.
    """

    fusion_threshold_bytes: int | None = field(
        default=None,
        metadata=_shared(
            "FUSION_THRESHOLD",
            BYTES,
            "16777216",
            "how much of the gradients travels at once, unless `bucket_cap_mb` is given; 0: each parameter by itself",
        ),
    )
    autotune: bool = field(
        default=False, metadata=_shared("AUTOTUNE", SWITCH, "0", "1: measure how much should travel at once")
    )
    autotune_log: str | None = field(
        default=None, metadata=_shared("AUTOTUNE_LOG", FILE, "–", "rank 0 adds to it what was measured")
    )
    timeline: str | None = field(
        default=None,
        metadata=_shared(
            "TIMELINE", TIMELINE, "–", "the timeline is written to it; with `DYNAMIC` the program says when"
        ),
    )
    stall_check: bool = field(
        default=True,
        metadata=_shared("STALL_CHECK_DISABLE", SWITCH_OFF, "0", "1: do not look for ranks that others wait for"),
    )
    stall_warning_s: float = field(
        default=DEFAULT_STALL_WARNING_S,
        metadata=_shared(
            "STALL_CHECK_TIME_SECONDS",
            SECONDS,
            "60",
            "how long ranks are waited for until a warning names them",
            short="STALL_CHECK_TIME_S",
        ),
    )
    stall_shutdown_s: float | None = field(
        default=None,
        metadata=_shared(
            "STALL_SHUTDOWN_TIME_SECONDS",
            SECONDS_OR_NEVER,
            "0",
            "how long they are waited for until the job is ended; 0: for ever",
            short="STALL_SHUTDOWN_S",
        ),
    )
    log_level: int | None = field(
        default=None,
        metadata=_shared(
            "LOG_LEVEL",
            LEVEL,
            "–",
            "the log goes to stderr, from this level on (`debug`: with whole tracebacks)",
        ),
    )
    log_hide_time: bool = field(
        default=False, metadata=_shared("LOG_HIDE_TIME", SWITCH, "0", "1: the log is without the time")
    )
    verbose: bool = field(
        default=False,
        metadata=_own(
            "VERBOSE",
            SWITCH,
            "0",
            "1: rank 0 says at the start which ranks there are and how tensors travel, as with `hvdlite-run --verbose`",
        ),
    )
    hierarchical: bool | None = field(
        default=None,
        metadata=_shared(
            "HIERARCHICAL_ALLREDUCE",
            SWITCH,
            "measured, of CUDA tensors",
            "1: sums are made within hosts, and then between them; 0: they are not",
        ),
    )
    check: bool = field(
        default=True,
        metadata=_own("CHECK", SWITCH, "1", "0: collectives start without a comparison of what each rank asks for"),
    )
    check_parameters: bool | int = field(
        default=True,
        metadata=_own(
            "CHECK_PARAMETERS",
            STEPS,
            "at the first step",
            "N: ranks compare parameters at an optimizer's first step and every N-th after it; 0: never",
        ),
    )
    shm: bool = field(
        default=True, metadata=_own("SHM", SWITCH, "1", "0: no shared memory between the ranks of a host")
    )
    timeout_s: float = field(
        default=DEFAULT_TIMEOUT_S,
        metadata=_shared("GLOO_TIMEOUT_SECONDS", SECONDS, "1800", "`timeout_s` of `hvd.init`, unless that is given"),
    )
    remarks: tuple[str, ...] = ()


READ_BY_INIT: Mapping[str, Variable] = MappingProxyType(
    {each.name: each.metadata["variable"] for each in fields(Environment) if each.metadata}
)
"""The variables of `Environment`, by field."""

_START_TIMEOUT = "`hvdlite-run --start-timeout`, unless that is given"
_SECRET = (
    "all ranks have the same, and know each other by it; under torchrun and a plain srun [set one](docs/security.md)"
)
READ_ELSEWHERE = (
    Variable("START_TIMEOUT", SECONDS, "60", _START_TIMEOUT, horovods="START_TIMEOUT"),
    Variable("SECRET", Format("a secret"), "–", _SECRET),
    Variable("SECRET_FILE", FILE, "–", "the secret is in it"),
)
"""What the user may set besides, for `hvdlite-run` and `rendezvous.secret`."""

SET_FOR_WORKERS = (
    Variable("RANK", NUMBER, "–", "the worker's rank among all", horovods="RANK"),
    Variable("SIZE", NUMBER, "–", "the number of workers", horovods="SIZE"),
    Variable("LOCAL_RANK", NUMBER, "–", "the worker's rank among those on its host", horovods="LOCAL_RANK"),
    Variable("LOCAL_SIZE", NUMBER, "–", "the number of workers on its host", horovods="LOCAL_SIZE"),
    Variable("CROSS_RANK", NUMBER, "–", "its host's rank among the hosts with this local rank", horovods="CROSS_RANK"),
    Variable("CROSS_SIZE", NUMBER, "–", "the number of hosts with this local rank", horovods="CROSS_SIZE"),
    Variable("HOST", Format("a name"), "–", "its host, as the user wrote it", horovods="HOSTNAME"),
    Variable("STORE", Format("a URL"), "–", "the store in which workers meet"),
    Variable("JOB_DIR", Format("a directory"), "–", "private to the job on this host, and removed at its end"),
)
"""What hvdlite-run tells each worker of its place. Read in `rendezvous` and where a rank ends."""

_TOLD = {each.name: each.names[0] for each in SET_FOR_WORKERS}

OF_USERS = (*READ_BY_INIT.values(), *READ_ELSEWHERE)
"""What a user may set, in the order of the README."""

KNOWN = frozenset(name for each in (*OF_USERS, *SET_FOR_WORKERS) for name in each.names)


def told_by_launcher(name: str, environ: Mapping[str, str]) -> str:
    """What hvdlite-run has told this worker, such as its "JOB_DIR"; empty where it has not started this process.

    ``name`` is one of `SET_FOR_WORKERS`.
    """
    return environ.get(_TOLD[name], "")


def read_environment(environ: Mapping[str, str]) -> Environment:
    """The variables as values. A ValueError names the one that is wrong, and what would do."""
    given = {name: variable.given_in(environ) for name, variable in READ_BY_INIT.items()}
    values: dict[str, Any] = {name: READ_BY_INIT[name].read(each) for name, each in given.items() if each.text}
    read = _settle_autotune(_settle_stall_times(Environment(**values), given), given)
    return replace(read, remarks=(*read.remarks, *remarks_of_ignored(environ, KNOWN)))


def _settle_stall_times(read: Environment, given: Mapping[str, Given]) -> Environment:
    """Drop, with a remark, a shutdown that the rest of the stall check makes impossible."""
    shutdown_s, warning_s = read.stall_shutdown_s, read.stall_warning_s
    if shutdown_s is None:
        return read
    if not read.stall_check:
        why = ", as the stall check is turned off"
    elif shutdown_s > warning_s:
        return read
    elif not given["stall_warning_s"].text:
        # Who asks for an early end, and for nothing else, is not to be refused it for a default.
        return replace(read, stall_warning_s=shutdown_s / 2)
    else:
        why = f": it must be more than the {warning_s:g} s of the warning"
    remark = f"{given['stall_shutdown_s']} has no effect{why}"
    return replace(read, stall_shutdown_s=None, remarks=(*read.remarks, remark))


def _settle_autotune(read: Environment, given: Mapping[str, Given]) -> Environment:
    """Execution autotune off, with a remark, where the size that it would measure is given."""
    if not read.autotune or read.fusion_threshold_bytes is None:
        return read
    size = given["fusion_threshold_bytes"]
    remark = f"{given['autotune']} has no effect, as {size} says how large buckets are"
    return replace(read, autotune=False, remarks=(*read.remarks, remark))
