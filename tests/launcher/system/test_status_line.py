"""A status line is drawn in place on a terminal, and nowhere else."""

import io

import pytest
from hvdlite_launcher.system.terminal_text import StatusLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_is_redrawn_in_place_below_what_is_said_and_removed():
    terminal = Terminal()
    line = StatusLine(terminal, {})
    line.show("one")
    line.show("one")
    line.say("node1: why")
    line.show("")
    drawn = "\x1b[?7lhvdlite-run: one\x1b[?7h"
    assert terminal.getvalue() == f"{drawn}\r\x1b[Khvdlite-run: node1: why\n{drawn}\r\x1b[K"


def test_a_name_of_a_host_cannot_command_the_terminal():
    terminal = Terminal()
    StatusLine(terminal, {}).show("\x1b]0;title\x07")
    assert "\\x1b]0;title\\x07" in terminal.getvalue()


@pytest.mark.parametrize(("stream", "environ"), [(io.StringIO(), {}), (Terminal(), {"TERM": "dumb"})])
def test_where_nothing_can_be_drawn_in_place_there_is_none(stream, environ):
    line = StatusLine(stream, environ)
    line.show("one")
    line.say("told")
    assert stream.getvalue() == "hvdlite-run: told\n"
