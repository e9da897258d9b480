"""Which hosts do not reach each other, by what their ranks say of their connections.

    ranks' own addresses, and those from which nothing comes ──► silent_between ──► pairs of hosts, and for how long

Each rank under hvdlite-run has the kernel probe its connections to ranks on other hosts (`hvdlite.comm.gloo_sockets`),
which the other kernel answers whatever its processes do. `causes` and `elastic.cut_links` call it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Pair = tuple[str, str]


class Said(NamedTuple):
    """What a rank says: where it is, its own addresses, and for how many seconds nothing has come from others."""

    host: str
    addresses: Collection[str]
    silent_s: Mapping[str, float]


def silent_between(ranks: Iterable[Said], least_s: float) -> dict[Pair, float]:
    """Returns for how long nothing has come to the first host of each pair from the second, if at least ``least_s``.

    Of several connections that counts over which nothing has come for longest. A host whose ranks have not said where
    they are is in no pair.
    """
    ranks = list(ranks)
    host_at = {address: rank.host for rank in ranks for address in rank.addresses}
    found: dict[Pair, float] = {}
    for rank in ranks:
        for address, since_s in rank.silent_s.items():
            other = host_at.get(address, rank.host)
            if since_s >= least_s and other != rank.host:
                found[rank.host, other] = max(since_s, found.get((rank.host, other), 0.0))
    return found


def sentence_about(silent: Mapping[Pair, float], most: int = 3) -> str:
    """Returns which hosts do not reach which, as a sentence about at most so many pairs of them."""
    words: dict[frozenset[str], str] = {}
    for (hears_nothing, other), since_s in sorted(silent.items()):
        one, two = sorted((hears_nothing, other))
        is_mutual = (other, hears_nothing) in silent
        who = f"{one} and {two} do not reach each other" if is_mutual else f"{other} does not reach {hears_nothing}"
        longest_s = max(since_s, silent.get((other, hears_nothing), 0.0))
        words[frozenset((one, two))] = f"{who}: nothing has come over the network between them for {longest_s:.0f} s"
    named = list(words.values())[:most]
    more = f"; and {len(words) - most} more pairs of hosts" if len(words) > most else ""
    return f"{'; '.join(named)}{more}. hvdlite-run reaches these hosts: see hvdlite-run --check"
