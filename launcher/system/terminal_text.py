"""Makes text from workers and hosts safe to show on a terminal: control characters become visible.

A worker, an ssh, an agent on another host may write anything: on a terminal such bytes could change its title, hide
lines or draw lines that nobody said. ``ESC`` is shown as ``\\x1b``, and so are the other control characters but those
that training programs need: newline, tab, carriage return, colours, and a backspace that stays in its own line's text.
Files and pipes get every byte as it is: who asks for these has a terminal.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

_LONGEST = 4096
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n\r"
_COLOUR = r"\x1b\[[0-9;:]*m"
# Colours and whole characters of UTF-8 pass, so that the bytes within those are not taken for what they are alone.
_CONTROLS = re.compile(
    _COLOUR.encode()
    + rb"|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}"
    + rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf4][\x80-\xbf]{3}"
    + rb"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
# A byte that was no text when it was decoded is a surrogate.
_CONTROLS_IN_TEXT = re.compile(_COLOUR + "|[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udc9f]")
_STEPS = re.compile(_COLOUR.encode() + rb"|[ -~]|\x08")


def visible_bytes(data: bytes) -> bytes:
    """Lines of a worker's as a terminal may have them, each to follow what says whose it is."""
    if not data.translate(None, _PLAIN):  # the flood goes this way
        return data
    data = _CONTROLS.sub(_visible_match, data)
    if b"\b" in data:
        data = b"\n".join(map(_not_beyond_its_begin, data.split(b"\n")))
    return data


def _visible_match(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if len(found) == 1 or (len(found) == 2 and found[0] == 0xC2 and found[1] < 0xA0):
        return b"\\x%02x" % found[-1]
    return found


def _not_beyond_its_begin(line: bytes) -> bytes:
    """Without the backspaces that would lead into what stands before it."""
    column = 0

    def step(match: re.Match[bytes]) -> bytes:
        nonlocal column
        if match[0] == b"\b":
            if column == 0:
                return b""
            column -= 1
        elif len(match[0]) == 1:  # other characters may take no place at all
            column += 1
        return match[0]

    return _STEPS.sub(step, line)


def visible(text: str) -> str:
    """Words of the launcher's own, which may quote others', as a terminal may have them."""
    return _CONTROLS_IN_TEXT.sub(_visible_character, text)


def _visible_character(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else f"\\x{ord(match[0]) & 0xFF:02x}"


def one_line(text: str) -> str:
    """What another host says, as part of a line of ours: of a sane length, and with nothing but what can be read."""
    words = " ".join(text.split())
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def say(text: str, stream: TextIO | None = None) -> None:
    """A line of the launcher's on stderr, or text on another stream, at once."""
    if stream is None:
        stream, text = sys.stderr, f"hvdlite-run: {text}\n"
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()
