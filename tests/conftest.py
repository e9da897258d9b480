"""What all tests share: the ranks are threads of this process unless a test says otherwise."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

# PyTorch 2.11 notes every collective in a map of the process that takes no lock, and ranks are threads here.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

import hvdlite as hvd

# Its limit of 200 ms for an example measures how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _leave_no_world_behind() -> Iterator[None]:
    yield
    hvd.shutdown()


def pytest_collection_finish() -> None:
    """What is there by now stays: looking for garbage in all of torch takes a second, in the middle of some test."""
    gc.collect()
    gc.freeze()
