"""
`StageRunner`: runs exchanges that communicate several times, each in stages, on a thread of its own.

    generator: compute ── yield a Work ── compute ── yield another ── ...      one for each bucket, all of equal length

`between_hosts` and `outer_step` make the generators. A stage of a bucket runs once the collective before it is done,
and once the same stage has run for the bucket before. So every rank launches the collectives of each stage in the order
of the buckets. If each stage has an engine of its own, they pair up, and the stages of several buckets overlap.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch

from ..comm.work import Work
from ..errors import CommunicationError

# How often a waiting program looks whether a collective has been revoked, of which its engine may not tell.
_LOOK_S = 0.2


class Stages:
    """The stages of one bucket in progress, as an `EngineWork`."""

    def __init__(self, steps: Iterator[Work], todo: SimpleQueue[Stages | None]) -> None:
        self._steps = steps
        self._todo = todo
        self._awaited: Work | None = None
        # Whether the collective has said that it is done. Gloo says so before `Work.is_completed` does.
        self._is_awaited_done = False
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._is_over = threading.Event()
        # Held while a stage runs, and while it is given up.
        self._lock = threading.Lock()
        # The number of stages that have run; infinite at the end.
        self.stage = 0.0

    def wait(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._todo.put(self)
        self._future.wait()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    @property
    def is_ready(self) -> bool:
        awaited = self._awaited
        return not self.is_completed() and (awaited is None or self._is_awaited_done or awaited.is_completed())

    def run_next(self) -> None:
        """Runs the next stage, up to the launch of its collective. Call it only on the thread, and if `is_ready`."""
        with self._lock:
            if self.is_completed():
                # It has just been given up.
                return
            try:
                if self._awaited is not None:
                    self._awaited.wait()
                self._is_awaited_done = False
                awaited = self._awaited = next(self._steps)
            except StopIteration:
                self._end(None)
            except Exception as error:  # noqa: BLE001 - raised in `wait`
                self._end(error)
            else:
                self.stage += 1
                awaited.when_done(lambda: self._note_done(awaited))
                return
            # Frees the tensors of the stages.
            self._steps, self._awaited = iter(()), None

    def _note_done(self, work: Work) -> None:
        if work is self._awaited:
            self._is_awaited_done = True
        self._todo.put(self)

    def give_up(self) -> None:
        """Ends it with an error: once this returns, none of its stages runs. What they have launched may still run."""
        with self._lock:
            if not self.is_completed():
                self._end(CommunicationError("it was given up, since its step begins again or is discarded"))

    def _end(self, error: Exception | None) -> None:
        self.stage = math.inf
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
        self._is_over.set()


class StageRunner:
    """Starts `Stages`. Its thread begins with the first of them, and ends after the runner is garbage-collected."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Stages | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Those that may still be running.
        self._started: list[Stages] = []

    def start(self, steps: Iterator[Work]) -> Stages:
        if self._thread is None:
            # The thread knows the queue alone, so that it keeps no optimizer.
            self._thread = threading.Thread(target=_run, args=(self._todo,), daemon=True, name="hvdlite-stages")
            self._thread.start()
            weakref.finalize(self, self._todo.put, None).atexit = False
        stages = Stages(steps, self._todo)
        self._started = [*(each for each in self._started if not each.is_completed()), stages]
        self._todo.put(stages)
        return stages

    def give_up(self) -> None:
        """Gives up all stages: see `Stages.give_up`. Others may be started afterwards."""
        for stages in self._started:
            stages.give_up()
            # The thread drops it.
            self._todo.put(stages)


@torch.no_grad()
def _run(todo: SimpleQueue[Stages | None]) -> None:
    running: list[Stages] = []
    is_abandoned = False
    # Stages that have begun are brought to their end all the same: other ranks are in their collectives.
    while running or not is_abandoned:
        woken = todo.get()
        if woken is None:
            is_abandoned = True
            continue
        if woken not in running and not woken.is_completed():
            running.append(woken)
        ahead = math.inf
        for each in running:
            while each.stage < ahead and each.is_ready:
                each.run_next()
            ahead = each.stage
        running = [each for each in running if not each.is_completed()]
        del woken
