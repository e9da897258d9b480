"""Settings and fixtures for all tests.

With `-n auto`, pytest-xdist uses one process more than there are cores, because tests that start whole jobs wait for
most of their time.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import copied_ranks
import golden
import hypothesis
import pytest
import second_try
import some_cases
import stress

# Turns off PyTorch's flight recorder. In 2.11 it notes every collective in a map without a lock, which is unsafe here,
# because ranks are threads.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

# With pytest-xdist, all tests of such a file run one after the other in one process.
ONE_AFTER_THE_OTHER = {
    "tests/compression/test_codec_kernels.py",  # each process compiles the kernels that its tests run
    "tests/compression/test_kernels.py",
    "tests/e2e/test_faults.py",  # each test runs several jobs at once, and all must be gone within seconds
    "tests/e2e/test_whole_jobs.py",  # one process starts the server of ranks
    "tests/e2e/test_other_launchers.py",  # it starts Slurm's daemons and their network once
    "tests/integrations/test_lightning.py",  # as the next two
    "tests/integrations/test_ray.py",
    "tests/migration/test_calls.py",  # its tests read the results of the same jobs
    "tests/test_assertions.py",  # each process parses both packages
    "tests/test_bounds.py",
    "tests/test_layers.py",
}

# Without hypothesis's limit of 200 ms per example, which a busy machine exceeds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _leave_no_world_behind() -> Iterator[None]:
    yield
    # Not imported here: pytest-xdist's main process, and tests of the launcher, need no torch.
    if "hvdlite" in sys.modules:
        sys.modules["hvdlite"].shutdown()


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Registers the plugins that are modules of tests/helpers."""
    for plugin in (copied_ranks, golden, some_cases, second_try, stress):
        pluginmanager.register(plugin)


def pytest_configure(config: pytest.Config) -> None:
    """Shortens the paths of temporary directories: a Unix socket's path has at most 107 bytes."""
    if hasattr(config, "workerinput"):
        base = Path(config.option.basetemp)
        config.option.basetemp = str(base.with_name(base.name.removeprefix("popen-gw")))


class RotatedDir(pytest.Dir):
    """A folder whose entries are collected in another order in each of pytest-xdist's processes.

    Most of the time to collect a new checkout goes into pytest's rewriting of assertions, which it caches by file. In
    the same order, all processes would rewrite the same file at the same time.
    """

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        entries = list(super().collect())
        worker = self.config.workerinput
        first = len(entries) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        return entries[first:] + entries[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    return RotatedDir.from_parent(parent, path=path) if hasattr(parent.config, "workerinput") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Brings all of pytest-xdist's processes to one order again."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of processes for `-n auto`."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes a scheduler that gives each test to an idle process, but a file of ONE_AFTER_THE_OTHER to one process."""
    if config.getvalue("dist") != "load":
        return None
    gone = [file for file in ONE_AFTER_THE_OTHER if not (config.rootpath / file).is_file()]
    assert not gone, f"ONE_AFTER_THE_OTHER in tests/conftest.py names files that are not there: {gone}"
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  # it may not be installed

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in ONE_AFTER_THE_OTHER else nodeid

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Excludes all that exists then from garbage collection: with torch's objects, each collection takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
