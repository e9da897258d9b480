"""Of a test with many cases that is marked night(but=n), n are not marked."""

from __future__ import annotations

import collections

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes the mark night(but=n) off n cases of a test, before ``-m`` selects by marks.

    The n are spread evenly over the cases: the first, the last, and others between.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if _number_of(item) is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for every in cases.values():
        n = _number_of(every[0])
        assert n is not None, "it is marked so"
        for i in {round(i * (len(every) - 1) / max(1, n - 1)) for i in range(n)}:
            item = every[i]
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "night"]


def _number_of(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("night")
    return None if mark is None else mark.kwargs.get("but")
