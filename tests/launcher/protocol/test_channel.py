"""The agent's channel: beats, a silent launcher, bytes that the launcher does not read, and its end."""

import os
import selectors

import pytest
from hvdlite_launcher.protocol.channel import BEAT_S, SILENCE_S, Channel, Decoder, encode
from hvdlite_launcher.protocol.messages import Beat, Output, SignalWorkers


class Wire:
    """A channel, the launcher's two ends of it, and a clock."""

    def __init__(self):
        self.now = 100.0
        commands, self.to_agent = os.pipe()
        self.from_agent, events = os.pipe()
        self._ends = commands, events
        self.selector = selectors.DefaultSelector()
        self.channel = Channel(commands, events, self.selector, lambda: self.now)

    def heard(self):
        self.channel.flush()
        os.set_blocking(self.from_agent, False)
        try:
            return list(Decoder().feed(os.read(self.from_agent, 1 << 20)))
        except BlockingIOError:
            return []

    def pass_time(self, seconds):
        self.now += seconds
        self.channel.tick()

    def close(self):
        self.selector.close()
        for fd in (*self._ends, self.to_agent, self.from_agent):
            os.close(fd)


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.close()


def test_messages_come_and_go(wire):
    os.write(wire.to_agent, encode(SignalWorkers((1,), 15)))
    assert list(wire.channel.receive()) == [SignalWorkers((1,), 15)]
    wire.channel.send(Output(1, "stdout", b"x"))
    assert wire.heard() == [Output(1, "stdout", b"x")]


def test_nobody_beats_who_was_not_asked_to(wire):
    assert wire.channel.time_left_s() is None
    wire.pass_time(1000)
    assert (wire.heard(), wire.channel.closed) == ([], False)


def test_beats_are_sent_as_long_as_the_launcher_is_heard(wire):
    wire.channel.beat()
    for _ in range(20):
        assert wire.channel.time_left_s() <= BEAT_S
        wire.pass_time(BEAT_S)
        os.write(wire.to_agent, encode(Beat()))
        list(wire.channel.receive())
        assert wire.heard() == [Beat()]
    assert not wire.channel.closed


def test_a_launcher_that_is_silent_for_too_long_is_gone(wire):
    wire.channel.beat()
    silence_s = 0.0
    while not wire.channel.closed:
        wire.pass_time(BEAT_S)
        silence_s += BEAT_S
    assert SILENCE_S < silence_s <= SILENCE_S + BEAT_S


def test_a_launcher_whose_words_have_come_and_are_not_read_yet_is_not_gone(wire):
    wire.channel.beat()
    os.write(wire.to_agent, encode(Beat()))
    wire.pass_time(2 * SILENCE_S)
    assert not wire.channel.closed
    assert list(wire.channel.receive()) == [Beat()]
    wire.pass_time(2 * SILENCE_S)
    assert wire.channel.silent


def test_who_reads_nothing_is_sent_no_beats_on_top(wire):
    wire.channel.beat()
    wire.channel.send(Output(0, "stdout", b"x" * (1 << 20)))
    wire.channel.flush()
    assert wire.channel.full
    for _ in range(3):
        wire.pass_time(BEAT_S)
    data = b""
    os.set_blocking(wire.from_agent, False)
    while True:
        wire.channel.flush()
        try:
            data += os.read(wire.from_agent, 1 << 20)
        except BlockingIOError:
            break
    assert list(Decoder().feed(data)) == [Output(0, "stdout", b"x" * (1 << 20))]


def test_the_end_of_the_commands_closes_the_channel(wire):
    os.close(wire.to_agent)
    wire.to_agent = os.dup(wire.from_agent)  # so that there is a descriptor to close
    assert list(wire.channel.receive()) == []
    assert wire.channel.closed


def fill(wire):
    """Has more sent than the launcher's end takes now; returns how much."""
    wire.channel.send(b"x" * (1 << 20))
    wire.channel.flush()
    return 1 << 20


def test_it_is_closed_once_all_is_written(wire):
    closed = []
    wire.channel.finish(lambda: closed.append(1))
    assert (closed, wire.channel.is_finished) == ([1], True)


def test_what_waits_is_written_before_it_is_closed(wire):
    closed, read, sent = [], 0, fill(wire)
    wire.channel.finish(lambda: closed.append(1))
    while not closed:
        read += len(os.read(wire.from_agent, 1 << 20))
        for key, _ in wire.selector.select(0):
            key.data()
    read += len(os.read(wire.from_agent, 1 << 20))
    assert (read, closed, list(wire.selector.get_map())) == (sent, [1], [])


def test_what_waits_may_be_dropped_and_then_nothing_is_registered_any_more(wire):
    closed, _ = [], fill(wire)
    wire.channel.finish(lambda: closed.append(1), drops_rest=True)
    assert (closed, list(wire.selector.get_map())) == ([1], [])


def test_what_waits_may_be_dropped_by_a_second_call_and_it_is_closed_once(wire):
    closed, _ = [], fill(wire)
    for drops_rest in (False, True, True):
        wire.channel.finish(lambda: closed.append(1), drops_rest=drops_rest)
    assert (closed, list(wire.selector.get_map())) == ([1], [])


def test_once_it_is_closed_another_file_may_have_its_number(wire):
    number = wire._ends[1]
    wire.channel.finish(lambda: os.close(number))
    os.dup2(wire.from_agent, number)
    wire.selector.register(number, selectors.EVENT_READ)
    wire.channel.finish(lambda: pytest.fail("it is closed already"), drops_rest=True)
    assert list(wire.selector.get_map()) == [number]


def test_an_end_that_reads_no_more_is_not_waited_for(wire):
    fill(wire)
    os.close(wire.from_agent)
    wire.from_agent = os.open(os.devnull, os.O_RDONLY)
    for key, _ in wire.selector.select(0):
        key.data()
    assert (wire.channel.closed, list(wire.selector.get_map())) == (True, [])
