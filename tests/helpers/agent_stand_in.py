"""Stands in for a job's agent on this machine, which is a copy of the `rank_server`: `python agent_stand_in.py SOCKET`.

The launcher starts it in the agent's place. It hands its standard streams on, ends as the agent ends, and the agent
ends with it. Where a copy of the server would not be as this process is (another user, network, limit or cgroup, for
example), it becomes an agent itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

AGENT = (sys.executable, "-m", "hvdlite_launcher.host.remote_parent")
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed")


def surroundings() -> dict[str, object]:
    """Returns what a new process inherits, other than files, directory and environment."""
    texts = {}
    for name in ("status", "limits", "cgroup", "oom_score_adj"):
        with open(f"/proc/self/{name}") as file:
            texts[name] = file.read()
    texts["status"] = "".join(line for line in texts["status"].splitlines(True) if line.startswith(_INHERITED))
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))}
    return {**texts, "nice": os.nice(0), "spaces": spaces}


def main(path: str) -> int:
    """Returns the agent's exit code, or ends by the signal that has killed it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    request = {"environment": dict(os.environ), "cwd": os.getcwd(), "words": AGENT, "surroundings": surroundings()}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    if json.loads(connection.recv(1 << 16)) != "forked":
        connection.close()
        os.execv(AGENT[0], AGENT)
    # The connection to the launcher is the agent's.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # as the agent does
    answer = connection.recv(1 << 16)
    code = json.loads(answer) if answer else -signal.SIGKILL
    if code < 0:
        os.kill(os.getpid(), -code)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
