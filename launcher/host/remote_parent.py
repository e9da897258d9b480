"""The agent's parent process, which cleans up after it: `python -m hvdlite_launcher.host.remote_parent`.

An agent that was killed cannot clean up, and the launcher may have been killed with it. This process is the one that
the launcher starts; it forks the agent and waits for it. If the agent fails, it adopts the agent's orphaned processes,
kills them, and removes the job's directory. If this process is killed, its agent ends as if the launcher had hung up.
If both are killed, the next job on this host kills what is left, and removes the directory (see `job_directory`).
SIGTERM, SIGINT and SIGHUP are ignored, as in `agent`: the launcher receives them too, and decides.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import NoReturn

from ..errors import in_words
from ..system import process_tree
from ..system.process_tree import shell_code
from . import agent

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Runs an agent, cleans up after it, and returns its exit code, 128 + n if signal n killed it."""
    try:
        return _run_agent()
    except OSError as error:
        if (why := in_words(error)) is None:
            raise
        print(f"hvdlite-run: agent: {why}", file=sys.stderr)
        return 1


def _run_agent() -> int:
    process_tree.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)  # else workers would inherit them blocked
    follow = process_tree.dying_with_parent(signal.SIGTERM)
    directory_reader, directory_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(directory_reader)
        follow()
        _end(agent.main(lambda path: os.write(directory_writer, os.fsencode(path))))
    os.close(directory_writer)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    # Only the agent may hold the connection to the launcher open, so that it closes when the agent ends.
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    returncode = _wait_for(pid)
    if returncode != 0:
        process_tree.kill_descendants()
        if directory := os.read(directory_reader, 4096):
            shutil.rmtree(directory, ignore_errors=True)
    return shell_code(returncode)


def _end(exit_code: int) -> NoReturn:
    """Ends this process without the interpreter's tidying up, which would take a fifth of an agent's processor time."""
    sys.stderr.flush()
    os._exit(exit_code)


def _wait_for(pid: int) -> int:
    """Waits for ``pid`` and returns its return code, -n for signal n. Reaps orphans that end in the meantime."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    _end(main())
