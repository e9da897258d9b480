"""
Takes a few of the cases of a test that has many.

``slow(but=n)`` and ``night(but=n)`` mark all cases but n; ``--cases N`` runs at most N of those that are chosen.
"""

from __future__ import annotations

import collections
import itertools

import pytest

_MARKS = ("slow", "night")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, metavar="N", help="run at most N cases of each test that has more")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes marks with ``but=n`` off n cases of each test, before ``-m`` selects by marks."""
    cases: dict[tuple[str, str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        for name in _MARKS:
            for mark in item.iter_markers(name):
                if "but" in mark.kwargs:
                    cases[item.nodeid.partition("[")[0], name, mark.kwargs["but"]].append(item)
    for (_, name, n), every in cases.items():
        for item in _chosen(every, n):
            own = item.own_markers
            own[:] = [mark for mark in own if mark.name != name or "but" not in mark.kwargs]


class FewCases:
    """The plugin that ``--cases`` registers: it deselects further cases after ``-m`` and ``-k`` have selected."""

    def __init__(self, cases: int) -> None:
        self._cases = cases

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        of_tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
        for item in items:
            of_tests[item.nodeid.partition("[")[0]].append(item)
        kept = {item for every in of_tests.values() for item in _chosen(every, self._cases)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_configure(config: pytest.Config) -> None:
    cases = config.getoption("cases")
    if cases is not None:
        if cases < 1:
            raise pytest.UsageError(f"--cases {cases}: at least one case of each test")
        config.pluginmanager.register(FewCases(cases))


def _chosen(every: list[pytest.Item], n: int) -> list[pytest.Item]:
    """Returns n cases that have most values of the parameters, and then most pairs of values, between them.

    Of cases that are equal in this, those are taken that are spread evenly. The n are among any greater number of them.
    """
    left = _spread(every)
    traits = {item: _traits(item) for item in left}
    seen: set[tuple[str, ...]] = set()
    taken = []
    for _ in range(min(n, len(every))):
        best = max(left, key=lambda item: [len(kind - seen) for kind in traits[item]])
        left.remove(best)
        taken.append(best)
        seen.update(*traits[best])
    return taken


def _traits(item: pytest.Item) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Returns a case's values of parameters, and its pairs of these."""
    callspec = getattr(item, "callspec", None)
    values = [f"{name}={value!r}" for name, value in callspec.params.items()] if callspec else []
    return {(value,) for value in values}, set(itertools.combinations(values, 2))


def _spread(every: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases in an order whose beginnings are spread evenly: the first, the last, the middle one, ..."""
    last = len(every) - 1
    places = dict.fromkeys([0, last])
    parts = 2
    while len(places) < len(every):
        places.update(dict.fromkeys(round(i * last / parts) for i in range(1, parts)))
        parts *= 2
    return [every[place] for place in places]
