"""What all tests share: the ranks are threads of this process unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hvdlite as hvd


@pytest.fixture(autouse=True)
def _leave_no_world_behind() -> Iterator[None]:
    yield
    hvd.shutdown()
