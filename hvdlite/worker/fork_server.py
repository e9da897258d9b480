"""
The process from which hvdlite-run forks workers that replace others, so that these need not import torch first.

    agent ── starts it ──► imports torch and hvdlite ── "ready" ──► agent
    agent ── a request with the worker's pipes ──► fork ── fork ── the worker
          ◄── the worker's pid ──────────────────────────────────────┘
          ── the go-ahead ──► forked_program

It runs no program, and does nothing but answer requests. Between it and the worker is a process that ends at once: so
the worker becomes a child of the agent, which adopts orphans, and is one like all others.

Requests and answers are JSON, one message each on a socket without a name. `launcher.host.forked_workers` is the other
end, and starts this process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
import warnings

from . import forked_program
from .forked_program import Program

MOST_BYTES = 1 << 16
_PIPES = 3
# What programs use first. Making an optimizer imports torch._dynamo, which takes as long as torch itself.
_NAMES = ("init", "allreduce", "broadcast_parameters", "DistributedOptimizer", "elastic")
_MODULES = ("torch._dynamo", "hvdlite.torch", "hvdlite.coordinator.coordinator")


def serve(fd: int, agent: int) -> None:
    """Answers requests on the socket ``fd`` until the agent hangs up; returns only in workers, when they are done.

    ``agent`` is its pid. To be called from the interpreter's main program: see `forked_program.run`.
    """
    connection = socket.socket(fileno=fd)
    forked_program.run(_wait_for_program(connection, agent))


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
        why = forked_program.why_not(program)
        if why is None and fork_child_of_agent():
            forked_program.prepare(program, environment, fds[0], fds[1], agent)
            _answer(connection, {"worker": number, "pid": os.getpid()})
            connection.close()
            forked_program.wait_until_wanted(fds[2])
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
