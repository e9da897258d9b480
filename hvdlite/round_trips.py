"""
`python -m hvdlite.round_trips`: times round trips between every two hosts; ``hvdlite-run --check`` starts it.

One process runs on each host. Each of them:

    present_ranks ── rounds (who is measured with whom) ── connect_both_ways ── measure ── a line of JSON

Gloo connects each two hosts in one direction only, so a pair first tries a TCP connection in each. Then it measures
gloo's own connections, over which gradients are sent, by all-reduces in a gloo group of two. ``hvdlite-run --check``
reads the lines: ``{"rank": 0, "peer": 1, "us": 140.2}``. Instead of the microseconds there is ``"blocked"``, the reason
why the rank cannot connect to its peer, or another ``"error"``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .comm.gloo import ConnectingRanks, InitTimeout, make_gloo, open_proven
from .comm.gloo_sockets import Connections
from .errors import LaunchEnvironmentError
from .rendezvous.host_address import address_for_others
from .rendezvous.launcher_store import LauncherStore
from .rendezvous.launchers import read_placement
from .rendezvous.rank_info import agree_on_secret, given_secret
from .rendezvous.store_client import StoreClient
from .signing import Signer

_TRY_S, _TRIES = 3.0, 5  # the number of attempts after which gloo gives up connecting
_TCP_S = 5.0  # a lost first packet is sent again after 1 and after 3 s
CONNECT_S = _TCP_S + _TRY_S * _TRIES
_WARM_UPS, _TRIPS = 5, 50
_SLACK_S = 10.0

_NOISE = re.compile(r"^Gloo connectFullMesh failed with | *\[[^]]*(/[^]]*:\d+|none)\] *")


class BlockedError(RuntimeError):
    """``own`` is why this rank cannot connect to its peer; it is empty if only the peer cannot connect to this one."""

    def __init__(self, own: str) -> None:
        super().__init__(own or "the peer cannot connect to this rank")
        self.own = own


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Plans the measurement of every pair, as a round-robin tournament: each rank is in at most one pair per round.

    With an even number of ranks every rank is in one pair of each round.
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def present_ranks(store: Store, rank: int, size: int, timeout_s: float) -> list[int]:
    """Returns the ranks that take part, the same list on every rank; waits for all ranks, at most ``timeout_s``.

    The first rank to stop waiting decides: its list of the ranks that are there counts for all.
    """
    store.set(f"present/{rank}", "")
    everybody = [f"present/{other}" for other in range(size)]
    try:
        store.wait(everybody, timedelta(seconds=timeout_s))
        present = list(range(size))
    except dist.DistStoreError:
        present = [other for other in range(size) if store.check([everybody[other]])]
    agreed: list[int] = json.loads(store.compare_set("roll", "", json.dumps(present)))
    return agreed


def connect_both_ways(store: Store, own: int) -> None:
    """Tries a TCP connection from each of two ranks to the other; both call it, ``own`` is 0 or 1.

    Raises a `BlockedError` on both if it fails in a direction, and a RuntimeError if one of them cannot listen. Nobody
    accepts the connections, and nothing is sent.
    """
    try:
        address = address_for_others()
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        store.set(f"address/{own}", "null")  # or the other one would wait for it until the store's timeout
        raise RuntimeError(f"it cannot listen on an address that other hosts reach: {error}") from error
    with listener:
        store.set(f"address/{own}", json.dumps(listener.getsockname()[:2]))
        of_peer = json.loads(store.get(f"address/{1 - own}"))
        if of_peer is None:
            raise RuntimeError("the other host cannot listen on an address that this one reaches")
        why = ""
        try:
            socket.create_connection(tuple(of_peer), _TCP_S).close()
        except OSError as error:
            why = (error.strerror or "connection timed out").lower()
        store.set(f"blocked/{own}", why)
        why_peer = store.get(f"blocked/{1 - own}").decode()  # until then this rank must listen
    if why or why_peer:
        raise BlockedError(why)


def measure(store: Store, rank: int, peer: int, patience_s: float) -> float:
    """Returns the microseconds of a round trip to ``peer``: the median over small all-reduces. The peer calls it too.

    ``patience_s`` is how long this rank waits for the peer, which may still be measuring with others. Raises a
    RuntimeError that says why the two cannot be connected, or a `BlockedError`.
    """
    pair = sorted((rank, peer))
    shared = PrefixStore(f"pair/{pair[0]}/{pair[1]}", store)
    shared.set(f"here/{rank}", "")
    try:
        shared.wait([f"here/{peer}"], timedelta(seconds=patience_s))
    except dist.DistStoreError:
        raise RuntimeError("one of them did not connect to be measured") from None
    own = pair.index(rank)
    connect_both_ways(shared, own)
    signer = Signer(agree_on_secret(shared, own, given_secret(os.environ)))
    ranks = ConnectingRanks(
        shared, signer, own, tuple(f"rank {each}" for each in pair), InitTimeout(timedelta(seconds=_TRY_S))
    )

    def make(connections: Connections) -> Any:
        return make_gloo(PrefixStore("gloo", shared), own, 2, timedelta(seconds=_TRY_S), connections)

    group, _ = open_proven(make, lambda group: group.shutdown(), ranks, "link")
    number = torch.zeros(1, dtype=torch.float32, device="cpu")
    times_s = []
    for _ in range(_WARM_UPS + _TRIPS):
        begun = time.perf_counter()
        group.allreduce([number]).wait()
        times_s.append(time.perf_counter() - begun)
    return median(times_s[_WARM_UPS:]) * 1e6


def without_noise(words: str) -> str:
    """Returns the first line of an error text of gloo's, without source files and other prefixes."""
    return _NOISE.sub("", words).partition("\n")[0]


def main(roll_call_s: float) -> None:
    placement = read_placement(os.environ)
    if placement is None or placement.store_url is None:
        raise LaunchEnvironmentError("hvdlite.round_trips is a part of `hvdlite-run --check`, which starts it")
    store = LauncherStore(StoreClient.from_url(placement.store_url), timedelta(seconds=roll_call_s))
    present = present_ranks(store, placement.rank, placement.size, roll_call_s)
    plan = rounds(present)
    for pairs in plan:
        for peer in [b if a == placement.rank else a for a, b in pairs if placement.rank in (a, b)]:
            line: dict[str, object] = {"rank": placement.rank, "peer": peer}
            try:
                # The peer may be late: it may have waited in vain for its partner in every round before.
                line["us"] = round(measure(store, placement.rank, peer, len(plan) * CONNECT_S + _SLACK_S), 1)
            except BlockedError as error:
                if not error.own:  # the peer says why
                    continue
                line["blocked"] = error.own
            except RuntimeError as error:
                line["error"] = without_noise(str(error))
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
