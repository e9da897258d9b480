"""Fixtures that start programs as users do, and read what their ranks have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.conftest import Launch, launch

__all__ = ["launch"]

RanksResults = Callable[..., tuple[list[Any], str]]


@pytest.fixture
def ranks_results(launch: Callable[..., Launch], tmp_path: Path) -> RanksResults:
    """Provides a function that runs a command to its end, with a path RESULTS as its last argument.

    It returns what each of ``size`` ranks has written to RESULTS.RANK, and what was printed to stderr.
    """

    def results(*arguments: str, size: int = 2, **options: Any) -> tuple[list[Any], str]:
        code, out, err = launch(*arguments, str(tmp_path / "results"), cwd=tmp_path, **options).ended()
        assert code == 0, (out + err).decode()
        return [torch.load(tmp_path / f"results.{rank}", weights_only=True) for rank in range(size)], err.decode()

    return results
