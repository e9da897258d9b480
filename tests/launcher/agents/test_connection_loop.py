"""The one thread of all connections: what it calls, when, and in which order."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from queue import SimpleQueue

import pytest
from hvdlite_launcher.agents import connection_loop
from hvdlite_launcher.agents.connection_loop import ConnectionLoop


@pytest.fixture
def loop():
    failures = []
    with contextlib.closing(ConnectionLoop(failures.append)) as loop:
        yield loop
    assert failures == []


@pytest.fixture
def pipes():
    fds = [*os.pipe(), *os.pipe()]
    yield fds
    for fd in fds:
        os.close(fd)


def test_calls_of_each_thread_come_in_its_order(loop):
    called: SimpleQueue = SimpleQueue()

    def give(name):
        for number in range(500):
            loop.call(lambda number=number: called.put((name, number)))

    threads = [threading.Thread(target=give, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    seen = [called.get(timeout=60) for _ in range(4 * 500)]
    for name in range(4):
        assert [number for other, number in seen if other == name] == list(range(500))


def test_a_thread_that_waits_is_woken_for_a_call(loop):
    for _ in range(50):
        called = threading.Event()
        time.sleep(0.001)
        loop.call(called.set)
        assert called.wait(60)


def test_alarms_come_by_their_times(loop):
    called: SimpleQueue = SimpleQueue()

    def set_alarms():
        for delay_s in (0.02, 0.0, 0.01):
            loop.later(delay_s, lambda delay_s=delay_s: called.put(delay_s))

    loop.call(set_alarms)
    assert [called.get(timeout=60) for _ in range(3)] == [0.0, 0.01, 0.02]


def test_what_is_unregistered_in_the_round_in_which_it_is_ready_is_not_called(loop, pipes):
    called: SimpleQueue = SimpleQueue()

    def read(name, own, other):
        called.put(name)
        os.read(own, 1)
        loop.selector.unregister(own)
        loop.selector.unregister(other)

    def register():
        a, b = pipes[::2]
        for writes in pipes[1::2]:
            os.write(writes, b"x")
        loop.selector.register(a, selectors.EVENT_READ, lambda: read("a", a, b))
        loop.selector.register(b, selectors.EVENT_READ, lambda: read("b", b, a))
        loop.later(0.01, lambda: called.put("alarm"))

    loop.call(register)
    assert {called.get(timeout=60), called.get(timeout=60)} in ({"a", "alarm"}, {"b", "alarm"})


def test_what_has_come_before_an_alarm_is_read_before_it_also_after_a_long_stop(loop, pipes):
    called: SimpleQueue = SimpleQueue()
    reads, writes = pipes[:2]

    def read():
        called.put(os.read(reads, 1))

    def stop_for_a_moment():
        loop.selector.register(reads, selectors.EVENT_READ, read)
        loop.later(0.02, lambda: called.put("alarm"))
        time.sleep(0.1)
        os.write(writes, b"x")

    loop.call(stop_for_a_moment)
    assert [called.get(timeout=60) for _ in range(2)] == [b"x", "alarm"]


@pytest.mark.parametrize("cause", ["call", "alarm", "descriptor", "select"])
def test_a_failure_is_told_once_and_is_the_end(cause, pipes):
    failures: SimpleQueue = SimpleQueue()

    def fail(*_):
        raise OSError(cause)

    def break_something():
        if cause == "call":
            fail()
        if cause == "alarm":
            loop.later(0, fail)
        if cause == "descriptor":
            os.write(pipes[1], b"x")
            loop.selector.register(pipes[0], selectors.EVENT_READ, fail)
        if cause == "select":
            loop.selector.select = fail

    with contextlib.closing(ConnectionLoop(failures.put)) as loop:
        loop.call(break_something)
        assert str(failures.get(timeout=60)) == cause
        loop.call(lambda: pytest.fail("it has ended"))
    assert failures.empty()
    assert not loop._thread.is_alive()


def test_the_end_does_not_wait_for_a_call_that_hangs(loop, monkeypatch):
    monkeypatch.setattr(connection_loop, "_CLOSE_S", 0.01)
    is_over = threading.Event()
    loop.call(lambda: is_over.wait(60))
    loop.close()
    assert not is_over.is_set()
    is_over.set()
    loop._thread.join(60)
    assert not loop._thread.is_alive()


def test_after_the_end_calls_do_nothing_and_the_end_comes_once(loop):
    loop.close()
    loop.call(lambda: pytest.fail("it is closed"))
    loop.close()
