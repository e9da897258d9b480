"""
Has imported torch and hvdlite once, so that ranks of the tests' jobs need not. `RankServer` starts it.

    hvdlite-run ── agent_stand_in ══ rank_server (torch imported) ── fork ── remote parent ── fork ── agent ── worker
                                                                                                        └─ fork source

A process cannot be given to another parent, and a worker has to be a child of its agent. So it is the agent that is a
copy of the server, through its remote parent. It begins with a fork source: a child that does nothing but fork what
becomes a child of the agent, as `hvdlite.worker.fork_server` does for workers that replace others. Copies and new
processes differ in how they come to be alone; each program begins in the interpreter's main program, by
`hvdlite.worker.fork_server`.

A worker is a copy only where that makes no difference to its program; otherwise the agent starts it as it would without
this: it is no program of Python's, does not use torch, or has options or variables that an interpreter reads when it
starts.

A program that no agent starts is a copy by the same rule, if it is asked for by `RankServer.python`.

A copy ends as an interpreter does, except that it does not unload torch, which takes a third of a second of a core.
Workers that replace others are copies of the fork source too, and the agent starts no fork server. With
TEST_HVDLITE_LONG copies unload torch, and fork servers are started.

Requests come from `agent_stand_in`, on a listening socket. The remote parent of one on a test machine is forked into
the machine's namespaces. The server ends with its stdin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import re
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from agent_stand_in import AGENT, receive, send, spaces, surroundings
from hvdlite_launcher.host import agent, forked_workers, remote_parent, worker_hooks, worker_processes
from hvdlite_launcher.host.worker_processes import ForkedProcess, Worker
from hvdlite_launcher.plan.python_command import PythonCommand, parse_python
from hvdlite_launcher.protocol.messages import StartJob
from hvdlite_launcher.system import process_tree

import hvdlite
from hvdlite.worker import fork_server

_ANSWER_BYTES = 64
_IS_LONG = os.environ.get("TEST_HVDLITE_LONG") == "1"
_HOOK = os.path.join(os.path.dirname(os.path.abspath(worker_processes.__file__)), "path")
_HOROVOD = os.path.join(os.path.dirname(os.path.abspath(hvdlite.__file__)), "horovod", "path")
# None of its modules has the name of one that a copy has imported from elsewhere.
_HELPERS = os.path.dirname(os.path.abspath(__file__))
# Variables that are read when an interpreter or a library is loaded, without those that a copy can follow.
_FOLLOWED = (
    *("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"),
    # Which torch, lightning and scikit-learn set in the process that runs the tests, or in one that starts a job.
    *("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
_READ_ON_LOAD = re.compile(
    r"(BLIS|GOMP|GOTO|KMP|LD|MALLOC|MKL|NUMEXPR|OMP(?!I)|OPENBLAS|PYTHON|PYTORCH|TORCH(?!ELASTIC|_NCCL)[A-Z]*|VECLIB)"
    r"_?[A-Z0-9_]+|TZ"
)
# A worker's, when its program has ended, and by no signal.
_exit_code: list[int] = []
# The interpreter takes the first of these that is there; it takes no other locale.
_LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")
# CLONE_NEWPID; and CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC and CLONE_NEWNET
_NEW_PIDS, _OTHER_SPACES = 0x20000000, 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000
_setns = ctypes.CDLL(None, use_errno=True).setns
_USES_TORCH = re.compile(r"torch|hvdlite|horovod")


class _Variables(NamedTuple):
    """The server's environment before it has imported torch, and after: what is imported sets some variables."""

    before: Mapping[str, str]
    after: Mapping[str, str]


class _IsForkSourceError(Exception):
    """Raised in a new fork source, to leave the agent's code for the main program."""

    def __init__(self, connection: socket.socket, agent: int) -> None:
        super().__init__()
        self.connection = connection
        self.agent = agent


# ------------------------------------------------------------------- the server


def _serve(listener: socket.socket, variables: _Variables) -> dict[str, Any]:
    """Answers requests of stand-ins until stdin ends; returns a request, in the process that is forked for it."""
    own, own_spaces = surroundings(), spaces()

    def fork_for(request: Mapping[str, Any], connection: socket.socket) -> int | None:
        if request["surroundings"] != own:
            return None
        if request["words"] != [*AGENT]:
            environment = request["environment"]
            command = parse_python(request["words"], environment)
            # MPICH's mpirun hands a file on, which a copy has not.
            if command is None or "PMI_FD" in environment or not _is_like_this(command, environment, variables):
                return None
        return os.fork() if request["spaces"] == own_spaces else _fork_beside(connection)

    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, lambda: os._exit(0))

    def accept() -> dict[str, Any] | None:
        connection, _ = listener.accept()
        request, fds = receive(connection, 3)
        if request is None:
            connection.close()
            return None
        pid = fork_for(request, connection)
        if pid == 0:
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
        for fd in fds:
            os.close(fd)
        if pid:
            _watch(selector, connection, pid)
            return None
        try:
            connection.send(b'"declined"' if pid is None else b'"forked"')
        except OSError:  # the stand-in has been killed
            if pid == 0:
                os._exit(1)
        connection.close()
        return None if pid is None else request

    selector.register(listener, selectors.EVENT_READ, accept)
    while True:
        for key, _ in selector.select():
            if (request := key.data()) is not None:
                _close_all(selector)
                return request


