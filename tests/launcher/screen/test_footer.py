"""What is drawn below all output takes only the rows that are there, and is erased as a whole."""

from hvdlite_launcher.screen.display import Footer

DRAWN = b"\x1b[?7l%b\x1b[?7h"


class Drawn:
    """A footer on a terminal of some size, and what was written to it since it was last looked at."""

    def __init__(self, columns=80, rows=24, redraw_s=0.0):
        self.size, self.now, self._written = (columns, rows), 0.0, []
        self.footer = Footer(self._written.append, lambda: self.size, clock=lambda: self.now, redraw_s=redraw_s)

    def draw(self, *lines):
        self.footer.draw(list(lines))
        return self.written()

    def erase(self):
        self.footer.erase()
        return self.written()

    def written(self):
        written = b"".join(self._written)
        self._written.clear()
        return written


def test_lines_are_drawn_once_and_erased_together():
    on = Drawn()
    assert on.draw(b"one", b"two", b"three") == DRAWN % b"one\ntwo\nthree"
    assert on.draw(b"one", b"two", b"three") == b""
    assert on.draw(b"1") == b"\r\x1b[2A\x1b[J" + DRAWN % b"1"
    assert on.erase() == b"\r\x1b[K"
    assert on.erase() == b""


def test_a_row_is_left_to_the_output():
    assert Drawn(rows=3).draw(b"1", b"2", b"3", b"4") == DRAWN % b"1\n2"
    assert Drawn(rows=1).draw(b"1", b"2") == DRAWN % b"1"


def test_a_terminal_that_tells_no_size_has_the_usual_one():
    assert Drawn(0, 0).draw(*[b"x"] * 30).count(b"x") == 23


def test_rows_that_a_narrower_terminal_has_wrapped_are_erased_too():
    on = Drawn(columns=80)
    on.draw(b"x" * 100, b"\x1b[31m" + b"y" * 40 + b"\x1b[0m", "日本".encode() * 10)
    on.size = 40, 24
    assert on.erase() == b"\r\x1b[3A\x1b[J"  # 2, 1 and 1 rows


def test_it_is_drawn_anew_for_another_width():
    on = Drawn(columns=80)
    on.draw(b"one")
    on.size = 100, 24
    assert on.draw(b"one") == b"\r\x1b[K" + DRAWN % b"one"


def test_while_much_is_written_it_is_drawn_after_a_while_only():
    on = Drawn(redraw_s=1.0)
    on.draw(b"one")
    on.erase()
    assert (on.draw(b"two"), on.footer.due_at) == (b"", 1.0)
    on.now = 1.0
    assert (on.draw(b"three"), on.footer.due_at) == (DRAWN % b"three", None)


def test_output_scrolls_up_above_it_in_one_write():
    on = Drawn()
    on.draw(b"one", b"two")
    on.footer.write(b"output\n")
    assert on.written() == b""
    assert on.draw(b"one", b"two") == b"\x1b[?2026h\r\x1b[1A\x1b[Joutput\n" + DRAWN % b"one\ntwo" + b"\x1b[?2026l"


def test_while_much_is_written_it_is_drawn_a_few_times_a_second_and_stays_visible():
    on = Drawn(redraw_s=1.0)
    on.draw(b"bar")
    for number in range(1000):
        on.footer.write(b"%d\n" % number)
        assert on.draw(b"bar") == b""
    assert on.footer.due_at == 1.0
    on.now = 1.0
    drawn = on.draw(b"bar")
    assert drawn.count(b"\n") == 1000
    assert drawn.count(b"bar") == 1


def test_what_is_held_back_is_never_much():
    on = Drawn(redraw_s=1.0)
    on.draw(b"bar")
    on.footer.write(b"x" * 70_000)
    assert len(on.draw(b"bar")) > 70_000


def test_output_that_is_held_back_is_written_when_it_goes_away():
    on = Drawn(redraw_s=1.0)
    on.draw(b"bar")
    on.footer.write(b"output\n")
    assert on.erase() == b"\r\x1b[Koutput\n"
    on.footer.write(b"more\n")
    assert on.written() == b"more\n"


def test_a_line_that_the_user_has_ended_below_it_is_erased_too():
    on = Drawn()
    on.draw(b"one", b"name?")
    on.footer.note_newline()
    assert on.erase() == b"\r\x1b[2A\x1b[J"
    on.footer.note_newline()
    on.draw(b"one")
    assert on.erase() == b"\r\x1b[K"
