"""Failed tests are run once more, alone, at most three of them; and tests are run many times beside busy processes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import second_try

pytest_plugins = ["pytester"]

# A test that fails in its first run only, and one that fails in each.
TESTS = """
import os, pathlib, pytest

def once(name):
    mark = pathlib.Path("{directory}") / name
    if not mark.exists():
        mark.touch()
        raise ValueError(f"first time of {{name}}\\nand more")

@pytest.mark.parametrize("case", {cases})
def test_case(case):
    assert "always" not in case, "as ever"
    if "skips" in case and (pathlib.Path("{directory}") / case).exists():
        pytest.skip("not now")
    if "fails" in case:
        once(case)

@pytest.fixture
def broken():
    yield
    once("teardown")

{more}
"""
WITH_TEARDOWN = """
def test_teardown(broken):
    pass
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch):
    """Has the processes of pytest start without what they do not need; they find our plugins by PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(Path(second_try.__file__).parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def run(pytester, tmp_path, monkeypatch):
    """Provides ``run("fails-a", "b")``: runs a test with these cases, and returns the result and what was noted."""
    file = tmp_path / "failed"
    monkeypatch.setenv(second_try.VARIABLE, str(file))

    def start(*cases, more="", options=()):
        pytester.makepyfile(test_it=TESTS.format(directory=tmp_path, cases=list(cases), more=more))
        result = pytester.runpytest_subprocess("-p", "second_try", "-p", "no:cacheprovider", "-rs", *options)
        return result, file.read_text() if file.exists() else ""

    return start


def flaky(text):
    return re.findall("^FLAKY: .*", text, re.MULTILINE)


BY_XDIST = ("-p", "xdist.plugin", "-n", "1")


@pytest.mark.parametrize("options", [(), BY_XDIST], ids=["", "xdist"])
def test_tests_that_pass_alone_fail_nothing_and_are_named_with_the_cause_of_their_first_failure(run, options):
    result, noted = run("fails-a", "b", "fails-c", more=WITH_TEARDOWN, options=options)
    assert result.ret == 0
    named = [("test_case[fails-a]", "fails-a"), ("test_case[fails-c]", "fails-c"), ("test_teardown", "teardown")]
    lines = [f"FLAKY: test_it.py::{test} (ValueError: first time of {what})" for test, what in named]
    assert result.outlines[-3:] == lines == flaky(noted)
    assert result.stdout.str().count("once more, alone") == 3


def test_a_test_that_fails_again_fails_the_run_and_one_beside_it_is_named_all_the_same(run):
    result, noted = run("fails-a", "always")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = flaky(noted)
    assert "[fails-a]" in line
    assert result.stdout.str().count("once more, alone") == 2


@pytest.mark.parametrize("options", [(), BY_XDIST], ids=["", "xdist"])
def test_a_fourth_failure_ends_the_run_at_once_and_nothing_is_run_again(run, options):
    later = [f"later-{i}" for i in range(9)]
    result, noted = run("fails-a", "fails-b", "fails-c", "fails-d", *later, options=options)
    assert result.ret != 0
    assert "more than 3 tests failed" in result.stdout.str()
    assert "once more, alone" not in result.stdout.str()
    assert noted.count("FAILED: ") == 4
    # A worker of xdist has one or two at hand.
    assert result.parseoutcomes().get("passed", 0) < 4


def test_runs_that_note_in_the_same_file_have_three_failures_between_them(run):
    result, _ = run("fails-a", "fails-b")
    assert result.ret == 0
    result, noted = run("fails-c", "fails-d", "e", "f", "g", "h", "i")
    assert result.ret != 0
    assert len(flaky(noted)) == 2
    result, _ = run("passes", "e", "f", "g", "h", "i")
    assert result.ret != 0, "one that runs beside others stops with them"


def test_a_second_try_that_is_skipped_has_not_passed(run):
    result, noted = run("fails-skips")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert flaky(noted) == []


def test_without_the_variable_a_failure_is_a_failure(run, monkeypatch):
    monkeypatch.delenv(second_try.VARIABLE)
    result, noted = run("fails-a")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert noted == ""


@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["", "xdist"])
def test_stress_runs_each_test_so_many_times_beside_two_busy_processes(pytester, options):
    pytester.makepyfile("""
        import os, psutil, pytest

        def words(process):
            try:
                return process.cmdline()
            except psutil.Error:  # it has just ended
                return []

        @pytest.fixture
        def busy():
            own = psutil.Process()
            every = [*own.children(), *own.parent().children()]
            return sum("getppid" in " ".join(words(each)) for each in every)

        def test_plain(busy):
            assert busy == 2

        @pytest.mark.parametrize("case", "ab")
        def test_cases(case, request):
            assert not request.node.name.endswith("b-1]")
    """)
    result = pytester.runpytest_subprocess("-p", "stress", "--stress", "3", *options)
    result.assert_outcomes(passed=8, failed=1)
    assert not [each for each in psutil.process_iter() if _is_busy_in(each, str(pytester.path))]


def _is_busy_in(process: psutil.Process, directory: str) -> bool:
    try:
        return "getppid" in " ".join(process.cmdline()) and process.cwd() == directory
    except psutil.Error:  # it has ended, or is another user's
        return False


def test_stress_with_no_run_at_all_is_a_usage_error(pytester):
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_subprocess("-p", "stress", "--stress", "0")
    assert result.ret != 0
    assert "--stress 0: at least one run" in result.stdout.str() + result.stderr.str()
