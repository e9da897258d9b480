"""A traceback that several ranks write is shown once, with all their numbers, and nothing else waits for that."""

from __future__ import annotations

import os
from queue import SimpleQueue

import pytest
from hvdlite_launcher.protocol.messages import Output, ScreenDone
from hvdlite_launcher.screen.lines import HOLD_S, HeldTracebacks, Traceback
from hvdlite_launcher.workers.failure_message import Failure, failure_message
from hypothesis import given
from hypothesis import strategies as st
from screens import screen_on

HEAD = b"Traceback (most recent call last):\n"
FRAMES = b'  File "train.py", line 3, in <module>\n    work()\n'
PLAIN = HEAD + FRAMES + b"ValueError: bad data\n"
CHAINED = PLAIN + b"\nDuring handling of the above exception, another exception occurred:\n\n" + PLAIN
IN_THREAD = b"Exception in thread Thread-1 (work):\n" + PLAIN


def of_rank(rank: int, text: bytes) -> bytes:
    """Returns a traceback as torch writes it."""
    return b"".join(line if line == b"\n" else b"[rank%d]: " % rank + line for line in text.splitlines(keepends=True))


class Held:
    """`HeldTracebacks` with a clock of its own; ``shown`` has what came out, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.of = HeldTracebacks(lambda: self.now_s)
        self.shown: list[tuple[str, bytes]] = []

    def feed(self, worker: int, data: bytes, rank: int | None = -1) -> Held:
        for what in self.of.feed(worker, worker if rank == -1 else rank, data):
            self.note(worker, what)
        return self

    def note(self, worker: int, what: bytes | Traceback) -> None:
        self.shown.append((str(worker), what) if isinstance(what, bytes) else (what.name, what.text))

    def wait(self, seconds: float = HOLD_S) -> Held:
        self.now_s += seconds
        for worker, what in self.of.due():
            self.note(worker, what)
        return self

    def finish(self) -> Held:
        for worker, what in self.of.all():
            self.note(worker, what)
        return self


@pytest.mark.parametrize("text", [PLAIN, CHAINED, IN_THREAD], ids=["plain", "chained", "in a thread"])
def test_equal_tracebacks_are_shown_once_with_ranges_of_ranks_after_a_moment(text):
    held = Held()
    for rank in (5, 0, 1, 2, 3):
        held.feed(rank, text)
    assert held.wait(HOLD_S / 2).shown == []
    assert held.wait(HOLD_S / 2).shown == [("0-3,5", text)]
    assert held.of.due_at is None


def test_what_torch_puts_before_each_line_makes_no_difference_and_another_number_does():
    held = Held().feed(0, of_rank(0, CHAINED)).feed(1, of_rank(1, CHAINED)).feed(2, of_rank(0, CHAINED)).finish()
    assert [data for name, data in held.shown if name != "2"] == [CHAINED]
    assert b"".join(data for name, data in held.shown if name == "2") == of_rank(0, CHAINED)


def test_a_traceback_of_one_rank_is_shown_as_it_was_written():
    assert Held().feed(3, of_rank(3, PLAIN)).finish().shown == [("3", of_rank(3, PLAIN))]


def test_those_that_differ_in_any_byte_are_shown_apart():
    other = PLAIN.replace(b"bad data", b"bad data of rank 1")
    assert Held().feed(0, PLAIN).feed(1, other).finish().shown == [("0", PLAIN), ("1", other)]


def test_workers_without_a_rank_are_named_by_number_and_apart_from_ranks():
    held = Held().feed(7, PLAIN, None).feed(8, PLAIN, None).feed(0, PLAIN).finish()
    assert held.shown == [("worker 7-8", PLAIN), ("0", PLAIN)]


def test_one_that_comes_after_the_moment_is_shown_by_itself():
    held = Held().feed(0, PLAIN).wait().feed(1, PLAIN).wait()
    assert held.shown == [("0", PLAIN), ("1", PLAIN)]


def test_what_the_worker_writes_next_comes_at_once_and_after_its_traceback():
    held = Held().feed(0, b"before\n" + PLAIN).feed(1, PLAIN)
    assert held.shown == [("0", b"before\n")]
    held.feed(0, b"going o")
    assert held.shown[1:] == [("0-1", PLAIN), ("0", b"going o")]


def test_more_lines_of_a_message_belong_to_it_where_that_can_be_seen():
    plain = PLAIN + b"\tsize mismatch for weight\n"
    prefixed = of_rank(0, PLAIN + b"and the second line\n")
    assert Held().feed(0, plain).finish().shown == [("0", plain)]
    assert Held().feed(0, prefixed).finish().shown == [("0", prefixed)]


@pytest.mark.parametrize("begin", [HEAD + FRAMES, HEAD + b"  Fi", b"Exception in thread T:\n"])
def test_a_traceback_that_does_not_end_is_shown_after_the_moment_or_at_the_end_of_its_worker(begin):
    held = Held().feed(0, begin)
    assert held.shown == []
    assert held.wait().shown == [("0", begin)]
    assert held.feed(0, b"rest\n").shown[1:] == [("0", b"rest\n")]
    (part,) = (ended := Held().feed(0, begin)).of.end(0)
    assert (part, ended.of.due_at) == (begin, None)


def test_a_whole_one_of_a_worker_that_has_ended_waits_for_equal_ones():
    held = Held().feed(0, PLAIN)
    assert list(held.of.end(0)) == []
    assert held.feed(1, PLAIN).wait().shown == [("0-1", PLAIN)]


def test_an_introduction_without_a_traceback_is_no_traceback():
    text = b"Exception in thread T:\nsomething else\n"
    assert b"".join(data for _, data in Held().feed(0, text).shown) == text


def test_a_traceback_behind_a_progress_bar_or_a_prompt_is_not_held():
    held = Held().feed(0, b" 10%|#  |").feed(0, PLAIN)
    assert held.shown == [("0", b" 10%|#  |"), ("0", PLAIN)]


def test_endless_tracebacks_are_not_kept():
    held = Held()
    for _ in range(100_000 // len(FRAMES)):
        held.feed(0, HEAD + FRAMES)
    assert len(b"".join(data for _, data in held.shown)) > 50_000
    held = Held().feed(0, HEAD + b"  x" * 30_000)
    assert held.shown == [("0", HEAD), ("0", b"  x" * 30_000)]


@given(st.lists(st.sampled_from([PLAIN, CHAINED, IN_THREAD, HEAD, FRAMES, b"a\n", b"b", b"\n", b"\r"])), st.data())
def test_every_byte_of_one_worker_comes_out_once_and_in_order_however_they_are_cut(texts, data):
    whole = b"".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    held = Held()
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        held.feed(0, whole[begin:end])
    assert b"".join(shown for _, shown in held.finish().shown) == whole


# ------------------------------------------------------------ on the screen


class Pipe:
    """A pipe, and a screen on it."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.events: SimpleQueue = SimpleQueue()
        self.screen = screen_on(self.writes, self.writes, self.events, environ={"TERM": "dumb"}, clock=lambda: 0.0)

    def text(self) -> bytes:
        self.screen.close()
        assert isinstance(self.events.get(timeout=60), ScreenDone)
        os.close(self.writes)
        with os.fdopen(self.reads, "rb") as pipe:
            return pipe.read()


def after(rank: int, text: bytes) -> bytes:
    return b"".join(b"[%d]<stderr>:" % rank + line for line in text.splitlines(keepends=True))


MERGED = b"".join(b"[0-1]<stderr>:" + line for line in PLAIN.splitlines(keepends=True))


def test_in_a_pipe_the_message_stands_by_itself():
    pipe = Pipe()
    for rank in (0, 1):
        pipe.screen.show(Output(rank, "stderr", of_rank(rank, PLAIN)))
    pipe.screen.show_held()
    pipe.screen.say(message := failure_message(Failure(1, "a", 42, 1, PLAIN.decode().splitlines())))
    assert pipe.text() == MERGED + f"hvdlite-run: {message}\n".encode()


def test_the_other_stream_of_the_same_rank_waits_for_nothing_and_lines_of_others_come_before():
    pipe = Pipe()
    pipe.screen.show(Output(0, "stderr", PLAIN))
    pipe.screen.show(Output(1, "stdout", b"of rank 1\n"))
    pipe.screen.show(Output(0, "stdout", b"of rank 0\n"))
    assert pipe.text() == b"[1]<stdout>:of rank 1\n" + after(0, PLAIN) + b"[0]<stdout>:of rank 0\n"
