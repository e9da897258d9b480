"""
`python -m hvdlite.links`: times round trips between every two hosts, for ``--check``. One process on each runs it.

    roll call ── rounds of pairs ── a gloo group of two ── all-reduces ── a line of JSON for each pair

Gloo's own data ports are what is measured, and thus the way that gradients take. ``hvdlite-run --check`` starts
this, and reads the lines: ``{"rank": 0, "peer": 1, "us": 140.2}``, or an ``"error"`` instead of the microseconds.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .comm.gloo import ConnectingRanks, InitTimeout, open_proven
from .errors import LaunchEnvironmentError
from .rendezvous.launcher_store import LauncherStore
from .rendezvous.launchers import read_placement
from .rendezvous.rank_info import agree_on_secret
from .rendezvous.secret import given_secret
from .rendezvous.store_client import StoreClient
from .signing import Signer

_TRY_S, _TRIES = 3.0, 5  # gloo gives up connecting after so many
CONNECT_S = _TRY_S * _TRIES
_WARM_UPS, _TRIPS = 5, 50
_SLACK_S = 10.0

_NOISE = re.compile(r"^Gloo connectFullMesh failed with | *\[[^]]*(/[^]]*:\d+|none)\] *")


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, as in a tournament: in a round nobody has two partners, and of an even number all have one."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def call_roll(store: Store, rank: int, size: int, timeout_s: float) -> list[int]:
    """Who takes part: the same on all, those that have come once all have or the first has waited long enough."""
    store.set(f"present/{rank}", "")
    everybody = [f"present/{other}" for other in range(size)]
    try:
        store.wait(everybody, timedelta(seconds=timeout_s))
        present = list(range(size))
    except dist.DistStoreError:
        present = [other for other in range(size) if store.check([everybody[other]])]
    agreed: list[int] = json.loads(store.compare_set("roll", "", json.dumps(present)))
    return agreed


def measure(store: Store, rank: int, peer: int, patience_s: float) -> float:
    """The microseconds of a round trip: of a small all-reduce between two, the median. The peer calls it too.

    ``patience_s`` is how much later than we it may come, being kept by others. An error says why there is no way.
    """
    pair = sorted((rank, peer))
    shared = PrefixStore(f"pair/{pair[0]}/{pair[1]}", store)
    shared.set(f"here/{rank}", "")
    try:
        shared.wait([f"here/{peer}"], timedelta(seconds=patience_s))
    except dist.DistStoreError:
        raise RuntimeError("one of them did not come to be measured") from None
    own = pair.index(rank)
    signer = Signer(agree_on_secret(shared, own, given_secret(os.environ)))
    ranks = ConnectingRanks(
        shared, signer, own, tuple(f"rank {each}" for each in pair), InitTimeout(timedelta(seconds=_TRY_S))
    )

    def make() -> Any:
        return dist.ProcessGroupGloo(PrefixStore("gloo", shared), own, 2, timedelta(seconds=_TRY_S))

    group, _ = open_proven(make, lambda group: group.shutdown(), ranks, "link")
    number = torch.zeros(1)
    times_s = []
    for _ in range(_WARM_UPS + _TRIPS):
        begun = time.perf_counter()
        group.allreduce([number]).wait()
        times_s.append(time.perf_counter() - begun)
    return median(times_s[_WARM_UPS:]) * 1e6


def without_noise(words: str) -> str:
    """What gloo says, without where in its sources it does."""
    return _NOISE.sub("", words).partition("\n")[0]


def main(roll_call_s: float) -> None:
    placement = read_placement(os.environ)
    if placement is None or placement.store_url is None:
        raise LaunchEnvironmentError("hvdlite.links is a part of `hvdlite-run --check`, which starts it")
    store = LauncherStore(StoreClient.from_url(placement.store_url), timedelta(seconds=roll_call_s))
    present = call_roll(store, placement.rank, placement.size, roll_call_s)
    plan = rounds(present)
    for pairs in plan:
        for peer in [b if a == placement.rank else a for a, b in pairs if placement.rank in (a, b)]:
            line: dict[str, object] = {"rank": placement.rank, "peer": peer}
            try:
                # It may have met as many as there are rounds before, each in vain.
                line["us"] = round(measure(store, placement.rank, peer, len(plan) * CONNECT_S + _SLACK_S), 1)
            except RuntimeError as error:
                line["error"] = without_noise(str(error))
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
