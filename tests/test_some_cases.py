"""What is left of a test with many cases that is marked slow(but=n) or night(but=n), or is run with --cases."""

from __future__ import annotations

import re

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


PRODUCT = """
import pytest

@pytest.mark.slow(but=FEW)
@pytest.mark.parametrize("c", "pqr")
@pytest.mark.parametrize(("a", "b"), [(1, "x"), (1, "y"), (2, "x"), (2, "y")])
def test_many(a, b, c):
    print(f"<{a}{b}{c}>")
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


def test_those_that_are_left_have_each_value_of_each_parameter_and_then_most_pairs_of_values(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    slow(but=n)")

    def left(few: int) -> set[str]:
        pytester.makepyfile(PRODUCT.replace("FEW", str(few)))
        arguments = ("-p", "some_cases", "-p", "no:cacheprovider", "-s", "-q", "-m", "not slow")
        return set(re.findall(r"<(...)>", pytester.runpytest_inprocess(*arguments).stdout.str()))

    few, more = left(3), left(6)
    assert [set(values) for values in zip(*few, strict=True)] == [set("12"), set("xy"), set("pqr")]
    assert few < more
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len({(each[one], each[other]) for each in more}) >= 4


def test_cases_limits_each_test_to_some_of_the_cases_that_are_selected_otherwise(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    slow(but=n)")
    pytester.makepyfile(TESTS.replace("FEW", "3").replace("MARK", "slow"))
    arguments = ("-p", "some_cases", "-p", "no:cacheprovider", "-s", "-q", "-m", "not slow", "--cases")
    result = pytester.runpytest_inprocess(*arguments, "2")
    result.assert_outcomes(passed=4, deselected=7)
    assert re.findall(r"<(.)>", result.stdout.str()) == ["0", "8"]
    pytester.runpytest_inprocess(*arguments, "9").assert_outcomes(passed=5, deselected=6)
    assert "--cases 0: at least one case" in pytester.runpytest_inprocess(*arguments, "0").stderr.str()
