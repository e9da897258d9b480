"""Runs the job of one `hvdlite_launcher.run`: `python -m hvdlite_launcher.function.function_runner FD`.

It reads a `FunctionCall` on its stdin and writes a `FunctionResults` to the pipe FD. Where stdin ends before that, the
caller is gone or wants no more, and the job is ended. It is a process of its own because a job adopts orphaned
processes and ends them, and needs the main thread and the signals, none of which can be taken from a user's program.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from typing import BinaryIO

from ..cli.hvdlite_run import job_of, read_flags, say_what_has_no_effect
from ..errors import LauncherError, UsageError, in_words
from ..job.launch import launch
from ..store.server import Store
from .function_messages import WORKER, FunctionCall, FunctionResults, put_call, take_returns


def main() -> int:
    """How the job ended is in the `FunctionResults`; the exit code only says whether there are any."""
    # Whatever the user's program does about it: this is how we are ended.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    results = int(sys.argv[1])
    os.set_inheritable(results, False)
    caller = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the job's own standard input
    try:
        call = pickle.load(caller)
    except (EOFError, pickle.UnpicklingError):  # it changed its mind
        return 1
    threading.Thread(target=_end_with, args=(caller,), daemon=True, name="caller").start()
    done = _run(call)
    with contextlib.suppress(BrokenPipeError), open(results, "wb") as pipe:
        pickle.dump(done, pipe)
    return 0


def _end_with(caller: BinaryIO) -> None:
    caller.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _run(call: FunctionCall) -> FunctionResults:
    store = Store()
    put_call(store, call.call)
    try:
        os.chdir(call.cwd)
        options = read_flags(call.flags)
        if options.dry_run:  # in a config file, it is
            raise UsageError("dry-run starts nothing that could return")
        job = job_of(options, WORKER)
        say_what_has_no_effect(options)
        outcome = launch(replace(job, in_python=True), store)
    except (LauncherError, OSError) as error:
        return FunctionResults(getattr(error, "exit_code", 1), in_words(error) or str(error))
    except RuntimeError as error:
        if (why := in_words(error)) is None:
            raise
        return FunctionResults(1, why)
    return FunctionResults(outcome.exit_code, outcome.message, outcome.rank, take_returns(store))


if __name__ == "__main__":
    sys.exit(main())
