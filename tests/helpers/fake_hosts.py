"""Runs ranks as threads that take themselves to be on several hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks import run_ranks

from hvdlite.comm.group import Group

# The hosts of the ranks, in their order.
PLACES = {
    "2 hosts": ["a", "b"],
    "3 hosts": ["a", "b", "c"],
    "4 hosts": ["a", "b", "c", "d"],
    "2 hosts of 2": ["a", "a", "b", "b"],
    "3 hosts of 2": ["a", "b", "c", "a", "b", "c"],
    "uneven": ["a", "a", "b"],
}


def on(place: str | list[str], function: Callable[[Group], Any], **options: Any) -> list[Any]:
    """Calls the function on ranks that are on these hosts; returns its results, or raises the first rank's error.

    ``place`` is a key of `PLACES`, or the ranks' hosts. ``options`` are those of `run_ranks`.
    """
    hosts = PLACES[place] if isinstance(place, str) else place

    def rank(group: Group) -> Any:
        group.hosts = tuple(hosts)
        return function(group)

    return run_ranks(len(hosts), rank, **options)
