"""The screen shows whole lines with a prefix and unchanged bytes, and progress bars that stay readable."""

import os
import pty
import threading
import time
from queue import SimpleQueue

import pytest
from hvdlite_launcher.protocol.messages import Output, ScreenDone, ScreenFailed
from hvdlite_launcher.screen.lines import BAR_EACH_S, MAX_LINE_BYTES, Lines
from hvdlite_launcher.screen.output_records import OutputFiles
from hypothesis import given
from hypothesis import strategies as st
from screens import screen_on


def _lines(*pieces: bytes) -> bytes:
    lines = Lines(b">", in_place=False)
    return b"".join([*map(lines.feed, pieces), lines.finish()])


@given(st.lists(st.binary(max_size=8) | st.sampled_from([b"\n", b"a\nb", b"\xff", b"\r\n"])))
def test_lines_are_the_same_however_their_bytes_are_cut(pieces):
    whole = b"".join(pieces)
    assert _lines(*pieces) == _lines(whole)
    assert _lines(*(whole[i : i + 1] for i in range(len(whole)))) == _lines(whole)


@given(st.binary().filter(lambda data: b"\r" not in data))
def test_every_byte_comes_out_as_it_went_in(data):
    complete = data if data.endswith(b"\n") or not data else data + b"\n"
    assert _lines(data) == b"".join(b">" + line for line in complete.splitlines(keepends=True)) or b"\n" in data
    assert _lines(data).count(b"\n") == complete.count(b"\n")
    assert b"".join(line[1:] + b"\n" for line in _lines(data).split(b"\n")[:-1]) == complete


def test_an_unfinished_line_waits_and_is_finished_at_the_end():
    lines = Lines(b">", in_place=False)
    assert lines.feed(b"one\ntw") == b">one\n"
    assert lines.feed(b"o\nthree") == b">two\n"
    assert lines.finish() == b">three\n"
    assert lines.finish() == b""


