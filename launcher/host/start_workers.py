"""Starts one host's workers. If one cannot be started, it gives the reason in a shell's words."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from ..errors import in_words
from ..plan.worker_environment import OWN_VARIABLES, HostEnvironment, variables_set
from ..protocol.messages import Refused, StartJob, Stream
from ..system import process_tree
from ..system.machine import usable_cores

# What is in it is imported when a Python interpreter starts: see its `sitecustomize`.
_DIRECTORY_OF_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")


@dataclass
class ForkedProcess:
    """A worker's process that `subprocess` has not started; the parts of a `subprocess.Popen` that the agent uses."""

    pid: int
    returncode: int | None = None
    stdin: IO[bytes] | None = None


@dataclass
class Worker:
    """A started worker process. ``pipes`` are its output streams that have not reached their end.

    ``number`` identifies it in messages to the launcher.
    """

    number: int
    process: subprocess.Popen[bytes] | ForkedProcess
    pipes: dict[Stream, IO[bytes]]


class CannotStartError(Exception):
    """A worker could not be started; ``refused`` is the message about it for the launcher."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.refused = refused


def command_of(job: StartJob) -> tuple[str, ...]:
    """Returns the command of each of the job's workers on this host."""
    return (sys.executable, *job.command) if job.in_python else job.command


def common_environment(job: StartJob, job_dir: str, interface: str | None) -> dict[str, str]:
    """Returns the environment of the job's workers on this host, without the variables that each has of its own.

    ``interface`` is the network interface towards the job's other hosts.
    """
    inherited = {**os.environ, **job.environment} if job.inherits else job.environment
    given = {name: value for name, value in inherited.items() if name not in OWN_VARIABLES}
    of_horovod = _directory_of_horovod() if job.as_horovod else None
    path = filter(None, [_DIRECTORY_OF_HOOK, of_horovod, given.get("PYTHONPATH")])
    given = {**given, "PYTHONPATH": os.pathsep.join(path)}
    if not _is_same_directory(given.get("PWD", job.cwd), job.cwd):
        given = {**given, "PWD": job.cwd}  # over ssh it is the directory of the login
    host = HostEnvironment(job_dir, usable_cores(), interface, job.slots, is_alone=not job.peers)
    return {**given, **variables_set(given, {}, host)}


def start_workers(
    job: StartJob, workers: Mapping[int, Mapping[str, str]], common: Mapping[str, str]
) -> Iterator[Worker]:
    """Starts these workers of the job one by one and yields each; only worker 0 has a standard input.

    Each leads a session of its own. ``workers`` are their own variables, by their numbers; ``common`` are the others.
    """
    command = command_of(job)
    set_up = process_tree.setting_back(process_tree.dying_with_parent())
    for number, own in workers.items():
        environment = {**common, **own}
        try:
            process = subprocess.Popen(
                command,
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=set_up,  # noqa: PLW1509  # the agent has no threads
            )
        except UnicodeEncodeError as error:  # the locale's encoding is not UTF-8
            why = (
                f"{error.object[error.start : error.end]!a} cannot be encoded in this host's locale: set LC_ALL=C.UTF-8"
            )
            raise CannotStartError(Refused(f"command or environment: {why}", 126)) from error
        except OSError as error:
            raise CannotStartError(_refusal(job, environment, error)) from error
        except subprocess.SubprocessError as error:  # the child could not set itself up
            raise CannotStartError(Refused(str(error).lower(), 126)) from error
        assert process.stdout is not None
        assert process.stderr is not None
        yield Worker(number, process, {"stdout": process.stdout, "stderr": process.stderr})


def _is_same_directory(path: str, other: str) -> bool:
    """Whether both are the same directory, as a path through a link and one without it may be."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path == other


def _directory_of_horovod() -> str:
    """Returns a directory for PYTHONPATH whose `horovod` is an alias of `hvdlite.horovod`.

    An environment variable, unlike a changed command, also works for a shell script and for programs that start others.
    """
    # `find_spec` does not import hvdlite, which would import torch.
    spec = importlib.util.find_spec("hvdlite")
    for directory in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(directory, "horovod", "path")
        if os.path.isdir(path):
            return path
    raise CannotStartError(
        Refused(f"--horovod: {sys.executable} has no hvdlite with a horovod module: install the same hvdlite there", 1)
    )


def _refusal(job: StartJob, environment: Mapping[str, str], error: OSError) -> Refused:
    """Returns the reason why ``job`` could not be started, in a shell's words, with the shell's exit code."""
    program = job.command[0]
    if not os.path.isdir(job.cwd):
        return Refused(f"{job.cwd}: the working directory does not exist on this host", 1)
    path = os.path.join(job.cwd, program)
    found = os.path.isfile(path) if "/" in program else shutil.which(program, path=environment.get("PATH"))
    if not program or isinstance(error, FileNotFoundError | NotADirectoryError):
        why, exit_code = "command not found", 127
        if found:
            why, exit_code = "the interpreter in its first line was not found", 126
    elif os.path.isdir(path):
        why, exit_code = "is a directory", 126
    elif error.errno == errno.ENOEXEC:
        why, exit_code = "is neither a program nor a script that begins with #! and its interpreter", 126
    else:
        why, exit_code = in_words(error) or (error.strerror or str(error)).lower(), 126
    if program.endswith(".py") and os.path.isfile(path):
        why += f"; did you mean: python {program}?"
    name = program if program.isprintable() and program else repr(program)
    return Refused(f"{name}: {why}", exit_code)
