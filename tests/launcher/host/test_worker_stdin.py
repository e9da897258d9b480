"""The agent writes a worker's standard input piece by piece, as the worker reads it, and never blocks."""

import os
import selectors

import pytest
from hvdlite_launcher.errors import ProtocolError
from hvdlite_launcher.host.worker_processes import WorkerStdin

MORE_THAN_A_PIPE = b"x" * (1 << 20)


class Fed:
    """A worker's stdin, the end that the worker reads, and the number of times that more input was requested."""

    def __init__(self):
        self.reader, writer = os.pipe()
        self.selector = selectors.DefaultSelector()
        self.asked = 0
        self.stdin = WorkerStdin(os.fdopen(writer, "wb", buffering=0), self.selector, self._ask)

    def _ask(self):
        self.asked += 1

    def read(self, count):
        """Reads as the worker does, while the agent's loop runs."""
        data = b""
        while len(data) < count and (piece := os.read(self.reader, count - len(data))):
            data += piece
            self.turn()
        return data

    def turn(self):
        for key, _ in self.selector.select(timeout=0):
            key.data()


@pytest.fixture
def fed():
    fed = Fed()
    yield fed
    fed.stdin.close()
    fed.selector.close()
    os.close(fed.reader)


def test_a_piece_is_asked_for_at_first_and_whenever_the_one_before_was_taken(fed):
    assert fed.asked == 1
    fed.stdin.put(b"one")
    assert fed.asked == 2
    fed.stdin.put(b"two")
    assert (fed.asked, fed.read(6)) == (3, b"onetwo")


def test_a_worker_that_does_not_read_is_neither_waited_for_nor_sent_more(fed):
    fed.stdin.put(MORE_THAN_A_PIPE)
    fed.turn()
    assert fed.asked == 1
    assert fed.read(len(MORE_THAN_A_PIPE)) == MORE_THAN_A_PIPE
    assert fed.asked == 2
    assert not fed.selector.get_map()


def test_the_end_reaches_the_worker_after_all_before_it(fed):
    fed.stdin.put(b"last")
    fed.stdin.put(b"")
    assert fed.read(100) == b"last"


def test_a_worker_that_closed_its_input_gets_no_more_and_nothing_is_asked_for():
    fed = Fed()
    os.close(fed.reader)
    for _ in range(3):
        fed.stdin.put(b"lost")
    assert fed.asked == 1
    assert not fed.selector.get_map()


def test_a_worker_that_goes_away_in_mid_piece_leaves_nothing_to_wait_for():
    fed = Fed()
    fed.stdin.put(MORE_THAN_A_PIPE)
    os.close(fed.reader)
    fed.turn()
    assert not fed.selector.get_map()
    fed.stdin.close()


def test_more_than_was_asked_for_is_not_kept(fed):
    fed.stdin.put(MORE_THAN_A_PIPE)
    with pytest.raises(ProtocolError, match="more input than was requested"):
        fed.stdin.put(b"more")
