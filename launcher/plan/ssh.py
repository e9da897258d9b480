"""Builds the ssh command that starts an agent on another host, and explains what ssh's failures mean.

The user's own ssh does it, with the user's config, keys, agents and jump hosts. Nothing of the job is in these
words, which everybody on either host can see. Quoting happens here, and nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

from ..system.signals import signal_name
from .hosts import Host

# Run by the login shell there, whatever it is, hence by sh inside: the first of the interpreters that exists.
_FIND_PYTHON = (
    'for python do command -v "$python" >/dev/null 2>&1 && '
    'exec "$python" -m hvdlite_launcher.host.remote_parent; done; '
    'echo "no such python: $*" >&2; exit 127'
)
_CONNECT_S = 15
# The client's own watch over the connection, for when nobody is left to end it, and until the agent's first word: it
# gives up one interval after the last of its questions that nobody answered, 12 s after a link was cut.
_ALIVE = ("ServerAliveInterval=3", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Ssh:
    """What the user says of it: ``program`` replaces ssh, ``args`` come before the host."""

    port: int | None = None
    identity_file: str | None = None
    args: tuple[str, ...] = ()
    program: str = "ssh"
    remote_python: str | None = None

    def agent_argv(self, host: Host, start_timeout_s: float) -> list[str]:
        """The command that, run here, is the agent on ``host``: its stdin and stdout are the wire."""
        own = self._own_words()
        command = self._remote_command()
        if os.path.basename(self.program) != "ssh":  # which knows nothing of ssh's options
            return [self.program, *own, host.label, command]
        options = ["BatchMode=yes", "ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none", *_ALIVE]
        configured = _configured(self.program, [*own, *self._host_words(host)])
        # What the user's config says stands. It cannot ask here, and a key that changed is refused as ever.
        if configured.get("stricthostkeychecking", "ask") == "ask":
            options.append("StrictHostKeyChecking=accept-new")
        if configured.get("connecttimeout", "none") == "none":
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
        """The launcher's own interpreter first: a login shell often finds another one."""
        pythons = [sys.executable, "python3", "python"] if self.remote_python is None else [self.remote_python]
        home = [python for python in pythons if python.startswith("~/")]
        words = " ".join('"$HOME"/' + shlex.quote(p[2:]) if p in home else shlex.quote(p) for p in pythons)
        return f"cd / && exec /bin/sh -c {shlex.quote(_FIND_PYTHON)} hvdlite-agent {words}"

    def by_hand(self, host: Host) -> str:
        """What to type to see the same as we did."""
        return shlex.join([self.program, *self._own_words(), host.label, "true"])

    def _host_words(self, host: Host) -> list[str]:
        """The host for ssh itself, which reads options after a host too, but none after two dashes."""
        return [host.label] if self.args[-1:] == ("--",) else ["--", host.label]

    def _own_words(self) -> list[str]:
        port = ["-p", str(self.port)] if self.port is not None else []
        identity = ["-i", self.identity_file] if self.identity_file is not None else []
        return [*port, *identity, *self.args]


def _configured(program: str, words: list[str]) -> dict[str, str]:
    """What ssh's configuration says for a host; nothing if it cannot be asked, which ssh will then say itself."""
    try:
        asked = subprocess.run([program, "-G", *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return {}
    lines = asked.stdout.decode(errors="replace").lower().splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


# ssh's words, or those of what it started, and what to do about them.
_ADVICE = [
    (r"permission denied", "your key is not accepted there: ssh-copy-id {host}, or name the right one with -i"),
    (r"identification has changed", "its key is not the one that is known: if that is right, ssh-keygen -R {name}"),
    (r"host key verification failed", "its key is not known and your ssh config wants that it is: {by_hand}"),
    (r"could not resolve hostname", "check how it is written, or add it to ~/.ssh/config or /etc/hosts"),
    (r"connection refused", "no sshd listens there on that port; -p says which one"),
    (r"timed out|no route to host|network is unreachable", "is it up, and can it be reached from here? {by_hand}"),
    (r"no such python", "--remote-python PATH says where Python is on that host"),
    (
        r"no module named '?hvdlite_launcher\.host",
        "another version of hvdlite is installed there: install the same one, or --remote-python PATH",
    ),
    (
        r"no module named '?hvdlite_launcher|no module named '?psutil",
        "hvdlite is not installed there for the Python that was found: pip install it, or --remote-python PATH",
    ),
    (
        r"fatal python error",
        "its Python cannot start: does a start file of the shell there set PYTHONHOME? Or --remote-python PATH",
    ),
    (r"(bad|unknown|unsupported) .*option|terminating, .*configuration", "check --ssh-args and ~/.ssh/config"),
    (r"connection (closed|reset)|kex_exchange", "its sshd hung up; its log says why. Or try by hand: {by_hand}"),
]


def explain(host: Host, ssh: Ssh, returncode: int, words: str) -> str:
    """Why the agent on ``host`` never said hello: ssh's own ``words``, and the next step."""
    lines = _lines(words)
    for pattern, advice in _ADVICE:
        said = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
        if said:
            step = advice.format(host=host.label, name=host.name, by_hand=ssh.by_hand(host))
            return f"{said[-1]} ({step})"
    if killed := killed_by(returncode):
        return killed
    last = lines[-1] if lines else "its agent ended unexpectedly"
    return f"{last} ({ssh.program} ended with exit code {returncode}; try by hand: {ssh.by_hand(host)})"


def killed_by(returncode: int) -> str | None:
    """Who was killed, here or there, if the return code of ssh tells."""
    if returncode < 0:
        return f"our ssh client was killed by {signal_name(-returncode)}"
    if 128 < returncode < 255:  # with 255 ssh speaks for itself
        return f"its agent was killed by {signal_name(returncode - 128)}"
    return None


def last_words(words: str) -> str | None:
    """What may be the cause, if ssh or the agent said anything of the kind."""
    lines = _lines(words)
    return lines[-1] if lines else None


def _lines(words: str) -> list[str]:
    # The warning is what ssh says of every host that it sees for the first time.
    lines = [line.strip() for line in words.splitlines()]
    return [line for line in lines if line and not line.startswith("Warning: Permanently added ")]
