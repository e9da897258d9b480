"""Test machines inside this one, made of Linux namespaces, and the `Switch` that connects them.

Each machine has its own network, processes, hostname, home and /dev/shm, and shares the file system with this one. Its
init process reads a pipe from us. When we close the pipe, or die, init ends, and then the kernel kills every process of
the machine and removes its interfaces, so nothing is left behind. `ssh_hosts` adds sshd and keys.
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

# The machine's init: $1 is the machine's name, $2 the directory with its files for /etc, $3 a Python. It adopts
# orphans, and ignores SIGCHLD so that they do not become zombies.
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
    """Returns the reason why no test machines can be made here; None if they can."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if missing := [name for name in _PROGRAMS if program(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: openssh-server, openssh-client, iproute2)"
    # Containers often do not allow these.
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
    """A test machine; it starts when constructed, with only a loopback interface.

    ``home`` and ``tmp`` are its own directories, and ``hosts_file`` is its /etc/hosts. All pids are as seen from
    outside the machine.
    """

    def __init__(self, name: str, state: Path, etc_hosts: str = "") -> None:
        self.name = name
        self.home, self.tmp, etc = (state / name / part for part in ("home", "tmp", "etc"))
        for directory in (self.home / ".ssh", self.tmp, etc):
            directory.mkdir(parents=True, mode=0o700)
        # OpenSSH takes the user's home from here and not from $HOME.
        sshd = "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin"
        (etc / "passwd").write_text(f"root:x:0:0:root:{self.home}:/bin/bash\n{sshd}\n")
        (etc / "shadow").write_text("root:*:20000:0:99999:7:::\n")
        # As in Debian: a machine resolves its own name to an address that others cannot use.
        self.hosts_file = etc / "hosts"
        self.hosts_file.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n{etc_hosts}")
        self._holder = subprocess.Popen(
            ["unshare", *_NEW_NAMESPACES, "sh", "-c", _INIT, "init", name, str(etc), sys.executable],
            env={"PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C interrupts the tests, which then end the machine
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise AssertionError(f"machine {name} could not be made")
        (init,) = psutil.Process(self._holder.pid).children()
        self.init_pid = init.pid
        self._namespace = self._pid_namespace(self.init_pid)
        self._services: set[int] = {self.init_pid}

    def inside(self, cwd: Path | None = None) -> list[str]:
        """Returns a command prefix that runs the command after it in this machine."""
        where = f"--wdns={cwd or Path.cwd()}"
        return ["nsenter", f"--target={self.init_pid}", *_NAMESPACES, where, "--"]

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that differ on this machine."""
        return {"HOME": str(self.home), "TMPDIR": str(self.tmp), "PATH": _PATH}

    def run(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
        """Runs a command on this machine and waits for it; its output is text."""
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
        """Starts a program that belongs to the machine and not to a job, without our environment."""
        # Not as a child of nsenter: that would stop when the program is stopped, and keep it as a zombie when it ends.
        told = self.run(
            "setsid", "--fork", "sh", "-c", 'echo $$; exec "$@" >/dev/null 2>&1', "sh", *command, env={"PATH": _PATH}
        )
        process = psutil.Process(self._pids_outside()[int(told.stdout)])
        self._services.add(process.pid)
        return process

    def processes(self) -> list[psutil.Process]:
        """Returns all processes on this machine, except its init and those of `serve`: the jobs' processes."""
        return [process for process in self._all_processes() if process.pid not in self._services]

    def runs(self, name: str) -> bool:
        """Whether one of `processes` has this name."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # the process has just ended
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
        """Returns the path by which we can open a file that has ``path`` on this machine."""
        return Path(f"/proc/{self.init_pid}/root") / path.lstrip("/")

    def leftovers(self) -> list[Path]:
        """Returns files that jobs have left in the temporary directory (except torch's caches) and in shared memory."""
        return [*self.tmp.glob("hvdlite-*"), *self.seen("/dev/shm").iterdir()]

    def listening_tcp(self) -> dict[str, int]:
        """Returns the listening TCP sockets: "address:port", and the pid of the process that has it."""
        while True:
            outside = self._pids_outside()
            sockets = {}
            for line in self.run("ss", "-H", "-l", "-n", "-t", "-p").stdout.splitlines():
                address, users = line.split()[3], line.partition("pid=")[2]
                sockets[address] = outside.get(int(users.partition(",")[0] or 0))
            # Try again if a process started between the two steps, or ended while ss looked for the socket's owner.
            if None not in sockets.values():
                return {address: pid for address, pid in sockets.items() if pid is not None}

    def _pids_outside(self) -> dict[int, int]:
        """Maps each pid inside this machine to the pid outside."""
        pids = {}
        for process in self._all_processes():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # the process has ended
                continue
            pids[int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])] = process.pid
        return pids

    def hide(self, directory: Path) -> None:
        """Makes ``directory`` appear empty on this machine only."""
        self.replace(directory, Path("/run/sshd"))

    def drop_connections_to(self, address: str) -> None:
        """Drops the first packet of each TCP connection to ``address``, except to sshd's port 22, on eth0.

        Connections from there to here are not affected.
        """
        to_there = ["match", "ip", "protocol", "6", "0xff", "match", "ip", "dst", address]
        is_first = ["match", "u8", "0x02", "0x12", "at", "33"]  # SYN is set, and ACK is not
        to_sshd = ["match", "ip", "dport", "22", "0xffff"]
        add_filter = ["tc", "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip"]
        self.run("tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb")
        for number in ("1", "2"):
            self.run(
                "tc", "class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{number}", "htb", "rate", "1gbit"
            )
        self.run("tc", "qdisc", "add", "dev", "eth0", "parent", "1:2", "pfifo", "limit", "0")
        self.run(*add_filter, "prio", "1", "u32", *to_there, *to_sshd, "flowid", "1:1")
        self.run(*add_filter, "prio", "2", "u32", *to_there, *is_first, "flowid", "1:2")

    def reject_connections_to(self, address: str) -> None:
        """Makes each TCP connection from here to ``address`` fail at once with "No route to host"; UDP has a route."""
        self.run("ip", "route", "add", "unreachable", "default", "table", "77")
        self.run("ip", "rule", "add", "to", address, "ipproto", "tcp", "lookup", "77")

    def reset_connections_to(self, address: str) -> None:
        """Makes each TCP connection from here to ``address`` be refused by a reset, as where nobody listens.

        The address leads to this machine itself.
        """
        self.run("ip", "route", "add", "local", "default", "dev", "lo", "table", "78")
        self.run("ip", "rule", "add", "to", address, "ipproto", "tcp", "lookup", "78")

    def replace(self, path: Path, other: Path) -> None:
        """Makes ``other`` appear at ``path`` on this machine only."""
        self.run("mount", "--bind", str(other), str(path))

    def close(self) -> None:
        """Ends the machine with all its processes."""
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
    """The network switch of test machines: a bridge in a machine of its own, where the others cannot see it."""

    def __init__(self, state: Path) -> None:
        self._machine = Machine("switch", state)
        self._machine.run("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        self._machine.run("ip", "link", "set", "br0", "up")
        self._ports: dict[str, str] = {}

    def plug(self, machine: Machine, interface: str, addresses: Sequence[str]) -> None:
        """Adds an interface with these addresses (each with its prefix length) to the machine and connects it."""
        port = self._ports[machine.name] = f"port{len(self._ports)}"
        # Only the network namespace: `ip` must see the pids that we see.
        in_switch = ["nsenter", f"--target={self._machine.init_pid}", "--net", "--"]
        veth = ["ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(machine.init_pid)]
        subprocess.run([*in_switch, *veth], env={"PATH": _PATH}, check=True)
        self._machine.run("ip", "link", "set", port, "master", "br0", "up")
        for address in addresses:
            no_waiting = ["nodad"] if ":" in address else []
            machine.run("ip", "address", "add", address, "dev", interface, *no_waiting)
        machine.run("ip", "link", "set", interface, "up")

    def cut(self, machine: Machine) -> None:
        """Drops all packets from and to the machine from now on; its interface stays up, so it is not notified."""
        self._machine.run("ip", "link", "set", self._ports[machine.name], "nomaster")

    def cut_between(self, *machines: Machine) -> None:
        """Drops all packets between these machines from now on; the others still reach them, and they the others."""
        for machine in machines:
            self._machine.run(
                "ip", "link", "set", "dev", self._ports[machine.name], "type", "bridge_slave", "isolated", "on"
            )

    def restore(self, machine: Machine) -> None:
        self._machine.run("ip", "link", "set", self._ports[machine.name], "master", "br0")

    def shape(self, machine: Machine, rate: str) -> None:
        """Limits the traffic to the machine to ``rate``, such as ``100mbit``."""
        bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        self._machine.run("tc", "qdisc", "replace", "dev", self._ports[machine.name], "root", *bucket)

    def close(self) -> None:
        self._machine.close()


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:  # it has already ended
            continue
