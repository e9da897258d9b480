"""Receives signals to this process as bytes in a pipe, and gives signals their names.

A loop or a thread reads the pipe. Python runs a handler only between two bytecodes of the main thread: if that thread
blocks on a queue just as the signal arrives, the handler does not run. The byte in the pipe is written at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def signals_as_bytes(
    signums: Collection[signal.Signals], *, even_ignored: Collection[signal.Signals] = ()
) -> Iterator[int]:
    """Catches these signals and gives the end of the pipe to read, one byte per signal.

    The pipe is at its end after this context; the caller closes it. A signal that is ignored (under nohup, or in a
    script's background job) stays ignored, in this process and its children, unless it is in ``even_ignored``.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    caught = [signum for signum in signums if signum in even_ignored or signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(write_end)


def shell_code(returncode: int) -> int:
    """Returns a shell's exit code for ``returncode``: 128 + n for signal n, for which `subprocess` has -n."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(signum: int) -> str:
    """Returns the name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
