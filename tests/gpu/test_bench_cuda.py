"""`python -m hvdlite.bench … --device cuda`, at the smallest sizes, with a rank for each GPU. Needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def bench(tmp_path: Path, *words: str) -> dict[str, object]:
    """Returns what a command writes as JSON."""
    ranks = min(2, torch.cuda.device_count())
    launcher = [sys.executable, "-m", "hvdlite_launcher", "-np", str(ranks), sys.executable]
    argv = [*launcher, "-m", "hvdlite.bench", *words, "--device", "cuda", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["device"], found["ranks"], found["complete"]) == ("cuda", ranks, True)
    return found


def test_allreduce_is_beside_nccl_and_a_copy_on_the_gpu(tmp_path):
    rows = bench(tmp_path, "allreduce", "--sizes", "64,1M", "--dtypes", "float32,bfloat16", "--rounds", "2")["rows"]
    assert {"hvdlite", "nccl", "copy"} <= {row["what"] for row in rows}


def test_step_takes_turns_on_the_gpu(tmp_path):
    rows = bench(tmp_path, "step", "--models", "gpt,resnet-small", "--steps", "2")["rows"]
    assert {"none", "ddp", "ddp-fp16", "hvdlite", "hvdlite-fp16"} <= {row["variant"] for row in rows}


def test_memory_is_what_the_allocator_gave_out(tmp_path):
    rows = bench(tmp_path, "memory", "--variants", "none,ddp-view,hvdlite", "--rounds", "1")["rows"]
    in_models = {row["variant"]: row["in_models"] for row in rows}
    assert 0.98 < in_models["none"] < 1.2
    assert in_models["ddp-view"] < 2.2
    assert in_models["hvdlite"] < 2.2


def test_more_ranks_than_gpus_are_told(tmp_path):
    ranks = str(torch.cuda.device_count() + 1)
    argv = [sys.executable, "-m", "hvdlite_launcher", "-np", ranks, sys.executable, "-m", "hvdlite.bench", "allreduce"]
    done = subprocess.run([*argv, "--device", "cuda"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "has no GPU of its own" in done.stderr
    assert "Traceback" not in done.stderr
