"""`watch_job`: hvdlite-run --watch PID, the live view of a job that runs under another hvdlite-run of this machine.

status.console ── JSON, each two seconds ──► JobView ──► LiveView ──► Footer, on stdout; or plain lines
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

from hvdlite_wire.linux import stat_of

from ..errors import JobEndsError, LauncherError, UsageError
from ..screen.display import Footer, draws_in_place, put_all, terminal_size
from ..status.console import ask_for_view
from ..status.job_view import JobView
from ..status.live_view import EACH_S, LiveView, make_view
from ..system.terminal_text import say, visible, write

# The first answer has no rates yet.
_SOON_S = 0.7
_LINE_EACH_S = 10.0
# Between two attempts of a job that is restarted, its hvdlite-run cannot be asked.
_AGAIN_EACH_S = 0.2


def watch_job(pid: str) -> int:
    """Shows the job of the hvdlite-run with this process number until it ends, or Ctrl-C; returns the exit code.

    Raises a UsageError if there is no such job, and a LauncherError if it does not answer.
    """
    view = make_view(say) if draws_in_place(1) else None
    job = _asked(pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if view is None:
            _tell(pid, job)
        else:
            _draw(pid, job, view)
    except KeyboardInterrupt:
        write(f"no longer watched: the job of hvdlite-run {pid} goes on\n")
        return 0
    write(f"hvdlite-run {pid} has ended\n")
    return 0


def _asked(pid: str) -> JobView:
    try:
        return JobView.from_data(ask_for_view(pid))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise LauncherError(f"--watch: hvdlite-run {pid} is of another version: use its own hvdlite-run") from None


def _asked_again(pid: str) -> JobView | None:
    """Returns the job as it is now, waiting for it while it restarts; None once its hvdlite-run has ended."""
    while True:
        try:
            return _asked(pid)
        except (UsageError, JobEndsError):
            stat = stat_of(pid)
            if stat is None or stat.has_ended:  # one that has ended is there until its parent collects it
                return None
        time.sleep(_AGAIN_EACH_S)


def _tell(pid: str, job: JobView | None) -> None:
    """Writes a line about the job each 10 s until it has ended."""
    while job is not None:
        write(f"{job.plain_line()}\n")
        time.sleep(_LINE_EACH_S - _SOON_S)
        if _asked_again(pid) is None:  # it has the workers asked
            return
        time.sleep(_SOON_S)
        job = _asked_again(pid)


def _draw(pid: str, job: JobView | None, view: LiveView) -> None:
    """Draws the job in place until it has ended. What was drawn last is left on the terminal."""
    sys.stdout.flush()
    footer = Footer(partial(put_all, 1), partial(terminal_size, 1), clock=time.monotonic, redraw_s=0.0)
    # Waited for below, so that the view is drawn anew at once for another size.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    pause_s = _SOON_S
    try:
        while job is not None:
            lines = view.lines(job, *footer.fits())
            footer.draw([visible(line).encode(errors="surrogateescape") for line in lines])
            if signal.sigtimedwait({signal.SIGWINCH}, pause_s) is not None:
                continue
            pause_s = EACH_S
            job = _asked_again(pid)
    finally:
        os.write(1, b"\n")
