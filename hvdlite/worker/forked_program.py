"""
Runs a worker's program in a process that was forked, as a new Python interpreter would run it.

    fork_server ── fork ── prepare (its own session, output, environment) ── the go-ahead ── run ── program

The process has torch and hvdlite imported; all else that a program can see is as in a new one: `__main__`, `sys.argv`,
`sys.path`, signals, open files, random numbers, tracebacks and exit codes. `launcher.host.forked_workers` is the
other end.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import logging
import mmap
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hvdlite_wire.linux import stat_of

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
# Where proc(5) counts the fields of /proc/PID/stat from 1: the places that stay as they are.
_CODE, _DATA, _HEAP, _STACK = (26, 27), (45, 46), 47, 28
# Variables that libraries read when they are loaded. A program that names one of them may want to set it before it
# imports torch, which has no effect here.
_READ_ON_LOAD = re.compile(
    r"""["'](BLIS|GOMP|GOTO|KMP|LD|MALLOC|MKL|NUMEXPR|OMP|OPENBLAS|PYTHON|PYTORCH|TORCH[A-Z]*|VECLIB)_?[A-Z0-9_]+["']"""
)


@dataclass(frozen=True)
class Program:
    """A worker's program, and what its process has of its own.

    ``kind`` says what ``program`` is: the path of a ``script``, the name of a ``module``, or ``code``. ``words`` is the
    whole command. ``environment`` has the variables that are added to those of this process.
    """

    kind: str
    program: str
    arguments: list[str]
    words: list[str]
    environment: dict[str, str]


def why_not(program: Program) -> str | None:
    """Returns why only a new interpreter runs this program as its author may expect; None if that is not so."""
    source = source_of(program)
    if source is None:
        return "its source was not found"
    if found := _READ_ON_LOAD.search(source):
        return f"its source has {found[0]}, which libraries read when they are loaded"
    return None


def source_of(program: Program) -> str | None:
    """Returns the text of the main program. It imports nothing, so packages are searched and not imported."""
    if program.kind == "code":
        return program.program
    path: str | None = program.program
    if program.kind == "module":
        try:
            path = _origin_of(program.program)
        except (ImportError, ValueError, AttributeError):
            path = None
    try:
        with open(path or "", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _origin_of(module: str) -> str | None:
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    while spec is not None and (rest or spec.submodule_search_locations is not None):
        name = f"{spec.name}.{rest.pop(0) if rest else '__main__'}"
        spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    return None if spec is None else spec.origin


def prepare(program: Program, environment: Mapping[str, str], stdout: int, stderr: int, agent: int) -> None:
    """Makes this process one of its own, with the worker's output and environment.

    ``environment`` is the one that the fork server was started with: what it imports may set variables. ``agent`` is
    this process's parent by now.
    """
    os.setsid()
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:  # it died before prctl
        os._exit(1)
    own = {**environment, **program.environment}
    for name in os.environ.keys() - own.keys():
        del os.environ[name]
    os.environ.update(own)
    _begin_anew()
    show_words(program.words, os.environ)


_shown: list[mmap.mmap] = []  # the system reads this memory whenever somebody asks


def show_words(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Shows this command line and environment in ``ps`` and /proc/PID, and not those of the process it is a copy of.

    Only where the kernel is built for that (CONFIG_CHECKPOINT_RESTORE); else it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(command) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(command + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(command), begin + len(command) + len(variables)
    if (stat := stat_of("self")) is None:
        return
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    kept = [stat[place] for place in (*_CODE, *_DATA, _HEAP)]
    heap_end, stack = libc.sbrk(0), stat[_STACK]
    no_auxiliary, no_executable = 0, 0xFFFFFFFF << 32
    map_of_memory = (ctypes.c_uint64 * 13)(
        *kept, heap_end, stack, begin, middle, middle, end, no_auxiliary, no_executable
    )
    size = ctypes.c_ulong(ctypes.sizeof(map_of_memory))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(map_of_memory), size, 0) == 0:
        _shown[:] = [memory]


def wait_until_wanted(go: int) -> None:
    """Waits for the agent's byte on the pipe ``go``. Ends this process if the agent has closed it instead."""
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)


def _begin_anew() -> None:
    """Sets what modules drew or noted when they were imported. `random` does that itself in each fork."""
    sys.modules["torch"].default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    started: Any = getattr(logging, "_startTime", None)
    if started is not None:
        vars(logging)["_startTime"] = time.time_ns() if isinstance(started, int) else time.time()


def run(program: Program) -> None:
    """Runs the program as `__main__`. What it raises is reported as the interpreter does, and raised again.

    To be called from the interpreter's own main program, which must not catch anything: then the process ends as after
    that exception, without a second report.
    """
    sys.orig_argv[:] = program.words
    sys.argv[:] = [{"module": "-m", "code": "-c"}.get(program.kind, program.program), *program.arguments]
    names = sys.modules["__main__"].__dict__
    failure: BaseException | None = None
    try:
        if program.kind == "module":
            run_module: Any = vars(runpy)["_run_module_as_main"]  # what the interpreter calls for -m
            run_module(program.program)
        elif program.kind == "code":
            exec(compile(program.program, "<string>", "exec", dont_inherit=True), names)
        else:
            _run_script(program.program, names)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  # it is raised again
        failure = error
    # Outside of that clause, so that what a hook raises has no context.
    if failure is not None:
        _report(failure, _of_program(failure.__traceback__))
    if program.kind == "script":
        # As the interpreter does, before exit handlers are called.
        for name in ("__file__", "__cached__"):
            names.pop(name, None)
    if failure is not None:
        raise failure


def _run_script(script: str, names: dict[str, Any]) -> None:
    path = os.path.join(os.getcwd(), script)
    names.update(__file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path))
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), names)


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that begins in the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _report(error: BaseException, trace: TracebackType | None) -> None:
    """Calls `sys.excepthook` with the exception, and has it called no second time when this process ends by it."""

    def note() -> None:
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = error

    note()
    hook = sys.excepthook
    sys.audit("sys.excepthook", hook, type(error), error, trace)
    second: BaseException | None = None
    try:
        hook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as raised:  # noqa: BLE001  # it is shown
        second = raised
    if second is not None:
        print("Error in sys.excepthook:", file=sys.stderr)
        shown = _of_program(second.__traceback__)
        sys.__excepthook__(type(second), second.with_traceback(shown), shown)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)
    own = sys.excepthook  # which the hook may have set

    def be_silent_once(*_: object) -> None:
        sys.excepthook = own
        note()

    sys.excepthook = be_silent_once
