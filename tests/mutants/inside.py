"""A plugin for the pytest of a trial: ends it unless it would import both packages from the trial's tree."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

VARIABLE = "TEST_HVDLITE_MUTANT"
"""Names the trial's tree."""

WRONG_PACKAGE = 70
"""The exit code of a run that would test other packages."""


def pytest_configure() -> None:
    if (why := other_package(Path(os.environ[VARIABLE]))) is not None:
        pytest.exit(why, WRONG_PACKAGE)


def other_package(tree: Path) -> str | None:
    """Returns which package is imported from elsewhere than ``tree``, in words; None if both are there."""
    for name in ("hvdlite", "hvdlite_launcher"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(tree.resolve()):
            return f"{name} is {'nowhere' if spec is None else spec.origin}, and not in {tree}"
    return None
