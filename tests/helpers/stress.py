"""`--stress N`: runs each chosen test N times, beside two processes that keep processors busy.

A test that waits, kills or connects, and that passes so, hardly depends on the order in which processes are run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

_BUSY_PROCESSES = 2
# It ends when this process has, in whatever way.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", type=int, metavar="N", help="run each test N times, beside two busy processes")


@pytest.fixture
def stress_round(request: pytest.FixtureRequest) -> int:
    """The number of this run of the test."""
    number: int = request.param
    return number


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes N cases of each test; the case is the last part of its id."""
    times = metafunc.config.getoption("stress")
    if times is not None:
        if times < 1:
            raise pytest.UsageError(f"--stress {times}: at least one run")
        metafunc.fixturenames.append("stress_round")
        metafunc.parametrize("stress_round", range(times), indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """Keeps the busy processes while tests run. With pytest-xdist, its controller has them for all."""
    config = session.config
    busy = config.getoption("stress") is not None and not hasattr(config, "workerinput")
    started = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(_BUSY_PROCESSES if busy else 0)]
    try:
        return (yield)
    finally:
        for process in started:
            process.kill()
            process.wait()
