"""What workers write, cut into what is shown: `Lines` into whole lines, `HeldTracebacks` those that are written twice.

    stderr of each worker ──► HeldTracebacks ──► bytes to show at once, and a `Traceback` for all ranks that wrote it
    what is shown of a stream of a worker ──► Lines ──► whole lines, its progress bar and unfinished line

Only whole tracebacks are held: from their first line, or the line "Exception in thread ...", to the exception's
message, with those that are chained to it. One is shown after `HOLD_S`, and sooner if its worker writes anything else,
so that nothing else is delayed and the order within a worker is kept. One that is equal byte by byte, but for the
``[rank0]: `` that torch puts before each line, is then shown with it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..workers.failure_message import ranges

BAR_EACH_S = 5.0
MAX_LINE_BYTES = 1 << 20  # longer ones are shown in pieces

_PIECE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")


@dataclass
class Lines:
    """Splits the bytes of one stream of one worker into lines; ``bar`` is the state of its bar that is no line yet.

    Bars are drawn ``in_place``; otherwise a state of a bar is made a line each `BAR_EACH_S` seconds.

    ``stamp`` returns the text before the prefix of lines that end now, ``clean`` the bytes to show for a worker's
    bytes.
    """

    prefix: bytes
    in_place: bool
    stamp: Callable[[], bytes] = bytes
    clean: Callable[[bytes], bytes] = bytes
    clock: Callable[[], float] = time.monotonic
    bar: bytes = b""
    _bar_at_s: float | None = None  # when a state of a bar was last made a line
    _rest: bytearray = field(default_factory=bytearray)
    _begin: bytes = b""  # how the unfinished line begins on the screen, if it is there
    _shown_bytes: int = 0  # how much of the unfinished line is on the screen
    _is_drawing: bool = False  # the unfinished line follows a carriage return, as a bar does

    def feed(self, data: bytes) -> bytes:
        """Adds bytes and returns the lines that they complete, each with the prefix."""
        if b"\r" in data or b"\r" in self._rest:
            return self._with_bars(data)
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest += data
            return self.finish() if len(self._rest) > MAX_LINE_BYTES else b""
        # The path for large amounts of output: a search and a replace, no loop.
        prefix = self.stamp() + self.prefix
        text = self.clean(b"".join((self._rest, head)))
        lines = b"".join((self._begin or prefix, text.replace(b"\n", b"\n" + prefix), b"\n"))
        self._is_drawing = False
        self._renew(rest)
        self.bar = b""
        return lines

    def _with_bars(self, data: bytes) -> bytes:
        text = bytes(self._rest) + data
        prefix = self.stamp() + self.prefix
        lines = []
        start = 0
        for match in _PIECE.finditer(text):
            if match.end() == len(text) and match[2] == b"\r":
                break  # the next byte may be the \n of a \r\n
            start = match.end()
            body, end = self.clean(match[1]), match[2]
            begin, self._begin = self._begin or prefix, b""
            self._is_drawing = end == b"\r"
            if not self._is_drawing:
                lines.append(begin + body + end)
                self.bar = b""
            elif not body.strip():
                self.bar = b""
            elif self.in_place or not self._is_bar_due():
                self.bar = begin + body
            else:
                lines.append(begin + body + b"\n")
                self.bar = b""
        if start:
            self._renew(text[start:])
        else:
            self._rest = bytearray(text)
        return b"".join(lines)

    def _is_bar_due(self) -> bool:
        now_s = self.clock()
        is_due = self._bar_at_s is None or now_s - self._bar_at_s >= BAR_EACH_S
        if is_due:
            self._bar_at_s = now_s
        return is_due

    @property
    def is_unfinished(self) -> bool:
        """Whether there is an unfinished line to show; a bar is none."""
        return bool(self._rest) and not (self.bar or self._is_drawing or b"\r" in self._rest)

    def show_unfinished(self) -> bytes:
        """Returns the unfinished line so far; the whole line will begin with the same bytes."""
        self._begin = self._begin or self.stamp() + self.prefix
        self._shown_bytes = len(self._rest)
        return self._begin + self.clean(bytes(self._rest))

    def start_new_line(self) -> None:
        """Makes the rest of the unfinished line a line of its own: something else was written below its beginning."""
        self._renew(bytes(self._rest[self._shown_bytes :]))

    def _renew(self, rest: bytes) -> None:
        """Sets the unfinished line to ``rest``, of which nothing is on the screen."""
        self._rest, self._begin, self._shown_bytes = bytearray(rest), b"", 0

    def finish(self) -> bytes:
        rest = self.clean(bytes(self._rest).rstrip(b"\r"))
        line = (self._begin or self.stamp() + self.prefix) + rest if rest else self.bar
        self._renew(b"")
        self.bar = b""
        return line + b"\n" if line else b""


# -- tracebacks

HOLD_S = 0.5
_MOST_BYTES = 1 << 16

_OF_RANK = rb"(?:\[rank\d+\]: )?"
_BEGIN = re.compile(rb"^" + _OF_RANK + rb"(?:Traceback \(most recent call last\):|Exception in thread .*:)\n", re.M)
_INTRODUCTION = re.compile(_OF_RANK + rb"Exception in thread ")
_HEADER = re.compile(_OF_RANK + rb"Traceback \(most recent call last\):\n")
_CHAINED = re.compile(
    _OF_RANK
    + rb"(?:The above exception was the direct cause of the following exception:"
    + rb"|During handling of the above exception, another exception occurred:)\n"
)


@dataclass(frozen=True)
class Traceback:
    """A traceback that one worker or several wrote."""

    text: bytes
    """What to show: of one worker, what it wrote; of several, the same without the ranks that torch puts into it."""
    name: str
    """Of the ranks, or of the workers if they have none, as in ``0-3,5``."""
    rank: int
    """The lowest of them."""


@dataclass
class _Held:
    rank: int | None
    until_s: float
    text: bytearray = field(default_factory=bytearray)
    unfinished: bytes = b""
    is_whole: bool = False
    """Whether the line with the exception's message is there."""

    def takes(self, line: bytes) -> bool:
        bare = self._bare(line)
        if _INTRODUCTION.match(self.text) and self.text.count(b"\n") == 1:
            belongs = _HEADER.match(line) is not None
        elif self.is_whole:
            # Further lines of the message are known by torch's prefix, or by their indentation.
            belongs = bare != line or line[:1] in b" \t\n" or bool(_CHAINED.match(line) or _HEADER.match(line))
        else:
            belongs = True
        if belongs:
            begins = not self.text or _HEADER.match(line)
            self.text += line
            self.is_whole = not begins and (self.is_whole or bare[:1] not in b" \t\n")
        return belongs

    def key(self) -> tuple[bool, bytes]:
        """Returns what is equal for equal tracebacks: whether it has no rank, and the text without torch's prefixes."""
        return self.rank is None, b"".join(map(self._bare, bytes(self.text).splitlines(keepends=True)))

    def _bare(self, line: bytes) -> bytes:
        return line if self.rank is None else line.removeprefix(b"[rank%d]: " % self.rank)


