"""Stages of several buckets: each begins when its collective is done, and in the order of the buckets."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from hvdlite.comm.work import CollectiveWatch, Work
from hvdlite.errors import CommunicationError
from hvdlite.exchanges.stages import StageRunner


class Collective:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def end(self) -> None:
        self.future.set_result(None)

    def fail(self) -> None:
        self.future.set_exception(RuntimeError("connection closed"))

    def wait(self) -> None:
        self.future.wait()

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> torch.futures.Future[None]:
        return self.future

    def as_work(self) -> Work:
        return Work(self, "a test", CollectiveWatch(), lambda what, error: CommunicationError(f"{what}: {error}"))


class Buckets:
    """Buckets of two stages each, and a record of the stages that have begun."""

    def __init__(self) -> None:
        self.runner = StageRunner()
        self.begun: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self.collectives: dict[tuple[str, int], Collective] = {}

    def start(self, name: str):
        for stage in (0, 1):
            self.collectives[name, stage] = Collective()
        return self.runner.start(self._stages(name))

    def _stages(self, name: str) -> Iterator[Work]:
        for stage in (0, 1):
            self._note(name, stage)
            yield self.collectives[name, stage].as_work()
        self._note(name, 2)

    def _note(self, name: str, stage: int) -> None:
        with self._changed:
            self.begun.append((name, stage))
            self._changed.notify_all()

    def wait_for(self, *begun: tuple[str, int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(begun), 60)
            assert self.begun == list(begun)


def test_a_stage_waits_for_its_collective_and_for_the_bucket_before():
    buckets = Buckets()
    one, two = buckets.start("one"), buckets.start("two")
    buckets.wait_for(("one", 0), ("two", 0))
    # The second bucket's next stage may not overtake the first one's.
    buckets.collectives["two", 0].end()
    buckets.collectives["one", 0].end()
    buckets.wait_for(("one", 0), ("two", 0), ("one", 1), ("two", 1))
    buckets.collectives["one", 1].end()
    one.wait()
    assert one.is_completed()
    assert not two.is_completed()
    buckets.collectives["two", 1].end()
    two.wait()
    assert buckets.begun[4:] == [("one", 2), ("two", 2)]


def test_a_stage_begins_when_its_collective_calls_back_even_if_that_does_not_count_as_completed_yet():
    buckets = Buckets()
    buckets.start("one")
    buckets.wait_for(("one", 0))
    collective = buckets.collectives["one", 0]
    collective.is_completed = lambda: False  # as gloo's, which calls back first
    collective.end()
    # Nobody waits for the stages, and so looks again.
    buckets.wait_for(("one", 0), ("one", 1))


def test_an_error_of_a_collective_is_raised_in_the_wait_and_ends_the_later_stages():
    buckets = Buckets()
    one = buckets.start("one")
    buckets.wait_for(("one", 0))
    buckets.collectives["one", 0].fail()
    with pytest.raises(RuntimeError, match="connection closed"):
        one.wait()
    assert buckets.begun == [("one", 0)]
    two = buckets.start("two")
    for stage in (0, 1):
        buckets.collectives["two", stage].end()
    two.wait()


def test_stages_that_are_given_up_never_run_and_others_may_be_started():
    buckets = Buckets()
    one, two = buckets.start("one"), buckets.start("two")
    buckets.wait_for(("one", 0), ("two", 0))
    old = dict(buckets.collectives)
    buckets.runner.give_up()
    for stages in (one, two):
        with pytest.raises(RuntimeError, match="given up"):
            stages.wait()
    three = buckets.start("three")
    for collective in (*old.values(), buckets.collectives["three", 0], buckets.collectives["three", 1]):
        collective.end()
    three.wait()
    assert buckets.begun == [("one", 0), ("two", 0), ("three", 0), ("three", 1), ("three", 2)]


def test_the_thread_ends_with_its_runner():
    buckets = Buckets()
    stages = buckets.start("one")
    for stage in (0, 1):
        buckets.collectives["one", stage].end()
    stages.wait()
    thread = buckets.runner._thread
    assert thread.is_alive()
    del buckets
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
