"""`Watcher` records every listening socket on test machines and its process; `Recorder` records TCP streams.

A thread of the watcher asks the kernel (sock_diag) about each machine's network again and again. Sockets that exist
when it is made, such as sshd's, are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from e2e.conftest import wait_until
from e2e.machines import Machine

_CLONE_NEWNET = 0x40000000
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_NETLINK_HEAD = 16
_ERROR, _DONE = 2, 3
_LISTENS, _UNCONNECTED = 10, 7  # states
_SHOW_NAME = 1
_ANY = 0xFFFFFFFF
_ETH_P_IP = 0x0800
_SYN, _ACK = 0x02, 0x10

CLOSED_AT_ONCE = "a process unknown, as the socket was closed before it could be looked up"

_POLL_S = 0.001
_CONNECTS_WITHIN_S = 0.25
_MEMORY_EVERY = 50  # polls


@dataclass(frozen=True)
class Listener:
    """A listening socket, or a UDP socket that stays unconnected.

    For Unix sockets, ``address`` is the path and ``port`` is 0.
    """

    machine: str
    family: str  # tcp, tcp6, udp, udp6, unix
    address: str
    port: int
    inode: int
    pid: int = field(compare=False)
    owner: str = field(compare=False)  # "rank 3", or the process's command line, or CLOSED_AT_ONCE

    @property
    def is_of_rank(self) -> bool:
        return self.owner.startswith("rank ")

    @property
    def takes_all_interfaces(self) -> bool:
        return self.family != "unix" and ipaddress.ip_address(self.address).is_unspecified

    def __str__(self) -> str:
        where = self.address if self.family == "unix" else f"{self.address} {self.port}"
        return f"{self.owner} on {self.machine} listens at {self.family} {where}"


class Watcher:
    """Records all listening sockets on some machines within its ``with`` block, and the peak memory of ranks.

    It calls ``on_new`` with each new listener, in its own thread, within milliseconds after the socket has appeared.
    """

    def __init__(self, machines: Sequence[Machine], on_new: Callable[[Listener], None] = lambda _: None) -> None:
        self._machines = list(machines)
        self._on_new = on_new
        self._over = threading.Event()
        self._recorded: dict[tuple[str, int], Listener] = {}
        self._unconnected_since: dict[tuple[str, int], float] = {}
        self._asking = threading.Lock()
        self._questions = [
            _socket_in(machine, socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) for machine in self._machines
        ]
        self._before = {(name, found.inode) for name, found in self._sockets()}
        self.peak_bytes: dict[int, int] = {}
        """The peak resident memory of each rank so far, by pid."""
        self.polls = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for questions in self._questions:
            questions.close()

    @property
    def recorded(self) -> list[Listener]:
        """All listeners seen so far, in the order in which they appeared."""
        return list(self._recorded.values())

    def now(self) -> list[Listener]:
        """Returns the listeners that exist now."""
        return [
            self._recorded.get((name, found.inode)) or _owned(found)
            for name, found in list(self._sockets())
            if (name, found.inode) not in self._before
        ]

    def wait_for(self, condition: Callable[[Listener], bool]) -> Listener:
        """Waits for a listener that fulfils the condition, and returns the first one."""
        wait_until(lambda: any(map(condition, self.recorded)), message=lambda: f"none among {self.recorded}")
        return next(filter(condition, self.recorded))

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            self.polls += 1
            for name, found in list(self._sockets()):
                key = name, found.inode
                if key not in self._before and key not in self._recorded and not self._may_be_connecting(key, found):
                    self._recorded[key] = _owned(found)
                    self._on_new(self._recorded[key])
            if self.polls % _MEMORY_EVERY == 0:
                self._look_at_memory()

    def _may_be_connecting(self, key: tuple[str, int], found: Listener) -> bool:
        # `connect` on a UDP socket, which getaddrinfo does to sort addresses, first binds it to a port of all
        # interfaces: for a moment it looks as if it took anybody's datagrams.
        if not found.family.startswith("udp"):
            return False
        since = self._unconnected_since.setdefault(key, time.monotonic())
        return time.monotonic() - since < _CONNECTS_WITHIN_S

    def _look_at_memory(self) -> None:
        for pid in {listener.pid for listener in self.recorded if listener.is_of_rank}:
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/status").read_text()
                peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
                self.peak_bytes[pid] = max(peak, self.peak_bytes.get(pid, 0))

    def _sockets(self) -> Iterator[tuple[str, Listener]]:
        with self._asking:
            for machine, questions in zip(self._machines, self._questions, strict=True):
                for found in _listening(machine.name, questions):
                    yield machine.name, found


class Recorder:
    """Records all TCP data that is sent on an interface of a machine within its ``with`` block."""

    def __init__(self, machine: Machine, interface: str) -> None:
        self._socket = _socket_in(machine, socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP))
        self._socket.bind((interface, _ETH_P_IP))
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._begun: dict[bytes, int] = {}
        self._parts: dict[bytes, dict[int, bytes]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def sent_to(self, port: int) -> list[bytes]:
        """Returns the bytes that each connection to this port has sent to it."""
        streams = []
        for flow, begun in self._begun.items():
            if int.from_bytes(flow[-2:], "big") == port:
                stream = b""
                for place, data in sorted(self._parts.get(flow, {}).items()):
                    if (place - begun - 1) % (1 << 32) == len(stream):
                        stream += data
                streams.append(stream)
        return streams

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                packet, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            # On loopback each packet is received twice, as outgoing and as incoming.
            if address[2] != socket.PACKET_OUTGOING and packet[9] == socket.IPPROTO_TCP:
                self._take(packet)

    def _take(self, packet: bytes) -> None:
        head = (packet[0] & 0xF) * 4
        segment = packet[head : int.from_bytes(packet[2:4], "big") or len(packet)]
        # Source and destination addresses, source port, destination port.
        flow = packet[12:20] + segment[:4]
        place, flags = int.from_bytes(segment[4:8], "big"), segment[13]
        if flags & _SYN and not flags & _ACK:
            self._begun[flow] = place
        elif data := segment[(segment[12] >> 4) * 4 :]:
            self._parts.setdefault(flow, {})[place] = data


def _socket_in(machine: Machine, *arguments: int) -> socket.socket:
    """Makes a socket in the machine's network; any thread can use it, as it stays in the namespace it was made in."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/proc/{machine.init_pid}/ns/net") as namespace:
            # This changes the namespace of this thread only, which then ends.
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no way into the network of {machine.name}")
        made.append(socket.socket(*arguments))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _listening(machine: str, questions: socket.socket) -> Iterator[Listener]:
    # The message formats are in linux/inet_diag.h and linux/unix_diag.h.
    for name, protocol, state in (("tcp", socket.IPPROTO_TCP, _LISTENS), ("udp", socket.IPPROTO_UDP, _UNCONNECTED)):
        for family, suffix, length in ((socket.AF_INET, "", 4), (socket.AF_INET6, "6", 16)):
            question = struct.pack("=BBBBI48x", family, protocol, 0, 0, 1 << state)
            for answer in _answers(questions, question):
                (port,) = struct.unpack_from("!H", answer, 4)
                (inode,) = struct.unpack_from("=I", answer, 68)
                address = str(ipaddress.ip_address(answer[8 : 8 + length]))
                yield Listener(machine, name + suffix, address, port, inode, 0, "")
    question = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 1 << _LISTENS, 0, _SHOW_NAME, _ANY, _ANY)
    for answer in _answers(questions, question):
        (inode,) = struct.unpack_from("=I", answer, 4)
        (length,) = struct.unpack_from("=H", answer, 16) if len(answer) > 16 else (4,)
        name = answer[20 : 16 + length].rstrip(b"\0").decode(errors="replace").replace("\0", "@")
        yield Listener(machine, "unix", name, 0, inode, 0, "")


