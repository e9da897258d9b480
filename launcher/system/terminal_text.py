"""What the launcher writes to a terminal. Text of workers and hosts is made safe: control characters become visible.

A worker, ssh, or an agent on another host may write any bytes. On a terminal they could change its title, hide lines,
or draw lines that no program wrote. ``ESC`` is shown as ``\\x1b``, and so are other control characters, except those
that training programs need: newline, tab, carriage return, colours, and backspaces within the text that they follow.
Files and pipes get every byte unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from ..errors import LauncherError

_LONGEST = 4096
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n\r"
_COLOUR = r"\x1b\[[0-9;:]*m"
# Colours and complete UTF-8 characters match first and are kept, so that bytes within them are not control characters.
_CONTROLS = re.compile(
    _COLOUR.encode()
    + rb"|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}"
    + rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf4][\x80-\xbf]{3}"
    + rb"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
# Bytes that could not be decoded are surrogates in a str.
_CONTROLS_IN_TEXT = re.compile(_COLOUR + "|[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udc9f]")
# A text, colours, and backspaces, as some progress bars write them: Keras goes back to the beginning of its line so.
_BACK = re.compile(f"([ -~]+)((?:{_COLOUR})*)(\\x08*)|{_COLOUR}|\\x08+".encode())
_ERASE, _UNWRAPPED, _WRAPPED = "\r\x1b[K", "\x1b[?7l", "\x1b[?7h"


def visible_bytes(data: bytes) -> bytes:
    """Returns a worker's lines, to be shown after a prefix, with control characters visible."""
    if not data.translate(None, _PLAIN):  # the usual case, also for large amounts of output
        return data
    data = _CONTROLS.sub(_visible_match, data)
    return _BACK.sub(_back_within_the_text, data) if b"\b" in data else data


def _back_within_the_text(match: re.Match[bytes]) -> bytes:
    """Removes the backspaces that may lead beyond the text before them, into the prefix of the line."""
    text, colours, back = match.groups()
    return match[0].replace(b"\b", b"") if text is None else text + colours + back[: len(text)]


def _visible_match(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if len(found) == 1 or (len(found) == 2 and found[0] == 0xC2 and found[1] < 0xA0):
        return b"\\x%02x" % found[-1]
    return found


def visible(text: str) -> str:
    """Returns a message of the launcher, which may quote others, with control characters visible."""
    return _CONTROLS_IN_TEXT.sub(_visible_character, text)


def _visible_character(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else f"\\x{ord(match[0]) & 0xFF:02x}"


def one_line(text: str) -> str:
    """Returns another host's text as one printable line of limited length, to be part of a message."""
    words = " ".join(text.split())
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes a line of the launcher to stderr, or ``text`` as it is to ``stream``, and flushes."""
    if stream is None:
        stream, text = sys.stderr, f"hvdlite-run: {text}\n"
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()


def write(text: str) -> None:
    """Writes text that the user has asked for to stdout, and flushes; a `LauncherError` says that it cannot."""
    try:
        say(text, sys.stdout)
    except BrokenPipeError:  # the reader has closed it
        raise
    except OSError as error:
        # Else Python would try again at its end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise LauncherError(f"cannot write to stdout: {error.strerror}") from error


def command_in_one_line(words: Iterable[object]) -> str:
    """Returns a command as it is typed in a shell, with line ends and control characters visible, as of `python -c`."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in shlex.join(map(str, words))
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row of texts: cells to the left of their columns, as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class StatusLine:
    """One line that says what is being waited for, and goes away. Where ``stream`` is no terminal, nothing is written.

    `agents` shows one while it connects to hosts. Once a job runs, `screen.job_screen` owns the terminal.
    """

    def __init__(self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        """``stream`` is stderr by default."""
        self._stream = sys.stderr if stream is None else stream
        self._is_on = self._stream.isatty() and environ.get("TERM") != "dumb"
        self._text = ""

    def show(self, text: str) -> None:
        """Draws this text in place of the last one; "" removes it. It is cut at the terminal's width."""
        if self._is_on and text != self._text:
            line = f"{_UNWRAPPED}hvdlite-run: {visible(text)}{_WRAPPED}" if text else ""
            self._stream.write((_ERASE if self._text else "") + line)
            self._stream.flush()
            self._text = text

    def say(self, text: str) -> None:
        """Writes a line of the launcher above it."""
        shown = self._text
        self.show("")
        say(text) if self._stream is sys.stderr else say(f"hvdlite-run: {text}\n", self._stream)
        self.show(shown)
