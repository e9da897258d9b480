"""Stands in for an agent of a job, which is a copy of the `rank_server`: `python agent_stand_in.py ... SOCKET`.

The launcher starts it in the agent's place, or sshd on a test machine does, for a launcher elsewhere. It hands its
standard streams on, ends as the agent ends, and the agent ends with it. Where a copy of the server could not be as this
process is (another user, limit or cgroup, for example), it becomes an agent itself.

`python agent_stand_in.py --python SOCKET WORD...` stands in for `python WORD...` in the same way, but for signals: one
that ends it kills the copy.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

AGENT = (sys.executable, "-m", "hvdlite_launcher.host.remote_parent")
# The namespaces that a test machine has of its own. A copy of the server can enter them.
_SPACES = ("ipc", "mnt", "net", "pid", "uts")
_INHERITED = ("Umask", "Uid", "Gid", "SigBlk", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed")


def surroundings() -> dict[str, object]:
    """Returns what a new process inherits, other than files, directory, environment and `spaces`."""
    texts = {}
    for name in ("status", "limits", "cgroup", "oom_score_adj"):
        with open(f"/proc/self/{name}") as file:
            texts[name] = file.read()
    texts["status"] = "".join(line for line in texts["status"].splitlines(True) if line.startswith(_INHERITED))
    groups = sorted({os.getgid(), *os.getgroups()})  # sshd lists a user's own group, and others may not
    others = sorted({*os.listdir("/proc/self/ns")} - {*_SPACES, "pid_for_children"})
    links = {name: os.readlink(f"/proc/self/ns/{name}") for name in others}
    return {**texts, "nice": os.nice(0), "groups": groups, "others": links, "python": sys.executable}


def spaces() -> list[str]:
    """Returns the namespaces that a copy of the server may have to enter."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in _SPACES]


def send(connection: socket.socket, message: object, fds: list[int]) -> None:
    """Sends a message of any size, with these files."""
    own = os.memfd_create("message")
    try:
        with open(own, "w+", closefd=False) as file:
            json.dump(message, file)
        socket.send_fds(connection, [b"message"], [*fds, own])
    finally:
        os.close(own)


def receive(connection: socket.socket, count: int) -> tuple[dict | None, list[int]]:
    """Receives what `send` has sent with ``count`` files; returns None for the message if the other end hung up."""
    data, fds, *_ = socket.recv_fds(connection, 16, count + 1)
    if not data:
        return None, []
    own = fds.pop()
    with open(own) as file:
        file.seek(0)
        return json.load(file), fds


def main(path: str, own: tuple[str, ...]) -> int:
    """Returns the exit code of the copy that runs the command ``own``, or ends by the signal that has killed it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    request = {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "words": own,
        "spaces": spaces(),
        "ignored": [each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
        "surroundings": surroundings(),
    }
    send(connection, request, [0, 1, 2])
    answer = connection.recv(1 << 16)
    if answer == b'"declined"':
        connection.close()
        os.execv(own[0], own)
    if answer != b'"forked"':
        raise RuntimeError("the rank server, or the copy of it, has failed: see its stderr")
    # The connection to the launcher is the agent's.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN if own == AGENT else signal.SIG_DFL)  # as the agent does
    answer = connection.recv(1 << 16)
    code = json.loads(answer) if answer else -signal.SIGKILL
    if code < 0:
        os.kill(os.getpid(), -code)
    return int(code)


if __name__ == "__main__":
    if sys.argv[1] == "--python":
        sys.exit(main(sys.argv[2], (sys.executable, *sys.argv[3:])))
    sys.exit(main(sys.argv[-1], AGENT))
