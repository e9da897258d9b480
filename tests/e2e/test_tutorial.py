"""The tutorial's program, as a reader types it: on two ranks, and again after it was stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_tutorials_program_learns_and_goes_on_after_the_last_epoch_that_was_saved(launch, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)[1])
    first = tmp_path / "first.py"
    first.write_text(program.read_text().replace("range(first_epoch, 10)", "range(first_epoch, 3)"))
    epochs = []
    for each in (first, program):
        code, out, err = launch("-np", "2", "python", str(each), cwd=tmp_path).ended()
        assert code == 0, err
        epochs.append(re.findall(rb"epoch (\d+): ([\d.]+)% right on 2 ranks", out))
    assert [[int(number) for number, _ in each] for each in epochs] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    assert float(epochs[1][-1][1]) > 95
