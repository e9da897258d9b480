"""`Outcome` of a job, and the message if it failed: who failed first, how, and the end of what it wrote to stderr.

Where ranks end alike, the first to end may be one that left it to another to say why: then that one's words are quoted.

Who that is decides `supervisor`.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..system.signals import signal_name
from ..wire.messages import ScreenFailed

_TAIL_LINES = 50
_STDOUT_LINES = 5
_TAIL_BYTES = 64 << 10

_PREFIX = re.compile(r"\[rank\d+\]: ")  # torch puts it before each line
_NO_HOROVOD = re.compile(r"ModuleNotFoundError: No module named 'horovod(\..*)?'")
_HOW_TO_FIND_IT = (
    "hvdlite-run --horovod lets a program find hvdlite where it imports horovod. Where that was given, PYTHONPATH "
    "was lost on the way: write PYTHONPATH=$PWD:$PYTHONPATH, and no python -E or -I."
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class Tail:
    """The last of what a worker wrote, at most so many bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * _TAIL_BYTES:
            del self._data[:-_TAIL_BYTES]

    def lines(self) -> list[str]:
        """The last traceback and what follows it; without one, the last lines."""
        text = bytes(self._data[-_TAIL_BYTES:]).decode(errors="backslashreplace")
        lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").rstrip().split("\n")]
        return [] if lines == [""] else lines[max(_begin(lines), len(lines) - _TAIL_LINES) :]


def _begin(lines: list[str]) -> int:
    """Where the last traceback begins, with those that led to it; 0 if there is none."""
    lines = [_PREFIX.sub("", line, count=1) for line in lines]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith(_TRACEBACK):
            before = [line for line in lines[:i] if line]
            if not before or before[-1] not in _CHAINED:
                return i
    return 0


@dataclass(frozen=True)
class Failure:
    """A worker that failed, and the end of what it wrote."""

    rank: int
    host: str
    pid: int
    returncode: int
    stderr: list[str]
    stdout: list[str] = field(default_factory=list)

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def failure_message(first: Failure, others: Sequence[Failure] = ()) -> str:
    """Names the worker that failed first, with the end of its stderr; if that is empty, with that of one of ``others``.

    These are in the order in which they ended, so soon after the first that it may have been for the same reason.
    """
    if first.returncode < 0:
        how = f"was the first to fail, killed by {signal_name(-first.returncode)}"
        if first.returncode == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
    else:
        how = f"failed first, with exit code {first.returncode}"
    failures = [first, *sorted(others, key=lambda other: other.returncode != first.returncode)]
    speaker = next((failure for failure in failures if failure.stderr), None)
    if speaker is first:
        said = f"{first.who} {how}. The end of its stderr:"
    elif speaker is not None:
        said = f"{first.who} {how}. It wrote nothing to stderr. {_soon(speaker)}. The end of its stderr:"
    else:
        nothing = f"{first.who} {how}. It wrote nothing to stderr"
        speaker = next((failure for failure in failures if failure.stdout and first.returncode > 0), None)
        if speaker is None:
            return f"{nothing}."
        if speaker is not first:
            nothing += f". {_soon(speaker)}, and wrote nothing there either"
        said = f"{nothing}. The end of its stdout:"
    lines = speaker.stderr or speaker.stdout[-_STDOUT_LINES:]
    words = "\n    ".join([said, *lines])
    return f"{words}\n{_HOW_TO_FIND_IT}" if _NO_HOROVOD.fullmatch(_PREFIX.sub("", lines[-1], count=1)) else words


def _soon(other: Failure) -> str:
    how = f"with exit code {other.returncode}" if other.returncode > 0 else f"by {signal_name(-other.returncode)}"
    return f"{other.who} failed within half a second of it, {how}"


@dataclass(frozen=True)
class Outcome:
    """How the job ended. ``message`` is the last word on the screen, ``rank`` the worker that failed first, if one did.

    ``hasty``: whoever waits wants the end more than the last of the output, should the screen stand still.
    """

    exit_code: int = 0
    message: str = ""
    hasty: bool = False
    rank: int | None = None

    @classmethod
    def without_screen(cls, failed: ScreenFailed) -> Outcome:
        """Of a job whose output cannot be written any more."""
        if failed.error.errno == errno.EPIPE:
            return cls(128 + signal.SIGPIPE)
        return cls(1, f"cannot write to {failed.where}: {failed.error.strerror}")


def name_ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
