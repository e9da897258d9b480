"""`python -m hvdlite_launcher.courier FD`: the process that runs a job for `function.run`.

An `Order` comes on its stdin, a `Delivery` goes to the pipe FD, and when stdin ends before that, the caller is done
with it or gone, and so is the job. It is a process of its own because a job adopts and ends what it finds, and wants
the main thread and the signals, none of which are ours in a user's program.
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

from .cli import job_of, read_flags, say_what_has_no_effect
from .errand import WORKER, Delivery, Order, put_call, take_returns
from .errors import LauncherError, UsageError, in_words
from .launch import launch
from .store import Store


def main() -> int:
    """Whatever comes of it is in the delivery; the exit code only says whether there was one."""
    # Whatever the user's program does about it: this is how we are ended.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    results = int(sys.argv[1])
    os.set_inheritable(results, False)
    caller = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the job's own standard input
    try:
        order = pickle.load(caller)
    except (EOFError, pickle.UnpicklingError):  # it changed its mind
        return 1
    threading.Thread(target=_end_with, args=(caller,), daemon=True, name="caller").start()
    delivery = _deliver(order)
    with contextlib.suppress(BrokenPipeError), open(results, "wb") as pipe:
        pickle.dump(delivery, pipe)
    return 0


def _end_with(caller: BinaryIO) -> None:
    caller.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _deliver(order: Order) -> Delivery:
    store = Store()
    put_call(store, order.call)
    try:
        os.chdir(order.cwd)
        options = read_flags(order.flags)
        if options.dry_run:  # in a config file, it is
            raise UsageError("dry-run starts nothing that could return")
        job = job_of(options, WORKER)
        say_what_has_no_effect(options)
        outcome = launch(replace(job, in_python=True), store)
    except (LauncherError, OSError) as error:
        return Delivery(getattr(error, "exit_code", 1), in_words(error) or str(error))
    except RuntimeError as error:
        if (why := in_words(error)) is None:
            raise
        return Delivery(1, why)
    return Delivery(outcome.exit_code, outcome.report, outcome.rank, take_returns(store))


if __name__ == "__main__":
    sys.exit(main())
