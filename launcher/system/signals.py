"""Signals: those to this process as bytes in a pipe, and what they are called.

Each signal is one byte in the pipe, for a loop or a thread to read.

Python runs a handler only when its main thread comes round to it: one that is just about to block on a queue when
the signal arrives blocks, and the signal waits with it. What is written to the pipe waits for nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def signals_as_bytes(signums: Collection[signal.Signals]) -> Iterator[int]:
    """Catch these signals; give the end of the pipe to read, which the caller closes. It ends with the context.

    A signal that is ignored (under nohup, or in a script's background job) stays so, here and in all we start.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    caught = [signum for signum in signums if signal.getsignal(signum) != signal.SIG_IGN]
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
    """The exit code that a shell gives for ``returncode``: 128 + n for signal n, which `subprocess` has as -n."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(signum: int) -> str:
    """The name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
