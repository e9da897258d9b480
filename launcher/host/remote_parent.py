"""The agent's parent process, which clears up after it: `python -m hvdlite_launcher.host.remote_parent`.

    sshd, or the launcher ── remote parent (waits) ── agent ── workers

Nothing else would clear up after an agent that was killed, with the launcher perhaps. So the agent is a child of this
process, which adopts the processes it leaves behind, ends them, and removes the job's directory. If the remote parent
is killed, its agent ends as if the launcher had hung up. If both are killed, the next job removes what they left (see
`job_directory`). Signals other than SIGKILL are ignored: they are for the launcher, as in `agent`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from ..errors import in_words
from ..system import process_tree
from ..system.signals import shell_code
from . import agent

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    try:
        return _run_agent()
    except OSError as error:
        if (why := in_words(error)) is None:
            raise
        print(f"hvdlite-run: agent: {why}", file=sys.stderr)
        return 1


def _run_agent() -> int:
    process_tree.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)  # workers are to get them, whoever started us had them blocked
    follow = process_tree.dying_with_parent(signal.SIGTERM)
    directory_reader, directory_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(directory_reader)
        if follow is not None:
            follow()
        return agent.main(lambda path: os.write(directory_writer, os.fsencode(path)))
    os.close(directory_writer)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    # The wire is the agent's alone: it ends when the agent does.
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    returncode = _wait_for(pid)
    if returncode != 0:
        process_tree.kill_descendants()
        if directory := os.read(directory_reader, 4096):
            shutil.rmtree(directory, ignore_errors=True)
    return shell_code(returncode)


def _wait_for(pid: int) -> int:
    """Its return code, -n for signal n; the orphans that end meanwhile are collected too."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
