"""Makes screens on descriptors of a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from hvdlite_launcher.protocol.messages import Event, Output
from hvdlite_launcher.screen.display import Display
from hvdlite_launcher.screen.job_screen import Screen, post_failures


def screen_on(
    stdout: int,
    stderr: int,
    events: SimpleQueue[Event],
    shown: Callable[[Output], object] = bool,
    *,
    environ: Mapping[str, str] = os.environ,
    redraw_s: float = 0.05,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Screen:
    """Returns a screen that writes to these descriptors; ``options`` are those of `Screen`."""
    failed = post_failures(events)
    display = Display(failed, stdout=stdout, stderr=stderr, environ=environ, redraw_s=redraw_s, clock=clock)
    return Screen(events, shown, display=display, **options)
