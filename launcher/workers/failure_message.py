"""The `JobOutcome` of a job, and the message about the worker that failed first: how, and the end of its stderr.

If that worker wrote nothing to stderr, the message quotes another one that failed in the same way soon after it.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..protocol.messages import ScreenFailed
from ..system.process_tree import signal_name

_TAIL_LINES = 50
_STDOUT_LINES = 5
_TAIL_BYTES = 64 << 10

_PREFIX = re.compile(r"\[rank\d+\]: ")  # torch's exception hook puts it before each line
_NO_HOROVOD = re.compile(r"ModuleNotFoundError: No module named 'horovod(\..*)?'")
_HOW_TO_FIND_IT = (
    "With hvdlite-run --horovod, a program that imports horovod gets hvdlite. If you used it, PYTHONPATH was lost on "
    "the way: extend it, as in PYTHONPATH=$PWD:$PYTHONPATH, and do not use python -E or -I."
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class Tail:
    """The last bytes that a worker wrote to one stream, at most `_TAIL_BYTES`."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * _TAIL_BYTES:
            del self._data[:-_TAIL_BYTES]

    def lines(self) -> list[str]:
        """Returns the last traceback and the lines after it; without a traceback, the last lines."""
        text = self._data[-_TAIL_BYTES:].decode(errors="backslashreplace").replace("\r\n", "\n").rstrip()
        lines = [line.rsplit("\r", 1)[-1] for line in text.split("\n")] if text else []
        return lines[max(_begin(lines), len(lines) - _TAIL_LINES) :]


def _begin(lines: list[str]) -> int:
    """Returns the index of the line where the last traceback begins, or the first one chained to it; 0 without any."""
    lines = [_PREFIX.sub("", line, count=1) for line in lines]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith(_TRACEBACK):
            before = [line for line in lines[:i] if line]
            if not before or before[-1] not in _CHAINED:
                return i
    return 0


@dataclass(frozen=True)
class Failure:
    """A worker that failed, and the last lines that it wrote.

    ``rank`` is None if it failed before it had one; it is then named by its number, ``worker``.
    """

    rank: int | None
    host: str
    pid: int
    returncode: int
    stderr: list[str]
    stdout: list[str] = field(default_factory=list)
    worker: int | None = None

    @property
    def who(self) -> str:
        name = f"worker {self.worker}" if self.rank is None else f"rank {self.rank}"
        return f"{name} on {self.host} (pid {self.pid})"


def failure_message(first: Failure, others: Sequence[Failure] = (), *, is_last: bool = False) -> str:
    """Names the worker that failed first and quotes the end of its stderr; if that is empty, one of ``others``.

    ``others`` are in the order in which they ended. They ended so soon after the first that the reason may be the same.
    ``is_last``: the job has gone on after other failures, and after this one it does not.
    """
    if first.returncode < 0:
        how = "was the last to fail" if is_last else "was the first to fail"
        how += f", killed by {signal_name(-first.returncode)}"
        if first.returncode == -signal.SIGKILL:
            how += " (the kernel does that when memory runs out)"
    else:
        how = f"failed {'last' if is_last else 'first'}, with exit code {first.returncode}"
    failures = [first, *sorted(others, key=lambda other: other.returncode != first.returncode)]
    said, stream = f"{first.who} {how}", "stderr"
    speaker = next((failure for failure in failures if failure.stderr), None)
    if speaker is not first:
        said += ". It wrote nothing to stderr"
    if speaker is None:
        stream = "stdout"
        speaker = next((failure for failure in failures if failure.stdout and first.returncode > 0), None)
        if speaker is None:
            return f"{said}."
    if speaker is not first:
        said += f". {_soon(speaker)}{', and wrote nothing there either' if stream == 'stdout' else ''}"
    lines = speaker.stderr or speaker.stdout[-_STDOUT_LINES:]
    words = "\n    ".join([f"{said}. The end of its {stream}:", *lines])
    return f"{words}\n{_HOW_TO_FIND_IT}" if _NO_HOROVOD.fullmatch(_PREFIX.sub("", lines[-1], count=1)) else words


def _soon(other: Failure) -> str:
    how = f"with exit code {other.returncode}" if other.returncode > 0 else f"by {signal_name(-other.returncode)}"
    return f"{other.who} failed within half a second of it, {how}"


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job. ``message`` is shown last, and ``rank`` is the worker that failed first, if one did.

    ``lost_host`` is the label of the host whose loss ended the job, if one did.
    ``hasty``: if the terminal accepts no more output, give up the rest of it soon, since the user waits for the end.
    """

    exit_code: int = 0
    message: str = ""
    hasty: bool = False
    rank: int | None = None
    lost_host: str | None = None

    @property
    def may_be_followed(self) -> bool:
        """Whether the job may go well if it is started anew: it failed by itself, and nobody waits for its end."""
        return self.exit_code != 0 and not self.hasty and (self.rank is not None or self.lost_host is not None)

    @classmethod
    def without_screen(cls, failed: ScreenFailed) -> JobOutcome:
        """Returns the outcome of a job whose output cannot be written any more."""
        if failed.error.errno == errno.EPIPE:
            return cls(128 + signal.SIGPIPE)
        return cls(1, f"cannot write to {failed.where}: {failed.error.strerror}")


def name_ranks(ranks: Collection[int], kind: str = "rank") -> str:
    return f"{kind}{'' if len(ranks) == 1 else 's'} {', '.join(map(str, sorted(ranks)))}"


def name_workers(numbers: Collection[int]) -> str:
    return name_ranks(numbers, "worker")


def ranges(numbers: Sequence[int], comma: str = ", ") -> str:
    """Returns ascending numbers with ranges, as in ``0-3, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return comma.join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
