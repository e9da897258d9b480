"""Control characters are made visible, so that no terminal interprets them."""

import io
import re
import subprocess
import sys

import pytest
from hvdlite_launcher.system.terminal_text import command_in_one_line, one_line, table, visible, visible_bytes, write
from hypothesis import given
from hypothesis import strategies as st

COLOUR = rb"\x1b\[[0-9;:]*m"
ODD = [b"\x1b[", b"\x1b]0;", b"\x9b", b"\xc2\x9b", b"\x07", b"\b", b"\xe0\x80\x9b", b"\xc2", b"31m", b"\n"]


@given(st.lists(st.binary(max_size=4) | st.sampled_from(ODD)).map(b"".join))
def test_no_command_passes_however_the_bytes_are_put_together(data):
    shown = re.sub(COLOUR, b"", visible_bytes(data))
    assert not re.search(rb"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]", shown)
    # In UTF-8, and as bytes for a terminal that does not know UTF-8.
    assert not re.search("[\x80-\x9f]", shown.decode(errors="replace"))
    assert not re.search(rb"(?<![\x80-\xff])[\x80-\x9f]", shown)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"12%\b\b\b13%", b"12%\b\b\b13%"),
        (b"|\b/\b-", b"|\b/\b-"),
        (b"\x1b[32m|\x1b[0m\b/", b"\x1b[32m|\x1b[0m\b/"),
        (b"\x1b[32m\b\b\b", b"\x1b[32m"),
        (b"ab\n\b\bcd\b\b\b", b"ab\ncd\b\b"),
        (b"caf\xc3\xa9\b\b", b"caf\xc3\xa9"),
        (b"\x1b[2\b\b\b\b\b\b\b\b", b"\\x1b[2" + b"\b" * 6),
    ],
)
def test_a_backspace_stays_within_the_text_that_it_follows(written, shown):
    assert visible_bytes(written) == shown


def test_text_with_backspaces_takes_no_longer_the_longer_it_is():
    data = b"\b" + b"a" * 3_000_000
    assert visible_bytes(data) == data[1:]


@given(st.text(alphabet=st.characters(blacklist_categories=("Cc", "Cs"))))
def test_text_of_any_language_is_as_it_was(text):
    assert visible_bytes(text.encode()) == text.encode()
    assert visible(text) == text


@given(st.text())
def test_what_another_host_says_is_one_line_that_can_be_read(text):
    assert one_line(text).isprintable()


def test_a_word_without_end_is_cut():
    assert len(one_line("x" * 10_000_000)) < 5000


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "shown"), [(io.StringIO(), "a\x1b[2J\r\n"), (Terminal(), "a\\x1b[2J\\x0d\n")], ids=["file", "terminal"]
)
def test_a_line_is_as_it_is_in_a_file_and_harmless_on_a_terminal(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stdout", stream)
    write("a\x1b[2J\r\n")
    assert stream.getvalue() == shown


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--ps"], ["--dry-run", "-np", "1", "true"]], ids=str)
def test_a_full_disk_under_stdout_is_named_as_what_it_is(words):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "hvdlite_launcher", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "hvdlite-run: cannot write to stdout: No space left on device\n")


def test_a_command_is_one_line_as_it_is_typed():
    assert command_in_one_line(["python", "my é.py"]) == "python 'my é.py'"
    assert command_in_one_line(["sh", "-c", "a\n\x1b[2Jb\udc80"]) == r"sh -c 'a\n\x1b[2Jb\udc80'"


def test_cells_stand_below_each_other_and_lines_end_with_their_last_letter():
    assert table([("PID", "AGE"), ("7", "0:00:01"), ("4242", "")]) == ["PID   AGE", "7     0:00:01", "4242"]
