"""Runs the job of one `hvdlite_launcher.run`: `python -m hvdlite_launcher.cli.function_runner FD`.

`caller` starts it. It reads a `FunctionCall` on its stdin and writes a `FunctionResults` to the pipe FD. If stdin ends
before that, the caller has ended or was interrupted, and the job is ended. It is a separate process because a job
adopts and ends orphaned processes, and needs the main thread and the signals: a user's program must keep these.

The keys in the store are a contract with `hvdlite.worker.functions`. ``call`` is the pickled call, ``return/WORKER``
is the result of the worker with this number, and ``returned`` lists those with a result, each followed by a blank. The
first two are large values, as `hvdlite.rendezvous.store_client` sets and gets them.
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

from ..errors import LauncherError, UsageError, in_words
from ..job.attempts import run_attempts
from ..store.server import Store
from .caller import FunctionCall, FunctionResults
from .horovodrun_flags import say_what_has_no_effect
from .hvdlite_run import job_of, read_flags

# For each host's own Python. Not -m, which puts the working directory on sys.path: it may contain a queue.py, and it
# need not be on the caller's sys.path.
_WORKER = "import sys; sys.path[:] = filter(None, sys.path); from hvdlite.worker.functions import main; main()"


def main() -> int:
    """Runs the job. Its end is in the `FunctionResults`; the exit code is 1 if there are none."""
    # SIGTERM must end this process even if it inherits from the user's program that it is ignored or blocked.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    results = int(sys.argv[1])
    os.set_inheritable(results, False)
    caller = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the job's standard input
    try:
        call = pickle.load(caller)
    except (EOFError, pickle.UnpicklingError):  # the caller was interrupted
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
    stores: list[Store] = []

    def new_store() -> Store:
        stores.append(Store())
        stores[-1].put_large(b"call", call.call)
        return stores[-1]

    try:
        os.chdir(call.cwd)
        options = read_flags(call.flags)
        if options.dry_run:  # a config file may contain it
            raise UsageError("dry-run starts no workers, so run() would have no results: leave it out")
        job = job_of(options, ("-c", _WORKER))
        say_what_has_no_effect(options)
        outcome = run_attempts(replace(job, in_python=True), new_store)
    except (LauncherError, OSError, RuntimeError) as error:
        why = in_words(error)
        if why is None and type(error) is RuntimeError:
            raise
        return FunctionResults(getattr(error, "exit_code", 1), why or str(error))
    return FunctionResults(outcome.exit_code, outcome.message, outcome.rank, _returns_in(stores[-1]))


def _returns_in(store: Store) -> dict[int, bytes]:
    """Returns the pickled results that are in the store, by the worker's number."""
    workers = (store.get(b"returned") or b"").split()
    values = {int(worker): store.get_large(b"return/" + worker) for worker in workers}
    return {worker: value for worker, value in values.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
