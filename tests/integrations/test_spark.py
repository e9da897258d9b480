"""`horovod.spark.run` and `HorovodRunner` on a real Spark of one machine; tests/test_spark.py has a stand-in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from e2e.conftest import Launch

PROGRAM = str(Path(__file__).with_name("spark_program.py"))


@pytest.mark.slow
@pytest.mark.night
def test_sparks_tasks_are_ranks_and_errors_are_those_of_the_rank_that_failed_first(tmp_path):
    pytest.importorskip("pyspark")
    env = {"HOME": str(tmp_path), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    job = Launch(tmp_path, (str(tmp_path / "results"),), env, None, cwd=tmp_path, program=(PROGRAM,))
    try:
        code, out, err = job.ended(600)
    finally:
        job.kill_all()
    assert code == 0, (out + err).decode()
    found = torch.load(tmp_path / "results", weights_only=True)
    assert found["ranks"] == [[0, 2, 0, 6.0], [1, 2, 1, 6.0]]
    assert found["later"] == [[0, 2, 0, 3.0], [1, 2, 1, 3.0]]
    assert found["runner"] == found["here"] == [0, 2, 0, 9.0]
    assert "failed on rank 1" in found["raised"]
    assert "ZeroDivisionError: of rank 1" in found["raised"]
    assert "rank 1:\nits process was killed by SIGKILL" in found["died"]
    assert found["too many"].startswith("TimeoutError: spark.run(): Spark has not started 5 tasks at once within 2 s")
