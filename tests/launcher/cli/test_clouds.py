"""The files in examples/clouds: what they have every node run starts one job on all nodes, from the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[3] / "examples"
NODES = ("10.0.0.4", "10.0.0.5")


def run_of(name: str) -> str:
    task = yaml.safe_load((EXAMPLES / "clouds" / name).read_text())
    if name == "dstack.yaml":
        assert (task["type"], task["nodes"]) == ("task", 2)
        script: str = task["commands"][-1]
    else:
        assert task["num_nodes"] == 2
        script = task["run"]
    return script


def variables(name: str, rank: int, tmp_path: Path) -> dict[str, str]:
    """Those that the scheduler sets on a node."""
    if name == "dstack.yaml":
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("".join(f"{node} slots=4\n" for node in NODES))
        return {"DSTACK_NODE_RANK": str(rank), "DSTACK_MPI_HOSTFILE": str(hostfile)}
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(NODES),
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    }


@pytest.mark.parametrize("name", ["dstack.yaml", "skypilot.yaml"])
def test_the_first_node_starts_a_worker_for_each_gpu_of_all_nodes_and_the_others_start_nothing(name, tmp_path):
    starter = tmp_path / "hvdlite-run"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdlite_launcher --dry-run "$@"\n')
    starter.chmod(0o755)
    # What the other nodes do until the first has ended.
    (tmp_path / "sleep").write_text("#!/bin/sh\necho slept\n")
    (tmp_path / "sleep").chmod(0o755)
    plans = []
    for rank in range(2):
        env = {**os.environ, **variables(name, rank, tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = ["sh", "-c", run_of(name)]
        done = subprocess.run(
            words, env=env, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True, timeout=60
        )
        plans.append(done.stdout)
    assert all(node in plans[0] for node in NODES)
    assert "rank 7" in plans[0]
    assert "rank 8" not in plans[0]
    assert "python examples/digits.py" in plans[0]
    assert plans[1] in ("", "slept\n")
