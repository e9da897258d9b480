"""Accelerate and the Trainer of Hugging Face's transformers on the ranks that `hvd.init` has connected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("huggingface_programs.py"))


def assert_trained(ranks):
    for rank in ranks:
        assert rank["sum"] == 2
        for mine, alone in zip(rank["weights"], rank["alone"], strict=True):
            torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-6)


def test_accelerate_trains_the_weights_of_one_process_over_hvdlites_shared_memory(ranks_results):
    pytest.importorskip("accelerate")
    env = {"ACCELERATE_USE_CPU": "1"}
    ranks, _ = ranks_results("-np", "2", sys.executable, PROGRAM, "accelerate", env=env)
    assert_trained(ranks)
    for rank in ranks:
        assert (rank["buckets"], rank["gathered"]) == ({"cpu:hvdshm"}, [0, 1])


def test_the_trainer_of_transformers_trains_the_weights_of_one_process(ranks_results):
    pytest.importorskip("transformers")
    ranks, _ = ranks_results("-np", "2", sys.executable, PROGRAM, "trainer")
    assert_trained(ranks)
    for number, rank in enumerate(ranks):
        assert (rank["place"], rank["steps"]) == ((number, 2, number), 4)
