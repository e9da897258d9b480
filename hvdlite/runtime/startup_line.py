"""
Makes the line that rank 0 logs at start: the ranks, their hosts, and how tensors are sent between them.

    4 ranks on 2 hosts (2 + 2); CPU tensors: shared memory within hosts, gloo (eth0) between; OMP threads 1; check on

`make_world` calls `log_startup` on rank 0 once the engines have been chosen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Hashable, Sequence

import torch

from ..comm.engine import Engine
from ..environment import Environment
from ..log import log


def log_startup(engine: Engine, nodes: Sequence[Hashable], environment: Environment) -> None:
    """Logs the line. With HVDLITE_VERBOSE, also prints it to stderr unless the log shows it there.

    ``nodes`` has a value for each rank, equal for ranks of one host.
    """
    line = describe_start(engine, nodes, environment)
    log.info("%s", line)
    if environment.verbose and (environment.log_level is None or environment.log_level > logging.INFO):
        print(f"hvdlite: {line}", file=sys.stderr, flush=True)


def describe_start(engine: Engine, nodes: Sequence[Hashable], environment: Environment) -> str:
    counts = list(Counter(nodes).values())
    parts = [f"{_counted(len(nodes), 'rank')} on {_counted(len(counts), 'host')}"]
    if len(counts) > 1:
        parts[0] += f" ({' + '.join(map(str, counts))})"
    if len(nodes) > 1:
        parts.append(f"CPU tensors: {_way_of_cpu(engine, counts, environment)}")
        if torch.cuda.is_available():
            parts.append(f"CUDA tensors: {_way_of_cuda(engine)}")
    parts.append(f"OMP threads {torch.get_num_threads()}")
    if len(nodes) > 1:
        parts.append(f"check {'on' if environment.check else 'off'}")
    return "; ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _way_of_cpu(engine: Engine, counts: Sequence[int], environment: Environment) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    gloo = f"gloo ({interface})" if interface else "gloo"
    first, *between = (gloo if each == "gloo" else each for each in engine.ways["cpu"])
    if between:
        return f"{first} within hosts, {between[0]} between"
    if first != gloo:
        return first
    if max(counts) == 1:
        return gloo
    if not environment.shm:
        why = "HVDLITE_SHM=0"
    elif len(set(counts)) > 1:
        why = "hosts have different numbers of ranks"
    elif len(counts) > 1 and environment.hierarchical is False:
        why = "hierarchical all-reduces are turned off"
    else:
        why = "there is too little shared memory"
    return f"{gloo}, not shared memory: {why}"


def _way_of_cuda(engine: Engine) -> str:
    *_, name = ways = engine.ways["cuda"]
    levels = ", within hosts and then between" if len(ways) > 1 else ""
    if name != "nccl":
        return name + levels
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no types for it
    return f"NCCL {'.'.join(map(str, version[:3]))}{levels}"
