"""A rank dies: every other one ends by an error that names it, and nobody else.

Each trial, whose number is its seed, has another moment; among 4 of them is each kind of work, and among those that are
made unless TEST_HVDLITE_LONG=1 also each way to communicate with and without the check.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from e2e.victims import kill_one
from long_run import chosen

pytestmark = pytest.mark.slow

EVERY = [(number, shm, check) for number in range(4) for shm in ("0", "1") for check in ("0", "1")]
# Two threads at once, the last kind of work, works only with the check.
FEW = [(0, "0", "1"), (1, "1", "0"), (2, "0", "0"), (3, "1", "1")]


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("number", "shm", "check"), chosen(EVERY, FEW))
def test_every_survivor_names_the_rank_that_died_and_no_other(
    number: int, shm: str, check: str, tmp_path: Path, rank_server
):
    what, victim, outcomes = kill_one(rank_server.python(), number, tmp_path, HVDLITE_SHM=shm, HVDLITE_CHECK=check)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        where = f"{what}: rank {rank} ended with {outcome.exit_code}: {outcome.output}"
        assert outcome.exit_code == 1, where
        assert "terminate called" not in outcome.output, where
        assert outcome.told, where
        for told in outcome.told:
            blamed = re.findall(r"(rank \d+ \([^)]*\)|another rank) has (?:ended|crashed or was killed)", told)
            assert blamed, where
            assert all(words.startswith(f"rank {victim} (") for words in blamed), where
    assert outcomes[victim].exit_code == -signal.SIGKILL