def _fork_beside(connection: socket.socket) -> int | None:
    """Forks a process into the namespaces of the one at the other end; returns None if that has ended."""
    peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        there = os.pidfd_open(peer)
    except ProcessLookupError:
        return None
    here = os.pidfd_open(os.getpid())
    _enter(there, _NEW_PIDS)  # which the children of this process do
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            _enter(here, _NEW_PIDS)
    if pid == 0:
        _enter(there, _OTHER_SPACES)
    os.close(there)
    os.close(here)
    return pid


def _enter(pidfd: int, kinds: int) -> None:
    """Enters a process's namespaces of these kinds."""
    if _setns(pidfd, kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _close_all(selector: selectors.BaseSelector) -> None:
    """Closes what the server waits for, in its copy: each by its object, which would close its number again later."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fd != 0:
            os.close(key.fd)
    selector.close()


def _watch(selector: selectors.BaseSelector, connection: socket.socket, pid: int) -> None:
    """Has the end of the remote parent ``pid`` told to its stand-in, and kills it when that has ended."""
    pidfd = os.pidfd_open(pid)

    def on_end() -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.send(json.dumps(code).encode())
        selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        connection.close()

    def on_hang_up() -> None:
        if connection.fileno() < 0:  # closed in the same round
            return
        selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)  # it is not reaped, so its number is its own

    selector.register(pidfd, selectors.EVENT_READ, on_end)
    selector.register(connection, selectors.EVENT_READ, on_hang_up)


def _become(request: Mapping[str, Any]) -> None:
    """Gives this process the session, directory, environment and ignored signals of the stand-in."""
    os.setsid()
    for signum in signal.valid_signals():
        is_ignored = signum in request["ignored"]
        if is_ignored != (signal.getsignal(signum) == signal.SIG_IGN):
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, signal.SIG_IGN if is_ignored else default)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    fork_server.show_words(request["words"], os.environ)


# ---------------------------------------------------------- the agent's process


def _agent_main(run: Callable[..., int], variables: _Variables, *arguments: Any) -> int:
    """Runs the agent beside a fork source."""
    process_tree.adopt_orphans()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getpid()
    if os.fork() == 0:
        ours.close()
        raise _IsForkSourceError(theirs, own)
    theirs.close()
    agent.start_workers = lambda *job: _start_workers(ours, variables, *job)
    if not _IS_LONG:
        forked_workers.ForkedWorkers.start_soon = lambda *_: None
    return run(*arguments)


def _start_workers(
    source: socket.socket,
    variables: _Variables,
    job: StartJob,
    workers: Mapping[int, Mapping[str, str]],
    common: Mapping[str, str],
) -> Iterator[Worker]:
    """Does as `start_workers`, with copies where that makes no difference."""
    command = worker_processes.command_of(job)
    for number, own in workers.items():
        environment = {**common, **own}
        parts = parse_python(command, environment)
        worker = None
        if parts is not None and _is_like_this(parts, environment, variables):
            worker = _forked(source, number, parts, environment, job.cwd)
        if worker is not None:
            yield worker
        else:
            yield from worker_processes.start_workers(job, {number: own}, common)


def _is_like_this(command: PythonCommand, environment: Mapping[str, str], variables: _Variables) -> bool:
    """Whether the interpreter that runs a command would have begun as this one."""
    return (
        not command.options
        and shutil.which(command.interpreter, path=environment.get("PATH")) == sys.executable
        and {*environment.get("PYTHONPATH", "").split(os.pathsep)} <= {"", _HOOK, _HOROVOD, _HELPERS}
        and _locale(environment) == _locale(variables.before)
        and all(
            environment.get(name) in (variables.before.get(name), variables.after.get(name))
            for name in {*environment, *variables.before}.difference(_FOLLOWED)
            if _READ_ON_LOAD.fullmatch(name)
        )
    )


def _locale(environment: Mapping[str, str]) -> str | None:
    return next(filter(None, map(environment.get, _LOCALE)), None)


def _forked(
    source: socket.socket, number: int, command: PythonCommand, environment: Mapping[str, str], cwd: str
) -> Worker | None:
    """Returns a worker that is a copy of the fork source; None if that has declined."""
    message = {
        "kind": command.kind,
        "program": command.program,
        "arguments": command.arguments,
        "words": command.words,
        "environment": environment,
        "cwd": cwd,
        "path": command.first_path(cwd),
    }
    stdin, stdin_writes = os.pipe() if number == 0 else (os.open(os.devnull, os.O_RDONLY), None)
    (out, out_writes), (err, err_writes) = os.pipe(), os.pipe()
    theirs = [stdin, out_writes, err_writes]
    send(source, message, theirs)
    for fd in theirs:
        os.close(fd)
    answer = json.loads(source.recv(_ANSWER_BYTES))
    if answer is None:
        for fd in filter(None, (stdin_writes, out, err)):
            os.close(fd)
        return None
    pipes = {"stdout": os.fdopen(out, "rb", buffering=0), "stderr": os.fdopen(err, "rb", buffering=0)}
    process = ForkedProcess(answer, stdin=stdin_writes and os.fdopen(stdin_writes, "wb", buffering=0))
    return Worker(number, process, pipes)


# -------------------------------------------------------------- the fork source


def _wait_for_program(connection: socket.socket, agent: int) -> fork_server.Program:
    """Forks a worker for each request of the agent; returns its program, in the worker."""
    os.setsid()
    fork_server.show_words(["fork source"], os.environ)
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != agent:
        os._exit(1)
    connection = socket.socket(fileno=os.dup2(connection.detach(), 3))
    os.closerange(4, 1 << 16)
    # The connection to the launcher is the agent's.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
    while True:
        request, fds = receive(connection, 3)
        if request is None:
            os._exit(0)
        cwd, path = request.pop("cwd"), request.pop("path")
        program = fork_server.Program(**request)
        if not _is_for_copies(program, cwd):
            connection.send(b"null")
        elif fork_server.fork_child_of_agent():
            os.chdir(cwd)
            os.dup2(fds[0], 0)
            os.close(fds[0])
            fork_server.prepare(program, {}, fds[1], fds[2], agent)
            connection.send(json.dumps(os.getpid()).encode())
            connection.close()
            _begin(path)
            return program
        for fd in fds:
            os.close(fd)


def _is_for_copies(program: fork_server.Program, cwd: str) -> bool:
    os.chdir(cwd)
    source = fork_server.source_of(program)
    return source is not None and bool(_USES_TORCH.search(source)) and fork_server.why_not(program) is None


def _begin(path: str) -> None:
    """Does what an interpreter does before it runs the program, by its environment."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path, *(each for each in entries if each not in ("", _HOOK))]
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if is_unbuffered != isinstance(sys.stdout.buffer, io.FileIO):
        for fd, name in ((1, "stdout"), (2, "stderr")):
            vars(sys)[name] = vars(sys)[f"__{name}__"] = _stream(fd, f"<{name}>", is_unbuffered=is_unbuffered)
    # The server itself has one thread; a new process has one for each core.
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    # Without a last collection of all that was imported, which takes a second. What complains of that is not used here.
    atexit.unregister(gc.unfreeze)
    # In a new process `import torch` registers before hvdlite does; what is registered last runs first.
    at_end = vars(hvdlite)["_end_of_program"]
    atexit.unregister(at_end)
    if _HOOK in entries:
        worker_hooks.register()
    atexit.register(at_end)


def end_without_unloading() -> None:
    """Ends a worker whose program has ended. To be registered as the first exit handler, which runs last."""
    if _IS_LONG or not _exit_code:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # of which the interpreter makes another exit code
            return
    ctypes.CDLL(None).fflush(None)
    os._exit(_exit_code[0] & 0xFF)


def _stream(fd: int, name: str, *, is_unbuffered: bool) -> io.TextIOWrapper:
    """Returns a stream as the interpreter makes it for ``fd``."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    old = sys.stdout if fd == 1 else sys.stderr
    stream = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=fd == 2 and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = "w"
    return stream


def main(listener: int, modules: tuple[str, ...]) -> None:
    """Serves, and runs programs in workers. To be called from the interpreter's main program, which catches nothing."""
    del sys.path[0]  # where this file is
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    if (why := fork_server.import_all()) is not None:
        raise RuntimeError(f"no ranks can be forked from here: {why}")
    program = _program(socket.socket(fileno=listener), _Variables(before, dict(os.environ)))
    try:
        fork_server.run(program)
        _exit_code.append(0)
    except SystemExit as end:
        _exit_code.append(0 if end.code is None else end.code if isinstance(end.code, int) else 1)
        raise
    except Exception:
        _exit_code.append(1)
        raise


def _program(listener: socket.socket, variables: _Variables) -> fork_server.Program:
    """Returns the program to run, in workers and in other copies that run one."""
    request = _serve(listener, variables)
    _become(request)
    if request["words"] != [*AGENT]:
        command = parse_python(request["words"], os.environ)
        assert command is not None
        vars(fork_server)["_begin_anew"]()
        _begin(command.first_path(request["cwd"]))
        arguments, words = list(command.arguments), list(command.words)
        return fork_server.Program(command.kind, command.program, arguments, words, {})
    run = agent.main
    agent.main = lambda *arguments: _agent_main(run, variables, *arguments)
    try:
        os._exit(remote_parent.main())
    except _IsForkSourceError as source:
        connection, parent = source.connection, source.agent
    return _wait_for_program(connection, parent)
