"""
`save_on_signal`: all ranks save at the end of the same step after a signal to any of them, as before a time limit.

    a signal ── some rank ── its next `step`: an all-reduce of one number ── all ranks' `step` after it: save

The all-reduce of one step is taken up at the next, so that no step waits for it, and every rank sees the signal at the
same step.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from .calls.handle import Handle
from .comm.reduce_op import Max
from .log import log
from .ops.api import allreduce_async, barrier
from .outside_graphs import keep_outside_graphs
from .runtime.make_world import World
from .runtime.world import current_world

_NAME = "hvdlite.save_on_signal"
_REQUEUE_TIMEOUT_S = 60.0


def save_on_signal(
    save: Callable[[], object],
    *,
    signals: Iterable[int] = (signal.SIGUSR1, signal.SIGTERM),
    stop: bool = True,
    requeue: bool = False,
) -> SignalSaver:
    """Has `SignalSaver.step` call ``save`` on all ranks after the same step, once any rank has got one of the signals.

    All ranks must call it, after `hvd.init`, in the main thread, as it handles the signals. Under hvdlite-run, a signal
    to that is passed on to the workers. With ``stop`` each process then ends, with exit code 0, when all ranks have
    saved; without it training goes on, and the next signal saves again. ``requeue`` has rank 0 put the Slurm job into
    its queue again before that (``scontrol requeue``); outside of Slurm it raises a ValueError.
    """
    if requeue and not stop:
        raise ValueError("requeue=True starts the job again, so this one must stop: leave out stop=False")
    current_world()
    job = os.environ.get("SLURM_JOB_ID", "") if requeue else ""
    if requeue and not (job and shutil.which("scontrol")):
        missing = "SLURM_JOB_ID is not set" if not job else "there is no scontrol"
        raise ValueError(f"requeue=True needs a job of Slurm, and {missing}: leave it out elsewhere")
    return SignalSaver(save, tuple(signals), stop=stop, slurm_job=job)


class SignalSaver:
    """Returned by `save_on_signal`."""

    def __init__(self, save: Callable[[], object], signals: tuple[int, ...], *, stop: bool, slurm_job: str) -> None:
        self._save = save
        self._stop = stop
        self._slurm_job = slurm_job
        self._wanted = 0
        self._asked: tuple[World, Handle] | None = None
        self._before: dict[int, Any] = {signum: signal.signal(signum, self._receive) for signum in signals}

    def request(self) -> None:
        """Asks for a save, as a signal does; one rank that calls it suffices."""
        self._wanted = 1

    def step(self) -> bool:
        """Call this after each step, on all ranks; returns whether they have saved now.

        Raises SystemExit once all have, with ``stop``.
        """
        world, asked = self._asked or (None, None)
        # Of a world that has ended since, ranks may have different answers or none.
        if asked is not None and world is current_world() and asked.wait().item():
            self._asked, self._wanted = None, 0
            self._save_and_stop()
            return True
        wanted = torch.tensor([self._wanted], dtype=torch.int32, device="cpu")
        self._asked = current_world(), allreduce_async(wanted, name=_NAME, op=Max)
        return False

    def close(self) -> None:
        """Restores the handlers that the signals had before."""
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.request()

    def _save_and_stop(self) -> None:
        self._save()
        if not self._stop:
            return
        # No rank ends, and no job begins anew, before all have saved.
        barrier()
        if self._slurm_job and current_world().topology.rank == 0:
            self._requeue()
        self.close()
        raise SystemExit(0)

    def _requeue(self) -> None:
        # Slurm sends its signal to all processes of the job, to some hosts later: it would end scontrol, too, which
        # ignores what is ignored here.
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)
        command = ["scontrol", "requeue", self._slurm_job]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_TIMEOUT_S, check=False)
            why = (ended.stderr.strip() or f"its exit code is {ended.returncode}") if ended.returncode else None
        except (OSError, subprocess.SubprocessError) as error:  # it cannot be started any more, or hangs
            why = str(error)
        if why is not None:
            log.error("all ranks have saved, but %s failed: %s", " ".join(command), why)


keep_outside_graphs(globals())
