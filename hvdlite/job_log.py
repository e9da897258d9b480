"""
`log_to`: logs what the job knows of itself, in TensorBoard, W&B, MLflow or by any function, at an interval.

    every rank: log_to(target) ── a thread ── the rank that is rank 0 then: own_status, stragglers ──► target

Nothing is measured or sent for it: it reads what ranks tell rank 0 for reports and stragglers anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import psutil

from .errors import NotInitializedError
from .log import log
from .outside_graphs import keep_outside_graphs
from .runtime.functions import stragglers
from .runtime.world import current_world, is_initialized, own_status, rank, size
from .values import real_number, shown

__all__ = ["JobLog", "log_to"]

Numbers = dict[str, float]


def log_to(target: object, *, every_s: float = 30.0, prefix: str = "hvdlite/") -> JobLog:
    """Logs the job's numbers every ``every_s`` seconds, and when the returned object is closed.

    ``target`` is a ``SummaryWriter`` of TensorBoard, a run of W&B, MLflow or a logger of Lightning (all that has
    ``log_metrics(metrics, step=...)``), or a function that gets a dict of numbers and the step. It is called on a
    thread of its own, on rank 0 alone; other ranks may pass None. Every rank may call this, and waits for none; in an
    elastic job it goes on where another rank has become rank 0. A target that raises an exception is called no more,
    and a warning says so.

    The numbers, each with ``prefix`` before its name: ``step`` and ``steps_per_s``, of the optimizer with most steps;
    ``samples_per_s`` of all ranks, if an `hvd.elastic.ElasticSampler` counts them; ``ranks``; ``generation`` in an
    elastic job; ``wait_share``, the mean part of a step in which ranks wait for others; ``seconds/data``,
    ``seconds/forward``, ``seconds/backward`` and ``seconds/optimizer``, the means over ranks of a step's phases;
    ``straggler_cost`` and ``straggler_rank`` of the rank that costs the others most, as in `stragglers`;
    ``memory_bytes`` of rank 0's process, and ``sent_bytes_per_s`` and ``received_bytes_per_s`` of its host. What is
    not known yet is left out.

    Raises TypeError for a target that is none of these, and ValueError for an interval that is not positive.
    """
    interval_s = real_number(every_s)
    if interval_s is None or not interval_s > 0:
        raise ValueError(f"log_to: every_s={shown(every_s)} is not a positive number of seconds")
    return JobLog(_function_of(target), interval_s, prefix)


def _function_of(target: Any) -> Callable[[Numbers, int], object] | None:
    if target is None:
        return None
    if hasattr(target, "add_scalar"):
        return lambda numbers, step: [target.add_scalar(name, value, step) for name, value in numbers.items()]
    if hasattr(target, "log_metrics"):
        return lambda numbers, step: target.log_metrics(numbers, step=step)
    if hasattr(target, "log"):
        # Without its own step, which counts the calls of the program.
        return lambda numbers, _: target.log(numbers)
    if callable(target):
        function: Callable[[Numbers, int], object] = target
        return function
    raise TypeError(
        f"log_to: {shown(target)} has neither add_scalar, log_metrics nor log, and is no function: pass a "
        "SummaryWriter, a run of W&B, mlflow, or a function of the numbers and the step"
    )


class _Counts(NamedTuple):
    """What rates are made of."""

    at_s: float
    step: int
    samples: int | None
    network: Sequence[int]
    """Bytes that the host has sent, and received; empty if it has no network."""


class JobLog:
    """What `log_to` returns. As a context manager it is closed at the end."""

    def __init__(self, function: Callable[[Numbers, int], object] | None, every_s: float, prefix: str) -> None:
        self._function = function
        self._every_s = every_s
        self._prefix = prefix
        self._before: _Counts | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite log_to", daemon=True)
        if function is not None:
            self._thread.start()

    def log_now(self) -> None:
        """Logs the numbers now, if this rank is rank 0."""
        with self._lock:
            function = self._function
            if function is None or not is_initialized():
                return
            try:
                if rank() != 0:
                    return
                counts = _counts()
                numbers = _numbers(counts, self._before)
            except NotInitializedError:
                return  # it has ended meanwhile
            self._before = counts
            try:
                function({f"{self._prefix}{name}": value for name, value in numbers.items()}, counts.step)
            except Exception as error:  # noqa: BLE001 - whatever the program's function raises
                self._function = None
                log.warning(
                    "log_to: nothing is logged any more, since this failed: %s: %s", type(error).__name__, error
                )

    def close(self) -> None:
        """Logs a last time, and ends."""
        if not self._closing.is_set():
            self._closing.set()
            self.log_now()
            self._function = None

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self.log_now()


def _counts() -> _Counts:
    status = own_status(in_full=False)
    network = psutil.net_io_counters()
    step = max(status.steps.values(), default=0)
    # psutil returns None where there is no interface, not even loopback's, as in some containers.
    counted = () if network is None else (network.bytes_sent, network.bytes_recv)
    return _Counts(time.monotonic(), step, status.samples, counted)


def _numbers(counts: _Counts, before: _Counts | None) -> Numbers:
    numbers: Numbers = {"step": counts.step, "ranks": size(), "memory_bytes": psutil.Process().memory_info().rss}
    if (assignment := current_world().assignment) is not None:
        numbers["generation"] = assignment.generation
    if before is not None and counts.at_s > before.at_s and counts.step >= before.step:
        took_s = counts.at_s - before.at_s
        numbers["steps_per_s"] = (counts.step - before.step) / took_s
        if counts.samples is not None:
            numbers["samples_per_s"] = (counts.samples - (before.samples or 0)) * size() / took_s
        ways = ("sent_bytes_per_s", "received_bytes_per_s")
        for name, now, earlier in zip(ways, counts.network, before.network, strict=False):
            numbers[name] = (now - earlier) / took_s
    if paces := stragglers():
        numbers["wait_share"] = _mean(pace.wait_s / (sum(pace.seconds.values()) + pace.wait_s or 1) for pace in paces)
        for phase in paces[0].seconds:
            numbers[f"seconds/{phase}"] = _mean(pace.seconds.get(phase, 0.0) for pace in paces)
        numbers["straggler_cost"], numbers["straggler_rank"] = paces[0].cost, paces[0].rank
    return numbers


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


keep_outside_graphs(globals())
