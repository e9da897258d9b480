"""
`Hosts`: hosts inside this machine, each with a network of its own, connected by links of a set rate.

    eth0 of a host ── veth ── port of the switch ── bridge        each in a network namespace; tc limits both directions

The namespaces have no names. Each lasts as long as a process in it: `cat`, which ends when its stdin is closed, as it
is when this process ends in any way. The kernel ends ranks with this process too. So nothing is left behind.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from .arguments import OptionError

# Users' paths often lack the directories of ip and tc.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_HOLD = "ip link set lo up && echo ready && exec cat"
# A script for sh, whose $0 is the pid of this process: runs the command, unless this process has ended before setpriv
# asked the kernel to kill the rank with it.
_IF_PARENT_LIVES = 'test "$PPID" = "$0" && exec "$@"'
_INTERFACE, _BRIDGE = "eth0", "br0"
_PORT = 29500  # free in a new namespace
_BURST_BYTES, _BURST_S, _QUEUE_MS = 128 * 1024, 0.001, 200
_END_S = 10.0


def bits_per_s(rate: str) -> float:
    """Returns a rate such as ``100mbit`` as a number of bits in a second. Raises OptionError if it is none."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise OptionError(f"{rate!r} is not the rate of a link, such as 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


class Hosts:
    """A number of hosts, ``host0`` and so on. `close` them at the end."""

    def __init__(self, count: int) -> None:
        """Raises OSError if the system does not allow it, as in many containers."""
        self._holders: list[subprocess.Popen[bytes]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.count = count
        self._cores = sorted(os.sched_getaffinity(0))
        try:
            self._switch = self._namespace()
            self._members = [self._namespace() for _ in range(count)]
            _within(self._switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
            _within(self._switch, "ip", "link", "set", _BRIDGE, "up")
            for number, member in enumerate(self._members):
                self._connect(number, member)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            why = (getattr(error, "stderr", None) or str(error)).strip()
            needs = "it takes Linux, root, iproute2 and util-linux"
            raise OSError(f"network namespaces cannot be made here ({needs}): {why}") from None
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return [f"host{number}" for number in range(self.count)]

    @property
    def cores(self) -> int:
        """The number of this machine's cores that the hosts share."""
        return min(len(self._cores), self.count)

    def _namespace(self) -> int:
        """Makes a network namespace, and returns the pid of the process that holds it."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _HOLD],
            env={"PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to this process alone, which then ends it
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise subprocess.CalledProcessError(1, "unshare", stderr=holder.communicate()[1].decode(errors="replace"))
        return holder.pid

    def _connect(self, number: int, member: int) -> None:
        veth = ["ip", "link", "add", _port(number), "type", "veth", "peer", "name", _INTERFACE, "netns", f"{member}"]
        _within(self._switch, *veth)
        _within(self._switch, "ip", "link", "set", _port(number), "master", _BRIDGE, "up")
        _within(member, "ip", "address", "add", f"{_address(number)}/16", "dev", _INTERFACE)
        _within(member, "ip", "link", "set", _INTERFACE, "up")

    def limit(self, rate: str) -> None:
        """Limits what each host sends, and what it receives, to a rate such as ``100mbit``."""
        bits = bits_per_s(rate)
        burst = max(_BURST_BYTES, int(bits / 8 * _BURST_S))
        bucket = ["tbf", "rate", f"{bits:.0f}bit", "burst", f"{burst}", "latency", f"{_QUEUE_MS}ms"]
        for number, member in enumerate(self._members):
            _within(member, "tc", "qdisc", "replace", "dev", _INTERFACE, "root", *bucket)
            _within(self._switch, "tc", "qdisc", "replace", "dev", _port(number), "root", *bucket)

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], stderr: IO[str] | None = None
    ) -> list[subprocess.Popen[bytes]]:
        """Starts the ranks of a job, one on each host and core, as torchrun would, without stdout."""
        self._ranks = []
        for number, member in enumerate(self._members):
            core = self._cores[number % len(self._cores)]
            inside = ["nsenter", f"--target={member}", "--net", "taskset", "--cpu-list", f"{core}"]
            ends_with_us = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", _IF_PARENT_LIVES, f"{os.getpid()}"]
            told = {
                "RANK": f"{number}",
                "WORLD_SIZE": f"{self.count}",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": _address(0),
                "MASTER_PORT": f"{_PORT}",
                "GLOO_SOCKET_IFNAME": _INTERFACE,
                "HVDLITE_HOST": self.names[number],
                "OMP_NUM_THREADS": "1",
                "PATH": _PATH,
            }
            rank = subprocess.Popen(
                [*inside, *ends_with_us, *command],
                # Without it PyTorch warns that a host's address has no name.
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **environ, **told},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            self._ranks.append(rank)
        return list(self._ranks)

    def end_ranks(self) -> list[str]:
        """Ends the ranks that run, and returns a line for each that does not end."""
        return _ended(self._ranks)

    def close(self) -> list[str]:
        """Ends all processes, and so removes namespaces and links. Returns a line for each process that stays."""
        return [*self.end_ranks(), *_ended(self._holders)]


def _port(number: int) -> str:
    return f"port{number}"


def _address(number: int) -> str:
    return f"10.77.{(number + 1) // 256}.{(number + 1) % 256}"


def _within(member: int, *command: str) -> None:
    subprocess.run(
        ["nsenter", f"--target={member}", "--net", *command],
        env={"PATH": _PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
    )


def _ended(processes: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    for each in processes:
        each.kill()
    left = []
    for each in processes:
        try:
            each.wait(_END_S)
        except subprocess.TimeoutExpired:
            left.append(f"process {each.pid} does not end, so its network namespace stays until it does")
        for stream in (each.stdin, each.stdout, each.stderr):
            if stream is not None:
                stream.close()
    return left
