"""Starts hvdlite-run, also as `python -m hvdlite_launcher`: answers signals at once, then imports the rest.

While a job runs, `launch` has the signals. Before and after that INT, TERM and HUP end this process at once, with one
line: there is nothing to tidy up. Nothing is imported here that takes time, and so no module `signal` or `threading`:
until `_take_signals` has been called, Python's own answer to Ctrl-C is a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` without its names, which take a while
import _thread
import os
import sys

from .errors import in_words

_NAMES = {_signal.SIGINT: "SIGINT", _signal.SIGTERM: "SIGTERM", _signal.SIGHUP: "SIGHUP"}
_said = _thread.allocate_lock()


def main() -> int:
    """Run hvdlite-run and give its exit code."""
    try:
        _take_signals()
        from .cli.hvdlite_run import main as run  # noqa: PLC0415  # see above

        return run()
    except (OSError, ImportError, RuntimeError, MemoryError) as error:
        if (why := in_words(error)) is None:
            raise
        os.write(2, f"hvdlite-run: {why}\n".encode(errors="backslashreplace"))
        # At once: where no file can be opened, ending threads in order aborts the process.
        os._exit(1)


def _take_signals() -> None:
    """From now on each of them is answered by `_end`, but where it is ignored, as under nohup."""
    for signum in _NAMES:
        if _signal.getsignal(signum) != _signal.SIG_IGN:
            _signal.signal(signum, lambda signum, _: _end(signum))
    # The main thread answers between two steps of Python's; while it waits for the system (for a name server that
    # does not answer, say), another one does.
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
    if _said.acquire(blocking=False):  # whichever thread comes first
        os.write(2, f"hvdlite-run: ended by {_NAMES[signum]}; no job was running\n".encode())
        os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
