"""`TrainedApart`: collects the ranks that have trained without each other, and words the warning at a job's end.

    Exited(apart=True) ──► TrainedApart ── once, if the job has succeeded ──► the screen

`launch` has one for each job, and `supervisor` tells it of all events. `host.worker_hooks` is how a worker knows.
"""

from __future__ import annotations

from ..protocol.messages import Event, Exited, InitStarted, Started
from .ending import Ending
from .failure_message import name_ranks, name_workers
from .observer import Observer

_MOST_NAMED = 16


class TrainedApart(Observer):
    """The workers of one job that have trained a model of their own each, and met no other rank."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._has_others = False
        self._has_init: set[int] = set()
        # By the worker's number, its rank when it ended: an elastic job forgets a worker then. None if it had none.
        self._apart: dict[int, int | None] = {}

    def on_event(self, event: Event) -> None:
        match event:
            case Started():
                self._has_others = self._has_others or len(self._ending.running) > 1
            case InitStarted():
                self._has_init.add(event.worker)
            case Exited() if event.apart and event.returncode == 0 and event.worker in self._ending.roster:
                self._apart[event.worker] = self._ending.roster[event.worker].rank

    def warning(self) -> str:
        """Returns the warning; empty if there is none, as for a single worker."""
        if not (self._apart and self._has_others):
            return ""
        first = "" if self._apart.keys() <= self._has_init else "call hvd.init(), and "
        if len(self._apart) == 1:
            what = "trained without the others: it made an optimizer and exchanged nothing, so its model is its own"
        else:
            what = (
                "trained without each other: each made an optimizer and exchanged nothing, so there are "
                f"{len(self._apart)} models"
            )
        return (
            f"warning: {self._names()} {what}. To train one model, {first}wrap the optimizer: "
            "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()); with Accelerate on CPUs, "
            "set ACCELERATE_USE_CPU=1. If this is meant, give --independent"
        )

    def _names(self) -> str:
        ranks = [rank for rank in self._apart.values() if rank is not None]
        # In an elastic job a worker has no rank before it calls hvd.init().
        name, numbers = (name_ranks, sorted(ranks)) if len(ranks) == len(self._apart) else (name_workers, self._apart)
        more = len(numbers) - _MOST_NAMED
        return name(list(numbers)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
