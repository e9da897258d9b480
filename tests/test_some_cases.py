"""What is left of a test with many cases that is marked slow(but=n) or night(but=n)."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.MARK(but=FEW)
@pytest.mark.parametrize("case", range(9))
def test_many(case):
    print(f"<{case}>")

@pytest.mark.parametrize("case", range(2))
def test_other(case):
    pass
"""


@pytest.mark.parametrize("mark", ["slow", "night"])
@pytest.mark.parametrize(("few", "left"), [(1, "0"), (2, "08"), (3, "048"), (9, "012345678"), (20, "012345678")])
def test_few_cases_are_left_spread_over_all_and_each_test_that_is_not_marked(pytester, few, left, mark):
    pytester.makeini("[pytest]\nmarkers =\n    slow(but=n)\n    night(but=n)")
    pytester.makepyfile(TESTS.replace("FEW", str(few)).replace("MARK", mark))
    arguments = ("-p", "some_cases", "-p", "no:cacheprovider", "-s", "-q", "-m")
    result = pytester.runpytest_inprocess(*arguments, f"not {mark}")
    result.assert_outcomes(passed=len(left) + 2, deselected=9 - len(left))
    assert [each for each in "012345678" if f"<{each}>" in result.stdout.str()] == list(left)
    pytester.runpytest_inprocess(*arguments, f"{mark} or not {mark}").assert_outcomes(passed=11)
