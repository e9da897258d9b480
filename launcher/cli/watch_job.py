"""`watch_job`: hvdlite-run --watch PID, the live view of a job that runs under another hvdlite-run of this machine.

report.console ── JSON, each two seconds ──► JobView ──► LiveView ──► Footer, on stdout; or plain lines
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

from ..errors import LauncherError, UsageError
from ..job.footer import Footer
from ..job.job_view import JobView
from ..job.live_view import LiveView
from ..job.screen import draws_in_place, put_all, terminal_size
from ..job.watch import EACH_S
from ..report.console import ask_for_view
from ..system.terminal_text import visible

# The first answer has no rates yet.
_SOON_S = 0.7
_LINE_EACH_S = 10.0


def watch_job(pid: str) -> int:
    """Shows the job of the hvdlite-run with this process number until it ends, or Ctrl-C; returns the exit code.

    Raises a UsageError if there is no such job, and a LauncherError if it does not answer.
    """
    view = LiveView(f"--watch {pid}") if draws_in_place(1) else None
    job = _asked(pid)
    try:
        if view is None:
            _tell(pid, job)
        else:
            _draw(pid, job, view)
    except KeyboardInterrupt:
        return 0
    print(f"hvdlite-run {pid} has ended")
    return 0


def _asked(pid: str) -> JobView:
    try:
        return JobView.from_data(ask_for_view(pid))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise LauncherError(f"--watch: hvdlite-run {pid} is of another version: use its own hvdlite-run") from None


def _tell(pid: str, job: JobView) -> None:
    """Writes a line about the job each 10 s until it has ended."""
    while True:
        print(job.plain_line(), flush=True)
        time.sleep(_LINE_EACH_S - _SOON_S)
        try:
            _asked(pid)  # has the workers asked
            time.sleep(_SOON_S)
            job = _asked(pid)
        except UsageError:
            return


def _draw(pid: str, job: JobView, view: LiveView) -> None:
    """Draws the job in place until it has ended. What was drawn last is left on the terminal."""
    sys.stdout.flush()
    footer = Footer(partial(put_all, 1), partial(terminal_size, 1), clock=time.monotonic, redraw_s=0.0)
    # Waited for below, so that the view is drawn anew at once for another size.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    pause_s = _SOON_S
    try:
        while True:
            lines = view.lines(job, *footer.fits())
            footer.draw([visible(line).encode(errors="surrogateescape") for line in lines])
            if signal.sigtimedwait({signal.SIGWINCH}, pause_s) is not None:
                continue
            pause_s = EACH_S
            try:
                job = _asked(pid)
            except UsageError:
                return
    finally:
        os.write(1, b"\n")
