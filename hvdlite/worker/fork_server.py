"""
The process from which hvdlite-run forks workers that replace others, so that these need not import torch first.

    agent ── starts it ──► imports torch and hvdlite ── "ready" ──► agent
    agent ── a request with the worker's pipes ──► fork ── fork ── the worker, in a session of its own
          ◄── the worker's pid ──────────────────────────────────────┘
          ── the go-ahead ──► `main_program` runs the worker's program

It runs no program, and does nothing but answer requests. Between it and the worker is a process that ends at once: so
the worker becomes a child of the agent, which adopts orphans, and is one like all others. It has torch and hvdlite
imported; all else that a program can see is as in a new process: signals, open files, random numbers.

Requests and answers are JSON, one message each on a socket without a name. `launcher.host.forked_workers` is the other
end, and starts this process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite_wire.linux import stat_of

from .main_program import Kind, run_main_program

MOST_BYTES = 1 << 16
_PIPES = 3
# What programs use first. Making an optimizer imports torch._dynamo, which takes as long as torch itself.
_NAMES = ("init", "allreduce", "broadcast_parameters", "DistributedOptimizer", "elastic")
_MODULES = ("torch._dynamo", "hvdlite.torch", "hvdlite.coordinator.coordinator")
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

    kind: Kind
    program: str
    arguments: list[str]
    words: list[str]
    environment: dict[str, str]


def serve(fd: int, agent: int) -> None:
    """Answers requests on the socket ``fd`` until the agent hangs up; returns only in workers, when they are done.

    ``agent`` is its pid. To be called from the interpreter's main program, which must not catch anything.
    """
    connection = socket.socket(fileno=fd)
    run(_wait_for_program(connection, agent))


def run(program: Program) -> None:
    """Runs a worker's program, as `run_main_program` does."""
    sys.orig_argv[:] = program.words
    run_main_program(program.kind, program.program, program.arguments, sys.modules["__main__"].__dict__)


def _wait_for_program(connection: socket.socket, agent: int) -> Program:
    """Returns the program to run, in a worker."""
    environment = dict(os.environ)
    if (why := import_all()) is not None:
        _answer(connection, {"declined": why})
        os._exit(0)
    _answer(connection, {"ready": True})
    while True:
        data, fds, *_ = socket.recv_fds(connection, MOST_BYTES, _PIPES)
        if len(fds) != _PIPES:
            os._exit(0)
        request = json.loads(data)
        number = request.pop("worker")
        program = Program(**request)
        why = why_not(program)
        if why is None and fork_child_of_agent():
            prepare(program, environment, fds[0], fds[1], agent)
            _answer(connection, {"worker": number, "pid": os.getpid()})
            connection.close()
            wait_until_wanted(fds[2])
            return program
        for fd in fds:
            os.close(fd)
        if why is not None:
            _answer(connection, {"worker": number, "declined": why})


def import_all() -> str | None:
    """Imports what workers need, to be shared by all copies of this process.

    Returns why such copies may not be as good as new processes; None if they are.
    """
    own = importlib.import_module("hvdlite")
    for name in _NAMES:
        getattr(own, name)
    for module in _MODULES:
        importlib.import_module(module)
    if (why := _why_unsafe()) is not None:
        return why
    gc.collect()
    gc.freeze()  # else the first collection in each worker would copy all of this memory
    # At a worker's end: libraries such as triton complain on stderr of what the last collection leaves.
    atexit.register(gc.unfreeze)
    return None


def _why_unsafe() -> str | None:
    if threading.active_count() > 1:
        return "a module that is imported at the start has started threads"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a module that is imported at the start traces what is called"
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "a module that is imported at the start has initialized CUDA"
    return None


def _answer(connection: socket.socket, answer: dict[str, object]) -> None:
    try:
        connection.send(json.dumps(answer).encode())
    except OSError:
        os._exit(0)


def fork_child_of_agent() -> bool:
    """Forks a process that is a child of the agent, this one's parent; returns whether this is the new process."""
    reads, writes = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, such as those of OpenBLAS, which ends its own before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            between = os.fork()
            if between == 0 and os.fork() != 0:
                os._exit(0)
        if between != 0:
            os.waitpid(between, 0)  # then its child is the agent's
            return False
        os.close(writes)
        writes = -1
        os.read(reads, 1)  # nothing: it ends when the server has come to its own end of this function
        return True
    finally:
        for fd in (reads, writes):
            if fd >= 0:
                os.close(fd)


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
