"""Marks all cases of a test but n: ``slow(but=n)`` and ``night(but=n)``."""

from __future__ import annotations

import collections

import pytest

_MARKS = ("slow", "night")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes marks with ``but=n`` off n cases of each test, before ``-m`` selects by marks.

    The n are spread evenly over the cases: the first, the last, and others between.
    """
    cases: dict[tuple[str, str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        for name in _MARKS:
            for mark in item.iter_markers(name):
                if "but" in mark.kwargs:
                    cases[item.nodeid.partition("[")[0], name, mark.kwargs["but"]].append(item)
    for (_, name, n), every in cases.items():
        for i in {round(i * (len(every) - 1) / max(1, n - 1)) for i in range(n)}:
            own = every[i].own_markers
            own[:] = [mark for mark in own if mark.name != name or "but" not in mark.kwargs]
