"""Trials drawn from a seed in which one rank of a job is slow: which rank, and by what; and that job's program.

    seeded_trials(seed) ── slow_rank_program.py, with the trials as JSON ── a line for each: who was named, and why

One job goes through all trials one after the other, since importing torch takes longer than a trial.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("slow_rank_program.py")

PHASE_OF = {
    "sleeping data set": "data",
    "spinning forward": "forward",
    "backward hook": "backward",
    "optimizer": "optimizer",
    # As `cpulimit` does it: another process stops the rank for most of the time. Most of its work is in forward.
    "little processor time": "forward",
}
"""The kinds of slowness, and the phase in which each costs most."""


@dataclass(frozen=True)
class Trial:
    kind: str
    rank: int

    @property
    def told(self) -> str:
        """What the program must print at the end of the trial."""
        return f"rank {self.rank} in {PHASE_OF[self.kind]}"


def seeded_trials(seed: int, size: int, count: int) -> list[Trial]:
    """Returns ``count`` trials in a job of ``size`` ranks; each kind comes once before any comes twice."""
    dice = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += dice.sample(list(PHASE_OF), len(PHASE_OF))
    return [Trial(kind, dice.randrange(size)) for kind in kinds[:count]]


def as_argument(trials: Sequence[Trial]) -> str:
    return json.dumps([asdict(each) for each in trials])