def test_a_line_without_end_is_shown_in_pieces_and_not_kept_for_ever():
    lines = Lines(b">", in_place=False)
    shown = b"".join(lines.feed(b"x" * 1000) for _ in range(MAX_LINE_BYTES // 1000 + 1))
    assert shown.endswith(b"x\n")
    assert len(shown) > MAX_LINE_BYTES


def test_all_lines_that_are_completed_at_once_have_the_same_stamp():
    times = iter([b"t1", b"t2", b"t3"])
    lines = Lines(b">", in_place=False, stamp=lambda: next(times))
    assert lines.feed(b"a\nb\nunfin") == b"t1>a\nt1>b\n"
    assert lines.feed(b"ished\r\nrest") == b"t2>unfinished\r\n"
    assert lines.finish() == b"t3>rest\n"


def test_where_a_bar_cannot_be_drawn_in_place_its_state_is_a_line_every_few_seconds_and_at_its_end():
    now_s = 0.0
    lines = Lines(b">", in_place=False, clock=lambda: now_s)
    shown = []
    for percent in range(100):
        shown.append(lines.feed(b"\r%d%%" % percent))
        now_s += BAR_EACH_S / 20
    shown.append(lines.feed(b"\r100%\ndone\n"))
    assert b"".join(shown) == b">0%\n>20%\n>40%\n>60%\n>80%\n>100%\n>done\n"


def test_the_last_state_of_a_bar_whose_worker_ends_is_a_line():
    lines = Lines(b">", in_place=False, clock=lambda: 0.0)
    assert lines.feed(b"10%\r20%\r30%\r") == b">10%\n"
    assert lines.finish() == b">30%\n"


def test_a_bar_that_is_wiped_leaves_no_empty_line():
    assert _lines(b"\r 10%\r", b"     \r", b"done\n") == b"> 10%\n>done\n"


def test_the_line_ends_of_other_systems_are_kept():
    assert _lines(b"a\r", b"\nb\r\n") == b">a\r\n>b\r\n"


# ------------------------------------------------------------------ screen


def _outputs(screen, *outputs):
    for output in outputs:
        screen.show(output)
    screen.close()


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)


def _read_all(fd):
    data = b""
    while chunk := os.read(fd, 4096):
        data += chunk
    return data


def test_streams_keep_their_lines_whole_and_say_whose_they_are(pipe):
    events = SimpleQueue()
    screen = screen_on(pipe[1], pipe[1], events, environ={})
    _outputs(
        screen,
        Output(0, "stdout", b"of ra"),
        Output(1, "stdout", b"of rank 1\n"),
        Output(0, "stderr", b"unfinished"),
        Output(0, "stdout", b"nk 0\n"),
    )
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    assert _read_all(pipe[0]) == b"[1]<stdout>:of rank 1\n[0]<stdout>:of rank 0\n[0]<stderr>:unfinished\n"


def test_a_line_is_shown_with_the_rank_of_its_worker(pipe):
    events = SimpleQueue()
    screen = screen_on(pipe[1], 2, events, environ={}, rank_of={7: 0, 0: 1}.__getitem__)
    _outputs(screen, Output(7, "stdout", b"first\n"), Output(0, "stdout", b"second\n"))
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    assert _read_all(pipe[0]) == b"[0]<stdout>:first\n[1]<stdout>:second\n"


def test_a_reader_that_went_away_is_an_event_once_and_output_is_done_with_all_the_same():
    read_end, write_end = os.pipe()
    os.close(read_end)
    events, shown = SimpleQueue(), []
    screen = screen_on(write_end, 2, events, shown.append, environ={})
    _outputs(screen, *[Output(0, "stdout", b"line\n")] * 200)
    failed = events.get(timeout=60)
    assert isinstance(failed, ScreenFailed)
    assert isinstance(failed.error, BrokenPipeError)
    assert isinstance(events.get(timeout=60), ScreenDone)
    assert len(shown) == 200
    os.close(write_end)


def test_a_timestamp_is_as_horovod_writes_it(pipe):
    events = SimpleQueue()
    screen = screen_on(pipe[1], 2, events, environ={}, timestamps=True)
    _outputs(screen, Output(0, "stdout", b"text\n"))
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    stamp, bracket, rest = _read_all(pipe[0]).partition(b"[")
    assert bracket + rest == b"[0]<stdout>:text\n"
    assert abs(time.mktime(time.strptime(stamp.decode())) - time.time()) < 60


def test_a_file_that_cannot_be_written_is_told_once_and_the_job_goes_on(pipe, tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    events = SimpleQueue()
    files = OutputFiles(str(tmp_path), {0: 0})
    screen = screen_on(pipe[1], pipe[1], events, environ={}, records=[files])
    _outputs(screen, *[Output(0, "stdout", b"line\n")] * 3)
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    told, *lines = _read_all(pipe[0]).splitlines()
    assert told.startswith(b"hvdlite-run: --output-filename: %b/rank.0/stdout cannot be" % os.fsencode(tmp_path))
    assert lines == [b"[0]<stdout>:line"] * 3


def test_files_of_a_new_worker_that_cannot_be_created_are_told_and_the_job_goes_on(pipe, tmp_path):
    events = SimpleQueue()
    files = OutputFiles(str(tmp_path), {}, first=0)
    (tmp_path / "worker.1").touch()
    screen = screen_on(pipe[1], pipe[1], events, environ={}, records=[files])
    screen.begin(1)
    _outputs(screen, Output(1, "stdout", b"one\n"), Output(0, "stdout", b"zero\n"))
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    told, *lines = _read_all(pipe[0]).splitlines()
    assert told.startswith(b"hvdlite-run: --output-filename: %b/worker.1" % os.fsencode(tmp_path))
    assert lines == [b"[1]<stdout>:one", b"[0]<stdout>:zero"]
    assert (tmp_path / "worker.0" / "stdout").read_bytes() == b"zero\n"


def _on_terminal(environ, *outputs, quiet_s=3600.0):
    """Returns what a terminal shows of outputs and typed lines (`TYPED`); if quiet_s is 0, unfinished lines too."""
    terminal, stream = pty.openpty()
    events = SimpleQueue()
    data = bytearray()

    def read() -> None:
        while not data.endswith(b"THE END"):
            data.extend(os.read(terminal, 65536))

    # At once, since a terminal takes a few thousand bytes only until somebody reads them.
    reader = threading.Thread(target=read)
    reader.start()
    # The clock stands still: a worker has been quiet for long enough at once, or never.
    screen = screen_on(stream, stream, events, environ=environ, quiet_s=quiet_s, redraw_s=0.0, clock=lambda: 0.0)
    for output in outputs:
        if output is TYPED:
            screen.typed()
        else:
            screen.show(output)
    screen.close()
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.write(stream, b"THE END")  # a terminal delivers its text in pieces
    reader.join()
    os.close(stream)
    os.close(terminal)
    return bytes(data).removesuffix(b"THE END").replace(b"\r\n", b"\n")


def _all_of(terminal: int, stream: int) -> bytes:
    """Returns what was written to the terminal, which delivers it in pieces."""
    os.write(stream, b"THE END")
    data = b""
    while not data.endswith(b"THE END"):
        data += os.read(terminal, 65536)
    return data.removesuffix(b"THE END")


TYPED = object()
PLAIN = {"NO_COLOR": "1"}


def _prompts(*outputs, environ=PLAIN):
    return _on_terminal(environ, *outputs, quiet_s=0.0)


@pytest.mark.parametrize("environ", [PLAIN, {"TERM": "dumb"}], ids=["in place", "dumb"])
def test_a_terminal_shows_an_unfinished_line_of_a_quiet_worker_and_then_the_rest_of_it(environ):
    shown = _prompts(
        Output(0, "stdout", b"one\nloading"),
        Output(0, "stdout", b" ..."),
        Output(0, "stdout", b" done\nnext\n"),
        environ=environ,
    )
    assert shown == b"[0]<stdout>:one\n[0]<stdout>:loading ... done\n[0]<stdout>:next\n"


def test_two_ranks_never_share_a_line_and_nothing_is_shown_twice():
    shown = _prompts(
        Output(0, "stdout", b"Epoch 1: "),
        Output(1, "stdout", b"of rank 1\n"),
        Output(0, "stdout", b"0.5"),
        Output(0, "stderr", b"a warning\n"),
        Output(1, "stdout", b"loss "),
        Output(0, "stdout", b" done\n"),
        Output(1, "stdout", b"0.7\n"),
    )
    assert shown == (
        b"[0]<stdout>:Epoch 1: \n[1]<stdout>:of rank 1\n[0]<stdout>:0.5\n[0]<stderr>:a warning\n"
        b"[1]<stdout>:loss \n[0]<stdout>: done\n[1]<stdout>:0.7\n"
    )


def test_what_follows_an_answer_that_was_typed_is_a_line_of_its_own():
    # The newline after the prompt comes from the terminal, which echoes what is typed.
    shown = _prompts(Output(0, "stdout", b"? "), TYPED, Output(0, "stdout", b"hello\n? "), TYPED)
    assert shown == b"[0]<stdout>:? [0]<stdout>:hello\n[0]<stdout>:? "


def test_a_bar_of_another_rank_makes_room_for_a_prompt_and_is_drawn_below_it_when_it_moves():
    shown = _prompts(Output(1, "stderr", b"\r 10%\r 20%"), Output(0, "stdout", b"? "), Output(1, "stderr", b"\r 30%"))
    bar = b"\x1b[?7l[1]<stderr>: %b\x1b[?7h\r\x1b[K"
    assert shown == (bar % b"10%" + b"[0]<stdout>:? \n" + bar % b"20%" + b"[1]<stderr>: 30%\n")


def test_what_turns_out_to_be_a_bar_is_drawn_in_its_place():
    shown = _prompts(Output(0, "stderr", b"10%"), Output(0, "stderr", b"\r20%\r"), Output(0, "stderr", b"30%\n"))
    bar = b"\x1b[?7l[0]<stderr>:10%\x1b[?7h"
    assert shown == b"\r\x1b[K".join([b"[0]<stderr>:10%", bar, b"[0]<stderr>:30%\n"])


def test_a_bar_in_progress_is_no_prompt():
    assert _prompts(Output(0, "stderr", b"\r 10%"), Output(0, "stderr", b"\r 20%")) == _on_terminal(
        PLAIN, Output(0, "stderr", b"\r 10%"), Output(0, "stderr", b"\r 20%")
    )


def test_a_colour_that_was_cut_in_two_is_shown_anew_once_it_is_whole():
    shown = _prompts(Output(0, "stdout", b"? \x1b[3"), Output(0, "stdout", b"1mred\n"))
    assert shown == b"[0]<stdout>:? \\x1b[3\r\x1b[K[0]<stdout>:? \x1b[31mred\n"


def _read(fd, count):
    data = b""
    while len(data) < count:
        data += os.read(fd, count - len(data))
    return data


def test_an_unfinished_line_is_shown_after_a_quiet_moment_and_not_before():
    terminal, stream = pty.openpty()
    now, is_shown, events = [0.0], SimpleQueue(), SimpleQueue()
    screen = screen_on(stream, stream, events, is_shown.put, environ=PLAIN, quiet_s=0.1, clock=lambda: now[0])
    screen.show(Output(0, "stdout", b"? "))
    is_shown.get(timeout=60)
    screen.show(Output(1, "stdout", b"line\n"))
    is_shown.get(timeout=60)
    assert _read(terminal, 18) == b"[1]<stdout>:line\r\n"
    now[0] = 0.2
    assert _read(terminal, 14) == b"[0]<stdout>:? "
    screen.close()
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(stream)
    os.close(terminal)


def test_a_terminal_shows_a_rank_in_its_colour_unless_it_shall_not():
    line = Output(1, "stdout", b"text\n")
    assert _on_terminal({}, line) == b"\x1b[32m[1]<stdout>:\x1b[0mtext\n"
    assert _on_terminal({"NO_COLOR": "1"}, line) == b"[1]<stdout>:text\n"
    assert _on_terminal({"TERM": "dumb"}, line) == b"[1]<stdout>:text\n"


def test_a_bar_moves_in_place_on_a_terminal_below_the_lines_of_others():
    shown = _on_terminal(
        {"NO_COLOR": "1"},
        Output(0, "stderr", b"\r 10%"),
        Output(0, "stderr", b"\r 20%"),  # completes the line before
        Output(1, "stdout", b"line\n"),
        Output(0, "stderr", b"\r100%\n"),
    )
    bar = b"\x1b[?7l[0]<stderr>:%b\x1b[?7h"
    erase = b"\r\x1b[K"
    assert shown == b"".join(
        [
            bar % b" 10%",
            b"\x1b[?2026h" + erase + b"[1]<stdout>:line\n" + bar % b" 10%" + b"\x1b[?2026l",
            erase + b"[0]<stderr>:100%\n",
        ]
    )


def test_a_bar_whose_worker_dies_stays_on_the_terminal():
    shown = _on_terminal({"NO_COLOR": "1"}, Output(0, "stderr", b"\r 10%\r 20%"))
    assert shown.endswith(b"\r\x1b[K[0]<stderr>: 20%\n")


def test_on_a_terminal_what_would_command_it_is_seen_and_colours_and_bars_still_work():
    shown = _on_terminal(
        {"NO_COLOR": "1"},
        Output(0, "stdout", b"\x1b]0;another title\x07 \x1b[2"),  # the bytes are cut anywhere
        Output(0, "stdout", b"J\x9b1A \xc2\x9b1A caf\xc3\xa9 \xe2\x9c\x93\n\x1b[1;31mred\x1b[0m\tand\n"),
        Output(0, "stderr", b"\x1b[1A\x1b[32m 10%\r"),
        Output(0, "stderr", b"\x1b[?25l end"),
    )
    assert b"[0]<stdout>:\\x1b]0;another title\\x07 \\x1b[2J\\x9b1A \\x9b1A caf\xc3\xa9 \xe2\x9c\x93\n" in shown
    assert b"[0]<stdout>:\x1b[1;31mred\x1b[0m\tand\n" in shown
    assert b"\x1b[?7l[0]<stderr>:\\x1b[1A\x1b[32m 10%\x1b[?7h" in shown
    assert shown.endswith(b"[0]<stderr>:\\x1b[?25l end\n")


def test_on_a_terminal_a_backspace_leads_no_further_back_than_to_the_begin_of_its_own_text():
    fake = b"ab\b\b\b\b\b\b\b\b\b\b\b\b\b\b[1]<stdout>:not said by rank 1\n"
    assert _on_terminal({"NO_COLOR": "1"}, Output(0, "stdout", fake)) == (
        b"[0]<stdout>:ab\b\b[1]<stdout>:not said by rank 1\n"
    )


def test_a_bar_that_goes_back_by_backspaces_is_drawn_in_place():
    written = b"\r 1/2 \x1b[32m.\x1b[0m 3s", b"\b" * 9 + b"\r 2/2", b" \x1b[32m..\x1b[0m 0s\n"
    shown = _on_terminal({"NO_COLOR": "1"}, *(Output(0, "stdout", data) for data in written))
    bar = b"\x1b[?7l[0]<stdout>: 1/2 \x1b[32m.\x1b[0m 3s\b\b\b\x1b[?7h"
    assert shown == bar + b"\r\x1b[K[0]<stdout>: 2/2 \x1b[32m..\x1b[0m 0s\n"


def test_the_last_words_on_a_terminal_quote_nothing_that_commands_it():
    terminal, stream = pty.openpty()
    events = SimpleQueue()
    screen = screen_on(stream, stream, events, environ={"TERM": "dumb"})
    screen.say("rank 0 failed first. The end of its stderr:\n    \x1b]0;title\x07\x9b2J\b\udc9b\x1b[31mred\x1b[0m")
    screen.close()
    assert isinstance(events.get(timeout=60), ScreenDone)
    said = _all_of(terminal, stream)
    assert said.endswith(b"stderr:\r\n    \\x1b]0;title\\x07\\x9b2J\\x08\\x9b\x1b[31mred\x1b[0m\r\n")
    os.close(stream)
    os.close(terminal)


def test_a_pipe_gets_every_byte_as_it_is(pipe):
    events = SimpleQueue()
    screen = screen_on(pipe[1], pipe[1], events, environ={})
    odd = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    _outputs(screen, Output(0, "stdout", odd + b"\n"))
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.close(pipe[1])
    assert _read_all(pipe[0]) == b"[0]<stdout>:" + odd + b"\n"


def test_each_worker_has_a_bar_of_its_own_and_those_beyond_the_rows_are_counted():
    bars = [Output(worker, "stderr", b"\r%d%%\r." % worker) for worker in range(30)]
    shown = _on_terminal(PLAIN, *bars).decode()
    newest = shown.split("\x1b[?7l")[30].partition("\x1b[?7h")[0].split("\n")
    assert len(newest) == 23
    assert newest[:2] == ["[0]<stderr>:0%", "[1]<stderr>:1%"]
    assert newest[22] == "... and 8 more bars"


def test_a_status_is_below_the_bars_and_goes_away():
    terminal, stream = pty.openpty()
    events = SimpleQueue()
    screen = screen_on(stream, stream, events, environ=PLAIN, redraw_s=0.0)
    assert screen.has_status
    screen.set_status("waiting \x1b]0;")
    screen.show(Output(0, "stderr", b"\r10%\r."))
    screen.set_status()
    screen.close()
    assert isinstance(events.get(timeout=60), ScreenDone)
    shown = _all_of(terminal, stream).replace(b"\r\n", b"\n")
    drawn = b"\x1b[?7l%b\x1b[?7h"
    assert shown == b"".join(
        [
            drawn % b"waiting \\x1b]0;",
            b"\r\x1b[K" + drawn % b"[0]<stderr>:10%\nwaiting \\x1b]0;",
            b"\r\x1b[1A\x1b[J" + drawn % b"[0]<stderr>:10%",
            b"\r\x1b[K[0]<stderr>:.\n",
        ]
    )
    os.close(stream)
    os.close(terminal)


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, None], ids=["dumb", "pipe"])
def test_where_nothing_can_be_drawn_in_place_there_is_no_status(pipe, environ):
    terminal, stream = pty.openpty()
    events = SimpleQueue()
    where = pipe[1] if environ is None else stream
    screen = screen_on(where, where, events, environ=environ or PLAIN)
    assert not screen.has_status
    screen.set_status("waiting")
    screen.close()
    assert isinstance(events.get(timeout=60), ScreenDone)
    os.write(where, b"END")
    assert os.read(pipe[0] if environ is None else terminal, 100) == b"END"
    os.close(stream)
    os.close(terminal)
