"""The marker few(n): of a test with many cases, all but n are marked night."""

from __future__ import annotations

import collections

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all cases but n of a test that is marked few(n) as night.

    The n are spread evenly over the cases: the first, the last, and others between. `-m` selects by marks afterwards.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for every in cases.values():
        marker = every[0].get_closest_marker("few")
        assert marker is not None, "as looked for above"
        (n,) = marker.args
        kept = {round(i * (len(every) - 1) / max(1, n - 1)) for i in range(n)}
        for i, item in enumerate(every):
            if i not in kept:
                item.add_marker(pytest.mark.night)
