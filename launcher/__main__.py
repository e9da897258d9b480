"""Starts hvdlite-run, also as `python -m hvdlite_launcher`: sets Ctrl-C first, and then imports the rest.

While a job runs, `job.launch` handles the signals. Before and after, they end this process at once and silently, as
there is nothing to clean up. Python's own Ctrl-C would show a traceback, so this module imports nothing that takes
time before it is set.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` without its enums, which take a while
import os
import sys

from .errors import in_words


def main() -> int:
    """Runs hvdlite-run and returns its exit code."""
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    try:
        _open_standard_streams()  # before anything else opens a file
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


if __name__ == "__main__":
    sys.exit(main())
