"""
The end of a rank's program: without a hang or an abort, and with the program's own exit code.

`Exchanged` finds out whether this process has exchanged anything with other ranks. Ranks that train without each other
end with a model each, and without an error. Under hvdlite-run each worker notes it at its end
(`launcher.host.worker_hooks`), and hvdlite-run warns once. Under other launchers rank 0 does it here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from hvdlite_wire.job_contract import JOB_DIR, WORKER, Note, note_file
from torch.optim import Optimizer

from ..calls.handle import Handle
from ..errors import CommunicationError, says_peer_lost
from ..log import log

_LAST_TURN_S = 0.1


def leave_at_exit(
    size: int,
    leave: Callable[[], None],
    save: Callable[[], None],
    *,
    first_end: tuple[int, bool] | None,
    advice: str,
) -> None:
    """Calls ``leave``, which closes the connections to the other of ``size`` ranks, at the end of the program.

    After an uncaught exception (except Ctrl-C) on one of several ranks it calls ``save`` instead and ends the process
    at once. ``first_end``: the rank that is known to have ended before this one, and whether without an error.
    ``advice`` is logged if this rank fails because it has lost another.
    """
    # The interpreter stores the uncaught exception here before it runs exit handlers.
    error = getattr(sys, "last_value", None)
    if size > 1 and error is not None and not isinstance(error, KeyboardInterrupt):
        if says_peer_lost(error) or (first_end is not None and isinstance(error, CommunicationError)):
            _leave_note("peer-lost")
            if first_end is not None and first_end[1]:
                _leave_note("peer-left")
            if advice:
                log.warning(advice)
        _end_after(save)
    elif size > 1 and threading.current_thread() is threading.main_thread():
        _leave_note("left")
        # Once the connections are closed, the other ranks fail and the launcher terminates what still runs. This
        # process ends anyway, and its exit code may be the one that explains the failure.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Reference cycles, such as in a DistributedDataParallel, may keep the default group alive.
    gc.collect()
    leave()
    if size > 1:
        # gloo's threads run on if something keeps the group alive. One that drops its last tensor while the interpreter
        # shuts down aborts the process. Sleeping releases the GIL, so that it can drop it now.
        time.sleep(_LAST_TURN_S)


def hasten_end() -> None:
    """Makes the interpreter end soon, which it does in half a second with PyTorch, and in 5 s on a busy machine.

    Nearly all of that are garbage collections. Without them, files in reference cycles are written out here.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
                thing.flush()
    gc.freeze()


def _end_after(save: Callable[[], None]) -> NoReturn:
    """Calls ``save`` and ends this process at once, with the exit code of an uncaught exception.

    Collectives may be running that will never end: destroying their group would wait for them, and not destroying it
    would abort the process when the interpreter shuts down.
    """
    save()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _leave_note(what: Note) -> None:
    """Creates a file in the job's directory, by which hvdlite-run finds the rank that failed first."""
    directory, worker = os.environ.get(JOB_DIR, ""), os.environ.get(WORKER, "")
    if directory and worker and Path(directory).is_dir():
        Path(note_file(directory, worker, what)).touch()


_UNUSED = 1  # `_uses_of_default_group` once it is open


class Exchanged:
    """Compares what was counted when a world began and ended, for all worlds of a process."""

    def __init__(self) -> None:
        self.has_met: bool | None = None
        """Whether anything was exchanged; None before the process was in a world with other ranks."""
        self._size = 0
        self._warns = False
        self._begun_at: tuple[int, int | None] | None = None

    def begin(self, rank: int, size: int, *, is_adopted: bool, warns: bool) -> None:
        """Counts from now on, in a world of several ranks. ``is_adopted``: in the program's own default group."""
        self._size, self._warns = size, warns and rank == 0
        self.has_met = bool(self.has_met)
        uses = _UNUSED if is_adopted else _uses_of_default_group()  # the program may have used its own before
        self._begun_at = None if self.has_met else (int(Handle("")), uses)

    def end(self) -> None:
        """Counts no longer; to be called before anything is closed."""
        if self._begun_at is None:
            return
        (number, uses), self._begun_at = self._begun_at, None
        # One more than the last number, if no operation has taken any.
        now = _uses_of_default_group()
        self.has_met = int(Handle("")) > number + 1 or now is None or now != uses

    def warn_at_end(self) -> None:
        """Warns, where rank 0 may, if the process has trained and exchanged nothing, and has not failed."""
        has_failed = getattr(sys, "last_value", None) is not None
        if not self._warns or self.has_met or has_failed or not _has_trained():
            return
        log.warning(
            "rank 0 of %d made an optimizer, and exchanged nothing with other ranks: if all have trained so, there are "
            "%d models. To train one, wrap the optimizer: hvd.DistributedOptimizer(optimizer, "
            "named_parameters=model.named_parameters()). If this is meant, set HVDLITE_INDEPENDENT=1",
            self._size,
            self._size,
        )


def _uses_of_default_group() -> int | None:
    """Returns a number that grows with each collective of the default group, and each new group; None if unknown."""
    group = dist.group.WORLD
    if group is None:
        return 0
    try:
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]  # torch's stubs lack much
        return dist.get_pg_count() + sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except (AttributeError, RuntimeError):
        return None


def _has_trained() -> bool:
    """Whether an optimizer was made: the first of each class marks its class's ``step``."""
    return any(getattr(vars(each).get("step"), "hooked", False) for each in _with_subclasses(Optimizer))


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for each in base.__subclasses__():
        yield from _with_subclasses(each)
