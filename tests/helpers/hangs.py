"""Hangs drawn from a seed: which rank, at which step, at which place of its program, of which kind; and that program.

    seeded_hangs(seed) ── hang_program.py, with the hangs as JSON ── hangs one after the other, each ended by the test

Importing torch takes longer than any of the hangs, so one job goes through many. The program touches ``there.N`` just
before the N-th hang; `Hang.end` ends it, and the job goes on to the next.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("hang_program.py")

COLLECTIVES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce")
ALONE, SWALLOWED, LEFT_OUT = "alone", "swallowed", "left out"
BY_COLLECTIVE = (ALONE, SWALLOWED, LEFT_OUT)
STOP = "stop"
BY_SIGNAL = ("sleep", "extension", "regular expression", "loader", "mutex", "threads", "pipe")
HOLDS_THE_LOCK = ("extension", "regular expression")
KINDS = (*BY_COLLECTIVE, STOP, *BY_SIGNAL)
PLACES = ("data", "forward", "loss", "backward", "between")


@dataclass(frozen=True)
class Hang:
    """``rank`` is the one that the others wait for: in ``LEFT_OUT``, the one that does not call the collective."""

    number: int
    kind: str
    rank: int
    step: int
    place: str
    collective: str

    def lines(self) -> list[int]:
        """Returns lines of the program that the rank's stack must contain; the last is where it stands."""
        if self.kind == LEFT_OUT:
            return [line_of("step")]
        inner = f"collective {self.collective}" if self.kind in (ALONE, SWALLOWED) else f"kind {self.kind}"
        return [line_of(f"place {self.place}"), line_of(inner)]

    def end(self, pid: int, directory: Path) -> None:
        """Has the rank, whose process is ``pid``, go on."""
        (directory / f"end.{self.number}").touch()
        if self.kind not in BY_COLLECTIVE:
            os.kill(pid, signal.SIGCONT if self.kind == STOP else signal.SIGUSR1)


def line_of(marker: str) -> int:
    """Returns the number of the program's line that ends with this marker."""
    lines = PROGRAM.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {marker}")]
    return number


def seeded_hangs(seed: int, size: int, count: int) -> list[Hang]:
    """Returns ``count`` hangs of a job of ``size`` ranks, by step; each kind comes once before any comes twice."""
    dice = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += dice.sample(KINDS, len(KINDS))
    hangs, step = [], 0
    for number, kind in enumerate(kinds[:count]):
        step += dice.randint(2, 4)  # within backward or after it, the others come to the next step
        # Within backward a collective would wait for the gradients, and they for it.
        places = [place for place in PLACES if place != "backward" or kind not in BY_COLLECTIVE]
        hangs.append(Hang(number, kind, dice.randrange(size), step, dice.choice(places), dice.choice(COLLECTIVES)))
    return hangs


def as_argument(hangs: Sequence[Hang]) -> str:
    return json.dumps([asdict(each) for each in hangs])