class HeldTracebacks:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._in_a_line: set[int] = set()  # those whose last line has no end yet

    @property
    def due_at(self) -> float | None:
        return min((held.until_s for held in self._held.values()), default=None)

    def feed(self, worker: int, rank: int | None, data: bytes) -> Iterator[bytes | Traceback]:
        """Takes what a worker writes to stderr, and yields what to show now: its bytes, and what was held before."""
        if worker in self._held:
            data = self._held[worker].unfinished + data
            self._held[worker].unfinished = b""
        while data:
            if worker not in self._held:
                start = self._begin(worker, data)
                if start:
                    yield self._pass(worker, data[:start])
                data = data[start:]
                if data:
                    self._held[worker] = _Held(rank, self._clock() + HOLD_S)
                continue
            held = self._held[worker]
            line, newline, rest = data.partition(b"\n")
            is_too_much = len(held.text) + len(line) > _MOST_BYTES
            if not newline and not held.is_whole and not is_too_much:
                held.unfinished, data = line, b""
            elif newline and not is_too_much and held.takes(line + newline):
                data = rest
            else:
                yield from self.let_go(worker)
                # A line that did not belong to it may begin another; one that is too much must not do so again.
                if is_too_much:
                    yield self._pass(worker, line + newline)
                    data = rest

    def let_go(self, worker: int) -> Iterator[bytes | Traceback]:
        """Yields what is held of a worker: a traceback, with those that are equal to it, or a part of one."""
        held = self._held.get(worker)
        if held is None:
            return
        if held.is_whole:
            yield self._take(held)
        else:
            del self._held[worker]
            yield self._pass(worker, bytes(held.text) + held.unfinished)

    def end(self, worker: int) -> Iterator[bytes | Traceback]:
        """Yields the part of a traceback of a worker that writes nothing more. A whole one goes on being held."""
        if (held := self._held.get(worker)) is not None and not held.is_whole:
            yield from self.let_go(worker)
        self._in_a_line.discard(worker)

    def due(self) -> Iterator[tuple[int, bytes | Traceback]]:
        """Yields what has been held for long enough, with the number of a worker that wrote it."""
        yield from self._held_until(self._clock())

    def all(self) -> Iterator[tuple[int, bytes | Traceback]]:
        yield from self._held_until(math.inf)

    def _held_until(self, until_s: float) -> Iterator[tuple[int, bytes | Traceback]]:
        for worker in [worker for worker, held in self._held.items() if held.until_s <= until_s]:
            yield from ((worker, what) for what in self.let_go(worker))

    def _take(self, first: _Held) -> Traceback:
        key = first.key()
        equal = {worker: held for worker, held in self._held.items() if held.is_whole and held.key() == key}
        for worker in equal:
            del self._held[worker]
        numbers = sorted(worker if held.rank is None else held.rank for worker, held in equal.items())
        name = ranges(numbers, ",")
        text = bytes(first.text) if len(equal) == 1 else key[1]
        return Traceback(text, f"worker {name}" if first.rank is None else name, numbers[0])

    def _begin(self, worker: int, data: bytes) -> int:
        """Returns where a traceback begins: at the beginning of a line that is there as a whole."""
        if b"Traceback (most" not in data and b"Exception in thread " not in data:  # the usual case
            return len(data)
        found = _BEGIN.search(data)
        if found is not None and found.start() == 0 and worker in self._in_a_line:
            found = _BEGIN.search(data, found.end())
        return len(data) if found is None else found.start()

    def _pass(self, worker: int, data: bytes) -> bytes:
        if data.endswith(b"\n"):
            self._in_a_line.discard(worker)
        else:
            self._in_a_line.add(worker)
        return data
