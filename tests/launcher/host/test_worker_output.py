"""The agent reads all output of its workers, but no more than the launcher can show."""

import contextlib
import os
import selectors
from types import SimpleNamespace

import pytest
from hvdlite_launcher.host.worker_processes import WorkerOutput
from hvdlite_launcher.protocol.channel import WINDOW_BYTES
from hvdlite_launcher.protocol.messages import Output


class Wire:
    """A channel that accepts every message and keeps it."""

    full = False

    def __init__(self):
        self.sent = []

    def send(self, message):
        assert isinstance(message, Output)
        self.sent.append(message)

    @property
    def sent_bytes(self):
        return sum(len(output.data) for output in self.sent)


class Outlet:
    """The output of one worker that always has more to write, and the agent's loop that reads it."""

    def __init__(self):
        self.wire = Wire()
        self.selector = selectors.DefaultSelector()
        self.worker_output = WorkerOutput(self.selector, self.wire)
        read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.worker = SimpleNamespace(number=3, pipes={"stdout": os.fdopen(read_end, "rb", buffering=0)})
        self.worker_output.watch(self.worker)

    def turn(self, times=200):
        for _ in range(times):
            self.fill()
            for key, _ in self.selector.select(timeout=0):
                key.data()
            self.worker_output.hold_up()

    def fill(self):
        with contextlib.suppress(BlockingIOError):
            os.write(self.write_end, b"x" * (1 << 16))

    def close(self):
        self.selector.close()
        os.close(self.write_end)
        for pipe in self.worker.pipes.values():
            pipe.close()


@pytest.fixture
def outlet():
    outlet = Outlet()
    yield outlet
    outlet.close()


def test_what_is_not_shown_yet_has_a_limit(outlet):
    outlet.turn()
    assert WINDOW_BYTES <= outlet.wire.sent_bytes <= WINDOW_BYTES + (1 << 16)


def test_as_much_as_was_shown_may_come_again(outlet):
    outlet.turn()
    before = outlet.wire.sent_bytes
    outlet.worker_output.taken(1 << 20)
    outlet.turn()
    assert before < outlet.wire.sent_bytes <= WINDOW_BYTES + (1 << 20) + (1 << 16)


def test_a_wire_that_is_full_holds_output_up_and_then_lets_it_go_on(outlet):
    outlet.wire.full = True
    outlet.worker_output.hold_up()
    outlet.turn(3)
    assert outlet.wire.sent == []
    outlet.wire.full = False
    outlet.turn(3)
    assert outlet.wire.sent != []


def test_the_last_words_of_a_dead_worker_come_whatever_was_shown(outlet):
    outlet.turn()
    before = outlet.wire.sent_bytes
    outlet.fill()
    outlet.worker_output.drain(outlet.worker)
    assert outlet.wire.sent_bytes > before
