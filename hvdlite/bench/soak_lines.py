"""
The files that the workers of a soak write, a `Line` for each finished step, and what follows from them: `Training`.

`soak_worker` writes them; `soak` reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

BATCH = 16
"""The samples of a rank in one step."""


class Line(NamedTuple):
    """One finished step of one worker.

    ``round`` counts the calls of the training function, and is the same on all ranks: a step that is repeated after
    a loss is in a later round. ``hashed`` is the hash of the parameters after the step, None where none was taken.
    """

    round: int
    step: int
    at_s: float
    samples: int
    hashed: str | None

    def text(self) -> str:
        """Returns it as a line of a file."""
        return f"{self.round} {self.step} {self.at_s:.6f} {self.samples} {self.hashed or '-'}\n"


class Training(NamedTuple):
    """What the workers of one window have trained.

    ``seconds`` is the time from the end of the first step to that of the last; ``steps`` and ``samples`` are those
    finished in it, a repeated step counted once. ``repeated`` counts the steps that were done again. ``pause_s`` is the
    longest time between two steps. ``compared`` counts the steps after which several ranks took a hash, and ``unequal``
    those of them after which their hashes differed.
    """

    seconds: float
    steps: int
    samples: int
    repeated: int
    pause_s: float
    compared: int
    unequal: int


def read_lines(directory: Path) -> list[list[Line]]:
    """Returns the lines of each worker. A last line that a killed worker has not finished is left out."""
    return [_lines_of(path.read_text()) for path in sorted(directory.glob("*.txt"))]


def _lines_of(text: str) -> list[Line]:
    found = []
    for line in text.split("\n")[:-1]:
        number, step, at_s, samples, hashed = line.split()
        found.append(Line(int(number), int(step), float(at_s), int(samples), None if hashed == "-" else hashed))
    return found


def training_of(workers: Iterable[Sequence[Line]]) -> Training | None:
    """Returns what these workers have trained, or None if that is less than two steps."""
    rounds: defaultdict[int, defaultdict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for lines in workers:
        for line in lines:
            rounds[line.step][line.round].append(line)
    if len(rounds) < 2:
        return None
    # Of a repeated step the last round counts.
    counted = [by_round[max(by_round)] for _, by_round in sorted(rounds.items())]
    ends = sorted(max(line.at_s for line in lines) for lines in counted)
    hashes = [
        [line.hashed for line in lines if line.hashed is not None]
        for by_round in rounds.values()
        for lines in by_round.values()
    ]
    several = [each for each in hashes if len(each) > 1]
    return Training(
        seconds=ends[-1] - ends[0],
        steps=len(counted) - 1,
        samples=sum(line.samples for lines in counted[1:] for line in lines),
        repeated=sum(len(by_round) - 1 for by_round in rounds.values()),
        pause_s=max(later - earlier for earlier, later in pairwise(ends)),
        compared=len(several),
        unequal=sum(len(set(each)) > 1 for each in several),
    )
