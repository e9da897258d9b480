"""The list of faults fits the code, and tests find each of them."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter

import pytest

from mutants.faults import MUTANTS
from mutants.inside import other_package
from mutants.trial import ROOT, Mutant, TrialError, try_out

by_name = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])


@functools.cache
def functions_of(file: str) -> dict[str, str]:
    """Returns the decorators of each function of a test file, as text, by its name."""
    functions = [each for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)]
    return {each.name: " ".join(map(ast.unparse, each.decorator_list)) for each in functions}


@by_name
def test_each_fault_has_its_place_and_is_python(mutant):
    assert mutant.old.split() != mutant.new.split()
    ast.parse(mutant.applied_to((ROOT / mutant.file).read_text()))


@by_name
def test_the_tests_that_find_it_are_there_and_fast(mutant):
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name in functions_of(file), f"{test} is not there"
        # Some cases of slow(but=n) are fast.
        assert not re.search(r"mark\.slow(?!\(but=)", functions_of(file)[name]), f"{test} is slow"


def test_there_are_some_in_each_part():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    parts = Counter(
        mutant.file.partition("/")[0 if mutant.file.startswith("launcher") else 2].split("/")[0] for mutant in MUTANTS
    )
    of_gradients = sum(parts.pop(part, 0) for part in ("buckets", "exchanges", "steps", "optim"))
    of_calls = sum(parts.pop(part, 0) for part in ("calls", "coordinator", "control"))
    assert all(count >= 7 for count in [of_gradients, of_calls, *parts.values()]), parts
    assert parts.keys() == {"shm", "runtime", "launcher"}
    assert len(MUTANTS) >= 40


@pytest.mark.parametrize("times", [0, 2])
def test_a_fault_whose_place_is_not_there_once_is_named(times):
    gone = Mutant("a wait is missing", "hvdlite/log.py", "wait()", "pass", ())
    with pytest.raises(TrialError, match=f"'a wait is missing': hvdlite/log.py has its old text {times} times"):
        gone.applied_to("work.wait()\n" * times)


def test_a_package_from_elsewhere_is_named(tmp_path):
    assert other_package(ROOT) is None
    assert str(other_package(tmp_path)).startswith("hvdlite is ")


@pytest.mark.slow
@pytest.mark.night(but=1)
@by_name
def test_fast_tests_find_it(mutant, tmp_path):
    verdict = try_out(mutant, mutant.tests, tmp_path)
    assert verdict.failed is not None, f"no test finds {mutant.name!r} in {mutant.file}:\n{verdict.output}"


@pytest.mark.slow
@pytest.mark.night
def test_without_a_fault_the_same_tests_pass(tmp_path):
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests})
    verdict = try_out(None, tests, tmp_path)
    assert verdict.failed is None, verdict.output
