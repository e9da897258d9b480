"""A `pyspark` of one process, with what `hvdlite.spark` calls: tasks are threads that meet at a barrier."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

_of_thread = threading.local()


class AccumulatorParam:
    """The base of what adds values of tasks."""


@dataclass
class Accumulator:
    value: Any
    how: Any

    def add(self, more: Any) -> None:
        self.value = self.how.addInPlace(self.value, more)


@dataclass
class TaskContext:
    """`BarrierTaskContext`: ``hosts`` are those of all tasks."""

    index: int
    hosts: list[str]
    said: list[str | None]
    together: threading.Barrier

    @staticmethod
    def get() -> TaskContext:
        context: TaskContext = _of_thread.context
        return context

    def partitionId(self) -> int:  # noqa: N802
        return self.index

    def resources(self) -> dict[str, Any]:
        return {}

    def allGather(self, message: str) -> list[str | None]:  # noqa: N802
        self.said[self.index] = message
        self.together.wait()
        return self.said

    def barrier(self) -> None:
        self.together.wait()

    def getTaskInfos(self) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(address="127.0.0.1:4711") for _ in self.hosts]


@dataclass
class SparkContext:
    """A cluster with ``slots`` free slots; a job that needs more never begins."""

    slots: int = 2
    _active_spark_context: Any = None
    attempt: int = 0
    begun: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    together: threading.Barrier | None = None

    @property
    def defaultParallelism(self) -> int:  # noqa: N802
        return self.slots

    def accumulator(self, value: Any, how: Any) -> Accumulator:
        return Accumulator(value, how)

    def setJobGroup(self, group: str, words: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        """Nothing: there is one job at a time."""

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        self.cancelled.set()
        if self.together is not None:
            self.together.abort()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended, or is another test's
                if "hvdlite.spark" in child.cmdline():
                    child.kill()

    def statusTracker(self) -> Any:  # noqa: N802
        stage = SimpleNamespace(currentAttemptId=self.attempt, numActiveTasks=int(self.begun), numCompletedTasks=0)
        return SimpleNamespace(
            getJobIdsForGroup=lambda group: [0],
            getJobInfo=lambda number: SimpleNamespace(stageIds=[0]),
            getStageInfo=lambda number: stage,
        )

    def parallelize(self, numbers: range, tasks: int) -> Any:
        assert len(numbers) == tasks
        return SimpleNamespace(
            barrier=lambda: SimpleNamespace(
                mapPartitionsWithIndex=lambda tell: SimpleNamespace(collect=lambda: self._collect(tasks, tell))
            )
        )

    def _collect(self, tasks: int, tell: Callable[[int, Any], Iterator[Any]]) -> None:
        if tasks > self.slots:
            self.cancelled.wait()
            raise RuntimeError("cancelled")
        self.begun, self.together = True, threading.Barrier(tasks)
        said: list[str | None] = [None] * tasks

        def task(index: int) -> None:
            assert self.together is not None
            _of_thread.context = TaskContext(index, ["here"] * tasks, said, self.together)
            tell(index, None)

        threads = [threading.Thread(target=task, args=(index,)) for index in range(tasks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.cancelled.is_set():
            raise RuntimeError("cancelled")


def install(monkeypatch: pytest.MonkeyPatch, context: SparkContext | None) -> None:
    """Makes ``import pyspark`` find this one, with ``context`` as its active SparkContext."""
    pyspark, accumulators = ModuleType("pyspark"), ModuleType("pyspark.accumulators")
    active = SimpleNamespace(_active_spark_context=context)
    pyspark.__dict__.update(SparkContext=active, BarrierTaskContext=TaskContext, InheritableThread=threading.Thread)
    accumulators.__dict__["AccumulatorParam"] = AccumulatorParam
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)
    monkeypatch.setitem(sys.modules, "pyspark.accumulators", accumulators)
