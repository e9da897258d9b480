"""A rank dies: every other one ends by an error that names it, and nobody else.

Each trial, whose number is its seed, has another moment; among 4 of them is each kind of work.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from e2e.victims import kill_one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRIALS = int(os.environ.get("TEST_HVDLITE_DEATHS", "4"))


@pytest.mark.parametrize("check", ["1", "0"])
@pytest.mark.parametrize("shm", ["0", "1"])
@pytest.mark.parametrize("number", range(TRIALS))
def test_every_survivor_names_the_rank_that_died_and_no_other(number: int, shm: str, check: str, tmp_path: Path):
    what, victim, outcomes = kill_one(number, tmp_path, HVDLITE_SHM=shm, HVDLITE_CHECK=check)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        where = f"{what}: rank {rank} ended with {outcome.exit_code}: {outcome.output}"
        assert outcome.exit_code == 1, where
        assert "terminate called" not in outcome.output, where
        assert outcome.told, where
        for told in outcome.told:
            blamed = re.findall(r"(rank \d+ \([^)]*\)|another rank) has (?:gone|ended)", told)
            assert blamed, where
            assert all(words.startswith(f"rank {victim} (") for words in blamed), where
    assert outcomes[victim].exit_code == -signal.SIGKILL
