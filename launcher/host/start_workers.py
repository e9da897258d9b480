"""Starts one host's workers; where one cannot be started, it says why in a shell's words.

What becomes of them is watched in `agent`.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from ..errors import ProtocolError, in_words
from ..plan.worker_environment import HostEnvironment, variables_set
from ..system import process_tree
from ..system.machine import usable_cores
from ..wire.messages import Refused, StartJob, Stream


@dataclass
class Worker:
    """A process that was started; ``pipes`` are those of its streams that are not yet at their end.

    ``number`` is what the launcher knows it by, ``rank`` what it was told itself.
    """

    number: int
    rank: int
    process: subprocess.Popen[bytes]
    pipes: dict[Stream, IO[bytes]]


class CannotStartError(Exception):
    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.refused = refused


def ranks_of(job: StartJob) -> dict[int, int]:
    """The ranks that the workers of this host are told in their environment, by their numbers."""
    try:
        return {number: int(own["HVDLITE_RANK"]) for number, own in job.workers.items()}
    except (KeyError, ValueError) as error:
        raise ProtocolError("the launcher did not say what rank each worker has") from error


def start_workers(job: StartJob, job_dir: str, interface: str | None) -> Iterator[Worker]:
    """Start them one by one, each at the head of its own session. Rank 0 alone has a standard input.

    ``interface`` is the one towards the job's other hosts.
    """
    given = {**os.environ, **job.environment} if job.inherits else job.environment
    host = HostEnvironment(job_dir=job_dir, cores=usable_cores(), interface=interface)
    command = (sys.executable, *job.command) if job.in_python else job.command
    if job.as_horovod:
        path = filter(None, [_directory_of_horovod(), given.get("PYTHONPATH")])
        given = {**given, "PYTHONPATH": os.pathsep.join(path)}
    set_up = process_tree.dying_with_parent()
    ranks = ranks_of(job)
    for number, own in job.workers.items():
        try:
            environment = {**given, **variables_set(given, own, host)}
        except (KeyError, ValueError, ArithmeticError) as error:
            raise ProtocolError(f"the launcher did not say what place worker {number} has on its host") from error
        try:
            process = subprocess.Popen(
                command,
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.PIPE if ranks[number] == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=set_up,  # noqa: PLW1509  # the agent has no threads
            )
        except UnicodeEncodeError as error:  # by the rules of a locale that is not UTF-8's
            why = f"{error.object[error.start : error.end]!a} cannot be said in this host's locale: set LC_ALL=C.UTF-8"
            raise CannotStartError(Refused(f"command or environment: {why}", 126)) from error
        except OSError as error:
            raise CannotStartError(_refusal(job, environment, error)) from error
        assert process.stdout is not None
        assert process.stderr is not None
        yield Worker(number, ranks[number], process, {"stdout": process.stdout, "stderr": process.stderr})


def _directory_of_horovod() -> str:
    """Where any Python finds a `horovod` that makes way for `hvdlite.horovod`.

    By an environment variable and not by the command, so that a shell script, or a program that starts others, will do.
    """
    # It is only looked for: importing it would import torch.
    spec = importlib.util.find_spec("hvdlite")
    for directory in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(directory, "horovod", "path")
        if os.path.isdir(path):
            return path
    raise CannotStartError(
        Refused(f"--horovod: {sys.executable} has no hvdlite that has one; install the same hvdlite there", 1)
    )


def capacity_bytes(pipe: IO[bytes]) -> int:
    """The capacity of a pipe: how many unread bytes it holds before a write blocks."""
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) if sys.platform == "linux" else 1 << 16


def _refusal(job: StartJob, environment: Mapping[str, str], error: OSError) -> Refused:
    """What a shell would say, and its exit code."""
    program = job.command[0]
    if not os.path.isdir(job.cwd):
        return Refused(f"{job.cwd}: the working directory does not exist here", 1)
    path = os.path.join(job.cwd, program)
    found = os.path.isfile(path) if "/" in program else shutil.which(program, path=environment.get("PATH"))
    if not program or isinstance(error, FileNotFoundError | NotADirectoryError):
        why, exit_code = "command not found", 127
        if found:
            why, exit_code = "the interpreter that its first line names was not found", 126
    elif os.path.isdir(path):
        why, exit_code = "is a directory", 126
    elif error.errno == errno.ENOEXEC:
        why, exit_code = "is not a program, nor a script whose first line is #! and its interpreter", 126
    else:
        why, exit_code = in_words(error) or (error.strerror or str(error)).lower(), 126
    if program.endswith(".py") and os.path.isfile(path):
        why += f"; did you mean: python {program}?"
    name = program if program.isprintable() and program else repr(program)
    return Refused(f"{name}: {why}", exit_code)
