"""After shutdown(), a process can be another rank of another world, which meets at another store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys
import torch, hvdlite as hvd

param = torch.nn.Parameter(torch.zeros(2))
told = []
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    hvd.init(timeout_s=400)
    param.data.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)])
    optimizer.zero_grad()
    (param * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    told.append([hvd.rank(), hvd.size(), -param[0].item(), os.environ.get("GLOO_SOCKET_IFNAME")])
    hvd.shutdown()
    told[-1].append(os.environ.get("GLOO_SOCKET_IFNAME"))
print(json.dumps(told), flush=True)
"""


def meet_in(worlds: list[tuple[int, dict[int, int]]]) -> dict[int, Any]:
    """Returns what each process reports of its worlds, given the number of a store and the ranks of each world.

    The stores are served here, as torchrun's agent serves them, on ports that the system chooses.
    """
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=400))
        for _ in range(1 + max(number for number, _ in worlds))
    ]
    variables: dict[int, list[dict[str, str]]] = {}
    for number, ranks in worlds:
        for process, rank in ranks.items():
            variables.setdefault(process, []).append(
                {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "MASTER_PORT": str(stores[number].port)}
            )
    inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    common = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = {
        process: subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(each)],
            env=inherited | common,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process, each in variables.items()
    }
    try:
        outputs = {process: popen.communicate(timeout=500) for process, popen in started.items()}
    finally:
        for popen in started.values():
            popen.kill()
            popen.wait()
    for process, (_, err) in outputs.items():
        assert started[process].returncode == 0, err.decode()
    return {process: json.loads(out) for process, (out, _) in outputs.items()}


@pytest.mark.night
def test_ranks_that_come_go_and_change_meet_in_other_stores_and_again_in_the_first():
    worlds = [(0, {0: 0, 1: 1}), (1, {2: 0, 0: 1, 1: 2}), (2, {2: 0, 1: 1}), (0, {0: 0, 1: 1})]
    told = meet_in(worlds)
    averages = {2: 1.5, 3: 2.0}
    for process, each in told.items():
        own = [(ranks[process], len(ranks)) for _, ranks in worlds if process in ranks]
        # All ranks are on one host, and gloo listens on its loopback interface while they are in such a world.
        assert each == [[rank, size, averages[size], "lo", None] for rank, size in own]
