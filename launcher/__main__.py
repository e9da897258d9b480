"""Starts hvdlite-run, also as `python -m hvdlite_launcher`: handles signals first, and then imports the rest.

While a job runs, `job.launch` handles the signals. Before and after, SIGINT, SIGTERM and SIGHUP end this process at
once with one line, as there is nothing to clean up. Until `_take_signals` has been called, Ctrl-C shows a traceback of
Python. So this module imports nothing that takes time, not even `signal` or `threading`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` without its enums, which take a while
import _thread
import os
import sys

from .errors import in_words

_NAMES = {_signal.SIGINT: "SIGINT", _signal.SIGTERM: "SIGTERM", _signal.SIGHUP: "SIGHUP"}
_said = _thread.allocate_lock()


def main() -> int:
    """Runs hvdlite-run and returns its exit code."""
    try:
        _open_standard_streams()  # before anything else opens a file
        _take_signals()
        from .cli.hvdlite_run import main as run  # noqa: PLC0415  # see above

        return run()
    except (OSError, ImportError, RuntimeError, MemoryError) as error:
        if (why := in_words(error)) is None:
            raise
        os.write(2, f"hvdlite-run: {why}\n".encode(errors="backslashreplace"))
        # Ends at once: where no file can be opened, the regular end of threads aborts the process.
        os._exit(1)


def _open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that the caller closed (``2>&-``), so that no pipe gets its number.

    Programs that this process starts have them, too, and so do what Python knows of these streams.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _take_signals() -> None:
    """Handles these signals by `_end` from now on, except those that are ignored, as under nohup."""
    for signum in _NAMES:
        if _signal.getsignal(signum) != _signal.SIG_IGN:
            _signal.signal(signum, lambda signum, _: _end(signum))
    # Python calls handlers in the main thread, between two bytecodes. While that thread waits in a system call (for a
    # name server that does not answer, say), a second thread handles the signal.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _thread.start_new_thread(_answer, (reader,))


def _answer(reader: int) -> None:
    while received := os.read(reader, 64):
        for signum in received:
            if signum in _NAMES:
                _end(signum)


def _end(signum: int) -> None:
    if _said.acquire(blocking=False):  # either thread may be first
        os.write(2, f"hvdlite-run: ended by {_NAMES[signum]}; no job was running\n".encode())
        os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
