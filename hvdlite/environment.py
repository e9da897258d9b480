"""
What the user's environment says, read once, in `hvd.init`, and kept by the world.

Each variable is read under two names, HVDLITE_ and HOROVOD_ and what stands here. Where both are set HVDLITE_'s counts;
one that is empty says nothing.

    FUSION_THRESHOLD             bytes of gradients in a bucket, unless ``bucket_cap_mb`` is given; 0: one each
    AUTOTUNE                     1: measure how large buckets should be, unless either of those two says it
    AUTOTUNE_LOG                 the file to which rank 0 adds what was measured
    TIMELINE                     the file of the timeline, or DYNAMIC
    STALL_CHECK_DISABLE          1: nobody looks for ranks that are waited for
    STALL_CHECK_TIME_SECONDS     until a warning names them (60); HVDLITE_STALL_CHECK_TIME_S too
    STALL_SHUTDOWN_TIME_SECONDS  until that ends the job (0: never); HVDLITE_STALL_SHUTDOWN_S too
    LOG_LEVEL                    trace, debug, info, warning, error or fatal
    LOG_HIDE_TIME                1: lines of the log begin without the time
    HIERARCHICAL_ALLREDUCE       1: all-reduces go within hosts and between them; 0: they do not; else that is measured
    GLOO_TIMEOUT_SECONDS         ``timeout_s`` of `hvd.init`, unless that is given (1800)
    CHECK_PARAMETERS             0: ranks do not compare parameters' values; N: they do at an optimizer's first step
                                 and every N-th thereafter; as HVDLITE_CHECK_PARAMETERS alone
    CHECK                        0: ranks do not compare what they ask for; as HVDLITE_CHECK alone
    VERBOSE                      1: rank 0 says at the start what ranks there are; as HVDLITE_VERBOSE alone
    SHM                          0: ranks of one host do not communicate through shared memory; as HVDLITE_SHM alone

All others that begin with HOROVOD_ or HVDLITE_ are remarked upon: `idle` knows which mean nothing here, and why.
What launchers set is read in `rendezvous.placement`, and START_TIMEOUT by hvdlite-run. Pure: nothing here acts on a value.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .idle import remarks_of_idle
from .values import LONGEST_S

_DECIMAL = re.compile(r"\+?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")

DYNAMIC = "DYNAMIC"
"""As `Environment.timeline`: none now, but the program may start one."""

DEFAULT_STALL_WARNING_S = 60.0

# As torch.distributed's own: rank 0 may evaluate or save for long while the others wait; stalls are told of before.
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


@dataclass(frozen=True, slots=True)
class Environment:
    """What the user's variables say; None where they say nothing and the default is another's to know.

    ``stall_shutdown_s`` is None for never. ``check`` is whether ranks compare what they ask for, ``check_parameters``
    as of `hvd.init`, ``shm`` whether those of one host communicate through shared memory, ``hierarchical`` whether
    all-reduces go within hosts and between them, None where that is to be found out. ``remarks`` are what the user is
    to be told once, of variables that were set to no effect.
    """

    fusion_threshold_bytes: int | None = None
    autotune: bool = False
    autotune_log: str | None = None
    timeline: str | None = None
    stall_check: bool = True
    stall_warning_s: float = DEFAULT_STALL_WARNING_S
    stall_shutdown_s: float | None = None
    log_level: int | None = None
    log_hide_time: bool = False
    timeout_s: float | None = None
    check: bool = True
    check_parameters: bool | int = True
    shm: bool = True
    verbose: bool = False
    hierarchical: bool | None = None
    remarks: tuple[str, ...] = ()


def read_environment(environ: Mapping[str, str]) -> Environment:
    """The variables as values. A ValueError names the one that is wrong, and what would do."""
    read = _Reader(environ)
    stall_check = not read.switch("STALL_CHECK_DISABLE", default=False)
    warning_s, shutdown_s, remark = _stall_times(read, stall_check=stall_check)
    autotune, autotune_remark = _autotune(read)
    return Environment(
        fusion_threshold_bytes=read.fusion_threshold_bytes(),
        autotune=autotune,
        autotune_log=read.text("AUTOTUNE_LOG")[1] or None,
        timeline=read.text("TIMELINE")[1] or None,
        stall_check=stall_check,
        stall_warning_s=warning_s,
        stall_shutdown_s=shutdown_s,
        log_level=read.log_level(),
        log_hide_time=read.switch("LOG_HIDE_TIME", default=False),
        timeout_s=read.seconds("GLOO_TIMEOUT_SECONDS"),
        check=read.switch("CHECK", default=True, horovods=False),
        check_parameters=read.check_parameters(),
        shm=read.switch("SHM", default=True, horovods=False),
        verbose=read.switch("VERBOSE", default=False, horovods=False),
        hierarchical=read.switch_or_none("HIERARCHICAL_ALLREDUCE"),
        remarks=(*remark, *autotune_remark, *remarks_of_idle(environ)),
    )


def _autotune(read: _Reader) -> tuple[bool, tuple[str, ...]]:
    """Whether to measure, and what is to be said of it."""
    name, text = read.text("AUTOTUNE")
    threshold, size = read.text("FUSION_THRESHOLD")
    if not read.switch("AUTOTUNE", default=False):
        return False, ()
    if size:
        return False, (f"{name}={text} has no effect, as {threshold}={size} says how large buckets are",)
    return True, ()


def _stall_times(read: _Reader, *, stall_check: bool) -> tuple[float, float | None, tuple[str, ...]]:
    """Seconds until the warning, seconds until the end or None, and what is to be said of them."""
    warning_s = read.seconds("STALL_CHECK_TIME_SECONDS", also="STALL_CHECK_TIME_S")
    name, text = read.text("STALL_SHUTDOWN_TIME_SECONDS", also="STALL_SHUTDOWN_S")
    shutdown_s = read.seconds("STALL_SHUTDOWN_TIME_SECONDS", also="STALL_SHUTDOWN_S", or_zero=True) or None
    if shutdown_s is not None and not stall_check:
        return DEFAULT_STALL_WARNING_S, None, (f"{name}={text} has no effect, as the stall check is turned off",)
    if warning_s is None:
        warning_s = DEFAULT_STALL_WARNING_S
        if shutdown_s is not None and shutdown_s <= warning_s:
            # Who asks for an early end, and for nothing else, is not to be refused it for a default.
            warning_s = shutdown_s / 2
    if shutdown_s is not None and shutdown_s <= warning_s:
        why = f"it must be more than the {warning_s:g} s of the warning"
        return warning_s, None, (f"{name}={text} has no effect: {why}",)
    return warning_s, shutdown_s, ()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads variables by the part of their names that both prefixes share."""

    environ: Mapping[str, str]

    def text(self, name: str, *, also: str | None = None, horovods: bool = True) -> tuple[str, str]:
        """The variable that counts, by its whole name, and its value; the value is empty where none is set."""
        ours = [f"HVDLITE_{each}" for each in (also, name) if each is not None]
        names = [*ours, f"HOROVOD_{name}"] if horovods else ours
        found = next((each for each in names if each in self.environ), names[0])
        return found, self.environ.get(found, "").strip()

    def fusion_threshold_bytes(self) -> int | None:
        name, text = self.text("FUSION_THRESHOLD")
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise ValueError(f"{name}={text!r} is not a number of bytes, such as 16777216, or 0 for no fusion")
        return int(text)

    def check_parameters(self) -> bool | int:
        name, text = self.text("CHECK_PARAMETERS", horovods=False)
        if not text:
            return True
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise ValueError(
                f"{name}={text!r} is neither 0, for no comparison of parameters, nor the number of steps from one to "
                "the next, such as 1000"
            )
        return int(text) or False

    def seconds(self, name: str, *, also: str | None = None, or_zero: bool = False) -> float | None:
        name, text = self.text(name, also=also)
        if not text:
            return None
        # float() reads digits of all scripts, and 1_0.
        seconds = float(text) if _DECIMAL.fullmatch(text) else math.nan
        if seconds > LONGEST_S:
            raise ValueError(f"{name}={text!r} is more seconds than can be waited: give {LONGEST_S:g} at most")
        if seconds > 0 or (or_zero and seconds == 0):
            return seconds
        never = ", or 0 for never" if or_zero else ""
        raise ValueError(f"{name}={text!r} is not a positive number of seconds, such as 60{never}")

    def switch(self, name: str, *, default: bool, horovods: bool = True) -> bool:
        switched = self.switch_or_none(name, horovods=horovods)
        return default if switched is None else switched

    def switch_or_none(self, name: str, *, horovods: bool = True) -> bool | None:
        name, text = self.text(name, horovods=horovods)
        if not text:
            return None
        if text.lower() not in _SWITCH:
            raise ValueError(f"{name}={text!r} is neither 1 nor 0")
        return _SWITCH[text.lower()]

    def log_level(self) -> int | None:
        name, text = self.text("LOG_LEVEL")
        if not text:
            return None
        if text.lower() not in _LEVELS:
            raise ValueError(f"{name}={text!r} is no level of the log: use one of {', '.join(_LEVELS)}")
        return _LEVELS[text.lower()]
