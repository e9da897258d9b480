"""Runs failed tests once more, alone, and says which of them passed then: for .ci/run.

    a test fails ──► one line in the file that TEST_HVDLITE_FAILED names
    the end      ──► each failed test in a process of its own ── passes ──► FLAKY: test (its first failure's cause)

Runs that are given the same file have three such tests between them: with a fourth failure, each of them stops at its
next result. Without that variable nothing is run twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

VARIABLE = "TEST_HVDLITE_FAILED"
MOST = 3


def pytest_configure(config: pytest.Config) -> None:
    """Starts to note failures, but not in a worker process of pytest-xdist: results come to its controller."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(config, Path(os.environ[VARIABLE])))


class SecondTry:
    """The failed tests of this run, by their ids, each with the cause of its first failure."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config = config
        self._file = file
        self._causes: dict[str, str] = {}
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure. Stops this run if there are more than are tried again, here and in runs beside it."""
        if report.failed and report.nodeid not in self._causes:
            self._causes[report.nodeid] = _cause(report)
            self._note(f"FAILED: {report.nodeid}")
        if self._count() > MOST:
            # pytest-xdist has a loop of its own, which looks at its own attribute.
            loop = self._config.pluginmanager.getplugin("dsession") or self._session
            loop.shouldstop = f"more than {MOST} tests failed: none is run once more"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Runs the failed tests once more, after the report of their failures. The run passes if all of them do."""
        yield
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._causes:
            return
        passed = [nodeid for nodeid in self._causes if self._passes(nodeid)]
        for nodeid in passed:
            line = f"FLAKY: {nodeid} ({self._causes[nodeid]})"
            self._note(line)
            print(line, flush=True)
        if len(passed) == len(self._causes):
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, nodeid: str) -> bool:
        print(f"\n{nodeid} once more, alone:", flush=True)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        with tempfile.NamedTemporaryFile(suffix=".xml") as results:
            command = [sys.executable, "-m", "pytest", nodeid, f"--junitxml={results.name}"]
            code = subprocess.run(command, cwd=self._config.rootpath, env=environment, check=False).returncode
            # What is skipped has not passed.
            return code == 0 and ElementTree.parse(results.name).find(".//skipped") is None

    def _note(self, line: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _count(self) -> int:
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return 0
        return sum(line.startswith("FAILED: ") for line in lines)


def _cause(report: pytest.TestReport) -> str:
    """Returns the first line of what a test raised, or the last line that is known of its failure."""
    failure: Any = report.longrepr
    crash = getattr(failure, "reprcrash", None)
    if crash is not None and crash.message.strip():
        return str(crash.message).strip().splitlines()[0]
    lines = str(failure).strip().splitlines()
    return lines[-1] if lines else "no cause is known"
