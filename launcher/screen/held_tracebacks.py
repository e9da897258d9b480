"""Holds back tracebacks for a moment, so that one that several ranks write is shown once, and knows which can be seen.

    stderr of each worker ──► HeldTracebacks ──► bytes to show at once, and a `Traceback` with all that wrote it

`screen` passes what workers write through it. Only whole tracebacks are held: from their first line, or the line
"Exception in thread ...", to the exception's message, with those that are chained to it. One is shown after `HOLD_S`,
and sooner if its worker writes anything else, so that nothing else is delayed and the order within a worker is kept.
One that is equal byte by byte, but for the ``[rank0]: `` that torch puts before each line, is then shown with it.

`TracebacksInView` counts the rows of a terminal, so that the message at a job's end quotes none that is still there.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..workers.failure_message import ranges, without_quote

HOLD_S = 0.5
_MOST_BYTES = 1 << 16
_MOST_IN_VIEW = 100
_ROWS_OF_END = 6  # for the message that a rank failed, what may stand below it, and the shell's prompt

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

    written: tuple[bytes, ...]
    """What each of them wrote, with its last newline."""
    text: bytes
    """What to show: of one worker, what it wrote; of several, the same without the ranks that torch puts into it."""
    name: str
    """Of the ranks, or of the workers if they have none, as in ``0-3,5``."""
    rank: int
    """The lowest of them."""


@dataclass
class _Held:
    """A traceback of one worker, as far as it has come."""

    rank: int | None
    until_s: float
    text: bytearray = field(default_factory=bytearray)
    unfinished: bytes = b""
    is_whole: bool = False
    """Whether the line with the exception's message is there."""

    def takes(self, line: bytes) -> bool:
        """Adds a whole line if it belongs to the traceback."""
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
    """What is held of each worker, by its number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._in_a_line: set[int] = set()  # those whose last line has no end yet

    @property
    def due_at(self) -> float | None:
        """When to call `due`, by the clock; None if nothing is held."""
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
        now_s = self._clock()
        yield from self._of_those(lambda held: held.until_s <= now_s)

    def quoted(self, is_quoted: Callable[[bytes], bool]) -> Iterator[tuple[int, bytes | Traceback]]:
        """Yields those whole tracebacks that a message quotes."""
        yield from self._of_those(lambda held: held.is_whole and is_quoted(bytes(held.text)))

    def all(self) -> Iterator[tuple[int, bytes | Traceback]]:
        yield from self._of_those(lambda _: True)

    def _of_those(self, which: Callable[[_Held], bool]) -> Iterator[tuple[int, bytes | Traceback]]:
        for worker in [worker for worker, held in self._held.items() if which(held)]:
            for what in self.let_go(worker):
                yield worker, what

    def _take(self, first: _Held) -> Traceback:
        key = first.key()
        equal = {worker: held for worker, held in self._held.items() if held.is_whole and held.key() == key}
        for worker in equal:
            del self._held[worker]
        numbers = sorted(worker if held.rank is None else held.rank for worker, held in equal.items())
        name = ranges(numbers, ",")
        written = tuple(bytes(held.text) for held in equal.values())
        return Traceback(
            written,
            written[0] if len(written) == 1 else key[1],
            f"worker {name}" if first.rank is None else name,
            numbers[0],
        )

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


class TracebacksInView:
    """The tracebacks that were shown last on a terminal, and how far each has moved up since."""

    def __init__(self) -> None:
        self._rows = 0  # that lines have taken so far
        self._shown: deque[tuple[Traceback, int]] = deque(maxlen=_MOST_IN_VIEW)  # and in which row each begins

    def add(self, traceback: Traceback) -> None:
        """Notes a traceback whose lines come next."""
        self._shown.append((traceback, self._rows))

    def pass_lines(self, text: bytes, columns: int) -> None:
        self._rows += sum(1 + len(line) // max(columns, 1) for line in text.splitlines())

    def without_quote(self, message: str, rows: int) -> str:
        """Returns a message that says where a traceback is that it quotes, if that is within so many rows."""
        for traceback, row in self._shown:
            if self._rows - row + _ROWS_OF_END <= rows:
                place = f"Its traceback is above, at [{traceback.name}]<stderr>."
                for written in traceback.written:
                    message = without_quote(message, written, place)
        return message
