"""Machines inside this one: a network, processes, a hostname, a home and a /dev/shm of their own, and our files.

A machine is a set of Linux namespaces around one process, its init, that reads a pipe of ours. When we close the
pipe, or die in whatever way, init ends, and with it the kernel ends every process of the machine and takes its
interfaces away: nothing is left that would have to be found. What listens there, and who may log in, is in `hosts`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import psutil

_PROGRAMS = ("ip", "tc", "ss", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NEW_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")

# The machine's init: $1 is its name, $2 the directory with its files of /etc, $3 a Python. It adopts orphans and lets
# them go: who ignores SIGCHLD has no zombies.
_INIT = """
set -e
mount -t sysfs none /sys
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
for file in passwd shadow hosts; do mount --bind "$2/$file" /etc/$file; done
echo "$1" >/proc/sys/kernel/hostname
for off in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 0 >"$off"; done
ip link set lo up
exec "$3" -ISc 'import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print("ready", flush=True)
sys.stdin.read()'
"""


@lru_cache
def why_there_are_none() -> str | None:
    """The reason for which this machine cannot have others inside it, if there is one."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if missing := [name for name in _PROGRAMS if program(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: openssh-server, openssh-client, iproute2)"
    # What a container may not do, most of all.
    tried = subprocess.run(
        ["unshare", *_NEW_NAMESPACES, "sh", "-ec", "mount -t tmpfs none /run; ip link add up type bridge"],
        env={"PATH": _PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def program(name: str) -> str | None:
    return shutil.which(name, path=_PATH)


class Machine:
    """Starts on construction, with loopback as its whole network. ``home``, ``tmp``: its own, not its neighbours'."""

    def __init__(self, name: str, state: Path, etc_hosts: str = "") -> None:
        self.name = name
        self.home, self.tmp, etc = (state / name / part for part in ("home", "tmp", "etc"))
        for directory in (self.home / ".ssh", self.tmp, etc):
            directory.mkdir(parents=True, mode=0o700)
        # OpenSSH looks its user up here, whatever $HOME says.
        sshd = "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin"
        (etc / "passwd").write_text(f"root:x:0:0:root:{self.home}:/bin/bash\n{sshd}\n")
        (etc / "shadow").write_text("root:*:20000:0:99999:7:::\n")
        # As Debian has it: to itself, a machine's name is no address that others could use.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n{etc_hosts}")
        self._holder = subprocess.Popen(
            ["unshare", *_NEW_NAMESPACES, "sh", "-c", _INIT, "init", name, str(etc), sys.executable],
            env={"PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which then end it
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise AssertionError(f"machine {name} could not be made")
        (init,) = psutil.Process(self._holder.pid).children()
        self.init_pid = init.pid  # as seen from outside, like every pid here
        self._namespace = self._pid_namespace(self.init_pid)
        self._services: set[int] = {self.init_pid}

    def inside(self, cwd: Path | None = None) -> list[str]:
        """The words that run the command after them in here."""
        where = f"--wdns={cwd or Path.cwd()}"
        return ["nsenter", f"--target={self.init_pid}", *_NAMESPACES, where, "--"]

    def environment(self) -> dict[str, str]:
        """What differs for one who works here."""
        return {"HOME": str(self.home), "TMPDIR": str(self.tmp), "PATH": _PATH}

    def run(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
        """Run a command in here and wait for it; its output is text."""
        return subprocess.run(
            [*self.inside(), *command],
            check=check,
            **{
                "env": self.environment(),
                "capture_output": True,
                "text": True,
                "stdin": subprocess.DEVNULL,
                **options,
            },
        )

    def serve(self, *command: str) -> psutil.Process:
        """Start a program that belongs to the machine and not to a job; it has no environment of ours."""
        # Not as a child of nsenter's, which would stop when it is stopped, and keep it when it has ended.
        told = self.run(
            "setsid", "--fork", "sh", "-c", 'echo $$; exec "$@" >/dev/null 2>&1', "sh", *command, env={"PATH": _PATH}
        )
        process = psutil.Process(self._pids_outside()[int(told.stdout)])
        self._services.add(process.pid)
        return process

    def processes(self) -> list[psutil.Process]:
        """All that run here but the machine's own: what a job has here, however it came to be."""
        return [process for process in self._all_processes() if process.pid not in self._services]

    def runs(self, name: str) -> bool:
        """Whether a process of that name is among them."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if process.name() == name:
                    return True
        return False

    def _all_processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if self._pid_namespace(process.pid) == self._namespace and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.Error, OSError):
                continue

    @staticmethod
    def _pid_namespace(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")

    def seen(self, path: str) -> Path:
        """A path as this machine sees it, for us to look at."""
        return Path(f"/proc/{self.init_pid}/root") / path.lstrip("/")

    def leftovers(self) -> list[Path]:
        """Files that jobs have left: in the temporary directory (but for torch's caches) and in shared memory."""
        return [*self.tmp.glob("hvdlite-*"), *self.seen("/dev/shm").iterdir()]

    def listening_tcp(self) -> dict[str, int]:
        """Local addresses with ports on which somebody listens, and whose pid that is, as seen from outside."""
        while True:
            outside = self._pids_outside()
            sockets = {}
            for line in self.run("ss", "-H", "-l", "-n", "-t", "-p").stdout.splitlines():
                address, users = line.split()[3], line.partition("pid=")[2]
                sockets[address] = outside.get(int(users.partition(",")[0] or 0))
            # A process may be born between the two looks, or end while ss looks for the owner of its socket.
            if None not in sockets.values():
                return {address: pid for address, pid in sockets.items() if pid is not None}

    def _pids_outside(self) -> dict[int, int]:
        """Pids as seen from outside, by what they are in here."""
        pids = {}
        for process in self._all_processes():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # it ended meanwhile
                continue
            pids[int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])] = process.pid
        return pids

    def hide(self, directory: Path) -> None:
        """Let this machine, and no other, see ``directory`` empty."""
        self.replace(directory, Path("/run/sshd"))

    def replace(self, path: Path, other: Path) -> None:
        """Let this machine, and no other, see ``other`` at ``path``."""
        self.run("mount", "--bind", str(other), str(path))

    def close(self) -> None:
        """End it and everything in it."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


class Switch:
    """What machines are plugged into: a bridge in a machine of its own, out of everyone's sight."""

    def __init__(self, state: Path) -> None:
        self._machine = Machine("switch", state)
        self._machine.run("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        self._machine.run("ip", "link", "set", "br0", "up")
        self._ports: dict[str, str] = {}

    def plug(self, machine: Machine, interface: str, addresses: Sequence[str]) -> None:
        """Give the machine an interface with these addresses (with the length of their prefix)."""
        port = self._ports[machine.name] = f"port{len(self._ports)}"
        # The network namespace alone: `ip` must understand pids as we do.
        in_switch = ["nsenter", f"--target={self._machine.init_pid}", "--net", "--"]
        veth = ["ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(machine.init_pid)]
        subprocess.run([*in_switch, *veth], env={"PATH": _PATH}, check=True)
        self._machine.run("ip", "link", "set", port, "master", "br0", "up")
        for address in addresses:
            no_waiting = ["nodad"] if ":" in address else []
            machine.run("ip", "address", "add", address, "dev", interface, *no_waiting)
        machine.run("ip", "link", "set", interface, "up")

    def cut(self, machine: Machine) -> None:
        """From now on nothing passes, and nobody is told: the machine's interface stays up."""
        self._machine.run("ip", "link", "set", self._ports[machine.name], "nomaster")

    def restore(self, machine: Machine) -> None:
        self._machine.run("ip", "link", "set", self._ports[machine.name], "master", "br0")

    def shape(self, machine: Machine, rate: str) -> None:
        """Let no more than ``rate`` (``100mbit``) pass to the machine."""
        bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        self._machine.run("tc", "qdisc", "replace", "dev", self._ports[machine.name], "root", *bucket)

    def close(self) -> None:
        self._machine.close()


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:  # it ended by itself
            continue
