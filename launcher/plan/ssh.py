"""Builds the ssh command that starts an agent on another host, and explains ssh's failures.

`agents` runs the command. It uses the user's own ssh with its config, keys, agents and jump hosts. The command contains
nothing of the job, as all users of both hosts can see it. All quoting for the remote shell is done here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

from ..errors import LauncherError
from ..system import process_tree
from ..system.process_tree import as_before, signal_name
from .hosts import Host

# The login shell of the other host may be any shell, so it runs sh, which runs the first interpreter that exists.
_FIND_PYTHON = (
    'for python do command -v "$python" >/dev/null 2>&1 && '
    'exec "$python" -m hvdlite_launcher.host.remote_parent; done; '
    'echo "no such python: $*" >&2; exit 127'
)
_CONNECT_S = 15
# Of what ssh and the host wrote, only so much is searched for a reason: the last lines, and the start of each.
_MOST_LINES, _MOST_OF_LINE = 50, 500
SSH_FAILED = 255
"""The exit code of ssh for its own failures; all others are of the command there."""
# Until the agent sends `Hello`, and when no launcher is left to end it, ssh itself watches the connection: it ends when
# three probes had no reply, 12 s after a link was cut.
_ALIVE = ("ServerAliveInterval=3", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Ssh:
    """The user's options for ssh: ``program`` replaces ssh, ``args`` precede the host.

    ``known_hosts``: a host whose key is not known yet is refused.
    """

    port: int | None = None
    identity_file: str | None = None
    args: tuple[str, ...] = ()
    program: str = "ssh"
    remote_python: str | None = None
    known_hosts: bool = False

    def agent_argv(self, host: Host, start_timeout_s: float) -> list[str]:
        """Returns the command that runs an agent on ``host``: its stdin and stdout are the connection.

        Raises `LauncherError` if ssh does not read the user's configuration within ``start_timeout_s``.
        """
        own = self._own_words()
        command = self._remote_command()
        if os.path.basename(self.program) != "ssh":  # it need not have ssh's options
            return [self.program, *own, host.label, command]
        options = ["BatchMode=yes", "ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none", *_ALIVE]
        configured = _configured(self.program, [*own, *self._host_words(host)], host, start_timeout_s)
        # The user's config has priority. By default ssh would ask about a new host, which it cannot do here, so the key
        # is accepted; a changed key is still refused.
        if self.known_hosts:
            options.append("StrictHostKeyChecking=yes")
        elif configured is not None and configured.get("stricthostkeychecking", "ask") == "ask":
            options.append("StrictHostKeyChecking=accept-new")
        if configured is not None and configured.get("connecttimeout", "none") == "none":
            options.append(f"ConnectTimeout={max(1, min(_CONNECT_S, int(start_timeout_s)))}")
        return [
            self.program,
            "-T",
            "-x",
            *(f"-o{option}" for option in options),
            *own,
            *self._host_words(host),
            command,
        ]

    def _remote_command(self) -> str:
        """Returns the command for the login shell there.

        It tries the launcher's own interpreter first, since the PATH of a login shell often has another one.
        """
        pythons = [sys.executable, "python3", "python"] if self.remote_python is None else [self.remote_python]
        home = [python for python in pythons if python.startswith("~/")]
        words = " ".join('"$HOME"/' + shlex.quote(p[2:]) if p in home else shlex.quote(p) for p in pythons)
        return f"cd / && exec /bin/sh -c {shlex.quote(_FIND_PYTHON)} hvdlite-agent {words}"

    def by_hand(self, host: Host) -> str:
        """Returns the command that a user can type to see the same failure."""
        return shlex.join([self.program, *self._own_words(), host.label, "true"])

    def _host_words(self, host: Host) -> list[str]:
        """Returns the arguments for the host, after two dashes: without these ssh reads options even after a host."""
        return [host.label] if self.args[-1:] == ("--",) else ["--", host.label]

    def _own_words(self) -> list[str]:
        port = ["-p", str(self.port)] if self.port is not None else []
        identity = ["-i", self.identity_file] if self.identity_file is not None else []
        return [*port, *identity, *self.args]


def _configured(program: str, words: list[str], host: Host, timeout_s: float) -> dict[str, str] | None:
    """Returns ssh's configuration for a host; None if ssh fails, as it will again when it is to start the agent."""
    try:
        with subprocess.Popen(
            as_before([program, "-G", *words]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as asked:
            try:
                printed, _ = asked.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process_tree.kill_tree(asked.pid)  # with what it has started, such as of a Match exec
                asked.kill()
                raise LauncherError(
                    f"{program} -G {host.label} took more than {timeout_s:g} s: what does your ssh config run (Match "
                    "exec)? --start-timeout allows more time"
                ) from None
    except OSError:
        return None
    if asked.returncode:
        return None
    lines = printed.decode(errors="replace").lower().splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


# What ssh itself writes where nobody listens yet, or the name is not known yet: of its own connection, or of that of a
# jump host.
_NOT_THERE = re.compile(
    r"(?:ssh: connect to host .* port \d+|channel \d+: open failed: connect failed): (?P<cause>Connection refused"
    r"|Connection timed out|Operation timed out|No route to host|Network is unreachable|Host is down"
    r"|Name or service not known|Temporary failure in name resolution)"
    r"|ssh: Could not resolve hostname .*: (?P<unknown>.+)"
)
# Further lines: with -v, and of the second ssh, whose connection through a jump host was closed.
_BESIDE_NOT_THERE = re.compile(
    r"debug\d: |stdio forwarding failed|kex_exchange_identification: |Connection closed by UNKNOWN"
)

# Patterns of messages of ssh, or of what it started, and the advice for each.
_ADVICE = [
    (r"permission denied", "the host does not accept your key: run ssh-copy-id {host}, or give the right key with -i"),
    (r"identification has changed", "its host key has changed: if that is expected, run ssh-keygen -R {name}"),
    (
        r"host key verification failed",
        "its host key is unknown, and {who} requires a known one: accept it with {by_hand}",
    ),
    (r"could not resolve hostname", "check its spelling, or add it to ~/.ssh/config or /etc/hosts"),
    (r"connection refused", "no sshd listens on that port: is sshd running there? -p sets another port"),
    (r"timed out|no route to host|network is unreachable", "is the host up, and reachable from here? Try {by_hand}"),
    (r"no such python", "give the path of Python on that host with --remote-python PATH"),
    (
        r"no module named '?hvdlite_launcher\.host",
        "its hvdlite is another version: install the same one there, or choose a Python with --remote-python PATH",
    ),
    (
        r"no module named '?(hvdlite_launcher|psutil)",
        "the Python found there has no hvdlite: pip install it, or choose a Python with --remote-python PATH",
    ),
    (
        r"fatal python error",
        "its Python cannot start: is PYTHONHOME set there? Or choose a Python with --remote-python PATH",
    ),
    (r"(bad|unknown|unsupported) .*option|terminating, .*configuration", "check --ssh-args and ~/.ssh/config"),
    (r"connection (closed|reset)|kex_exchange", "its sshd closed the connection: see its log, or try {by_hand}"),
]


def why_not_there_yet(returncode: int, words: str) -> str | None:
    """Returns in a few words why a host cannot be connected to, if it may be later; None for any other failure.

    ``words`` are all that was written before the `Hello`, also by the host's shell. Its last line must be ssh's failure
    to connect: whatever a host wrote after it was reached would come behind that.
    """
    lines = [line for line in _lines(words) if not _BESIDE_NOT_THERE.match(line)]
    match = _NOT_THERE.fullmatch(lines[-1]) if lines else None
    if returncode != SSH_FAILED or match is None:
        return None
    unknown = match["unknown"]
    return f"its name is not known ({unknown})" if unknown else str(match["cause"]).lower()


def explain(host: Host, ssh: Ssh, returncode: int, words: str) -> str:
    """Returns the reason why the agent on ``host`` ended before its `Hello`: ssh's own ``words``, and what to do."""
    lines = _lines(words)
    for pattern, advice in _ADVICE:
        said = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
        if said:
            who = "--known-hosts" if ssh.known_hosts else "your ssh config"
            return f"{said[-1]} ({advice.format(host=host.label, name=host.name, by_hand=ssh.by_hand(host), who=who)})"
    if killed := killed_by(returncode):
        return killed
    last = lines[-1] if lines else "its hvdlite agent ended unexpectedly"
    return f"{last} ({ssh.program} ended with exit code {returncode}: try {ssh.by_hand(host)})"


def killed_by(returncode: int) -> str | None:
    """Returns a message if the return code of ssh means that a signal ended ssh or the agent."""
    if returncode < 0:
        return f"the ssh client was killed by {signal_name(-returncode)}"
    if 128 < returncode < SSH_FAILED:
        return f"its hvdlite agent was killed by {signal_name(returncode - 128)}"
    return None


def last_words(words: str) -> str | None:
    """Returns the last line that ssh or the agent wrote, which may be the reason; None without one."""
    lines = _lines(words)
    return lines[-1] if lines else None


def _lines(words: str) -> list[str]:
    # ssh writes this warning for every host that it connects to for the first time.
    lines = [line.strip()[:_MOST_OF_LINE] for line in words.splitlines()]
    return [line for line in lines if line and not line.startswith("Warning: Permanently added ")][-_MOST_LINES:]
