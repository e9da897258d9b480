"""
What a run tells the model of `prediction`: measured in `scale`, kept in its JSON, and read from there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .prediction import Link, Workstep, fit
from .setting import Setting
from .trainings import Parts


@dataclass(frozen=True)
class Calibration:
    """Medians of a run: all-reduces as (bytes, seconds), and the steps of a model."""

    setting: Setting
    model: str
    batch: int
    compression: str
    points: tuple[tuple[int, float], ...]
    parts: Parts
    bucket_bytes: tuple[int, ...]
    measured_step_s: float

    @property
    def ranks(self) -> int:
        """How many the run had."""
        return self.setting.ranks

    @property
    def link(self) -> Link:
        """What explains the all-reduces."""
        return fit(self.points, self.ranks)

    @property
    def workstep(self) -> Workstep:
        """The step as the model wants it."""
        return Workstep(self.parts, self.bucket_bytes)

    def to_json(self) -> dict[str, Any]:
        """For `read_calibration`."""
        return {**asdict(self), "parts": self.parts._asdict()}


def read_calibration(path: Path) -> Calibration:
    """That of a file that ``scale --json`` has written; a UsageError if it is none."""
    try:
        found = json.loads(path.read_text())["calibration"]
        setting = found["setting"]
        calibration = Calibration(
            setting=Setting(int(setting["ranks"]), int(setting["hosts"]), str(setting["wire"])),
            model=str(found["model"]),
            batch=int(found["batch"]),
            compression=str(found["compression"]),
            points=tuple((int(nbytes), float(seconds)) for nbytes, seconds in found["points"]),
            parts=Parts(**{name: float(found["parts"][name]) for name in Parts._fields}),
            bucket_bytes=tuple(int(nbytes) for nbytes in found["bucket_bytes"]),
            measured_step_s=float(found["measured_step_s"]),
        )
    except OSError as error:
        raise UsageError(f"--calibration: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--calibration: {str(path)!r} is not what a whole run of `scale --json` has written ({error!r})"
        ) from None
    if calibration.ranks < 2 or not calibration.points or not calibration.bucket_bytes:
        raise UsageError(f"--calibration: {str(path)!r} was measured on fewer than 2 ranks")
    return calibration
