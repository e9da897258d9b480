"""What all tests share: the ranks are threads of this process unless a test says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# PyTorch 2.11 notes every collective in a map of the process that takes no lock, and ranks are threads here.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

import hvdlite as hvd


@pytest.fixture(autouse=True)
def _leave_no_world_behind() -> Iterator[None]:
    yield
    hvd.shutdown()