def _answers(questions: socket.socket, question: bytes) -> Iterator[bytes]:
    head = struct.pack("=IHHII", _NETLINK_HEAD + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
    questions.send(head + question)
    while True:
        data = questions.recv(1 << 16)
        while data:
            length, kind, *_ = struct.unpack_from("=IHHII", data)
            if kind == _DONE:
                return
            assert kind != _ERROR, f"the kernel does not say who listens: {data[:length]!r}"
            yield data[_NETLINK_HEAD:length]
            data = data[(length + 3) & ~3 :]


def _owned(found: Listener) -> Listener:
    # A child that has just been forked holds its parent's sockets until its program has replaced the parent's. In that
    # moment it has no command line, nor has a process that ends; a little later neither has the socket.
    while not (owner := _name_of(pid := _pid_of(found.inode))):
        time.sleep(_POLL_S)
    return replace(found, pid=pid, owner=owner)


def _pid_of(inode: int) -> int:
    """Returns the pid of a process that has the socket; 0 if it is closed by now."""
    link = f"socket:[{inode}]"
    # The newest processes first, because these are the job's.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") == link:
                        return pid
    return 0


def _name_of(pid: int) -> str:
    """Returns what `Listener.owner` says; an empty string for a process that is being replaced or ends."""
    try:
        process = psutil.Process(pid)
        rank = process.environ().get("RANK")
        return " ".join(process.cmdline()) if rank is None else f"rank {rank}"
    except (psutil.Error, ValueError):
        return CLOSED_AT_ONCE
