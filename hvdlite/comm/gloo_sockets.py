"""
All that reaches into gloo from outside: no other module knows how its sockets are found and touched.

    gloo.open_proven ───── prove the peer     `while_connecting`, `make_devices`: nobody else gets in afterwards
    engines, Connecting ── end the waits      `end_waits` of `Connections`, and of `OpeningGroups` while gloo connects
    hvdlite-run asks ───── measure silence    `silences` of both
    engines, at the end ── shut down          `Connections.shut_down`

Gloo is torch's engine between CPU hosts, and the wheels looked at (2.11.0 and 2.14.1) have no way of their own:

- Its listener takes any peer that sends a number that is easy to guess, as long as the group lives. Once the ranks have
  connected, a packet filter of the kernel drops all that comes to the listener, and the ranks prove themselves by
  signatures (in `gloo`). /proc/self/fdinfo shows which sockets the event loops of its devices watch.
- Its waits end by a timeout alone: `abort` and `shutdown` of a gloo group do nothing. But gloo closes all connections
  once a wait with a timeout of its own has failed. Connecting lasts five times its timeout, and ends by what gloo takes
  for answers: where it connects, the attempts are shut down, and where it waits to be connected to, this process
  connects to itself. (With ``lazy_init``, one of some hundred openings with a rank that fails stood still.)
- It waits where the network between two hosts is cut. The kernel notices: it probes an idle connection, and the other
  kernel answers even while the process there computes, is stopped or hangs. So silence of many seconds (TCP_INFO) means
  a host that is gone, or a network that is cut.
- Destroying a group waits for its operations. Without connections they end.

Where a system or a torch does not show these sockets, one line says what is lost, and no engine of gloo is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import socket
import stat
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from .. import forks
from ..errors import CommunicationError
from ..log import log

_SO_ATTACH_FILTER = 26  # linux: asm-generic/socket.h

# Of `struct tcp_info` (linux/tcp.h): the state, its first byte, and the milliseconds since the last data and the last
# acknowledgement came.
ESTABLISHED, SYN_SENT = 1, 2
_LAST_RECEIVED = struct.Struct("=52xII")

_INODE = 9  # the place in a line of /proc/net/tcp

PROBE_EVERY_S = 2
# The kernel gives an idle connection up after this many probes, about four minutes: an error of the rank. In an elastic
# job hvdlite-run decides before.
_MOST_PROBES = 127

# The shortest timeout that gloo takes.
_AT_ONCE = timedelta(milliseconds=1)

# Retries in case another thread opens a listener at the same moment, which is rare.
_DEVICE_ATTEMPTS = 100

_SHORTEST_S = 2 * PROBE_EVERY_S

_OWN_CONNECTION_S = 1.0
# What gloo's pairs send first: the number of the pair, which is that of the rank in a group with a device of its own.
_PAIR = struct.Struct("=Q")


class _Sockets:
    """Some of gloo's sockets, which may be closed at any time. Any thread may call the methods."""

    def __init__(self) -> None:
        self._clock = time.monotonic
        self._unanswered_since: dict[str, float] = {}

    def _found(self) -> Iterator[tuple[socket.socket, int, bool]]:
        """See `_sockets_of`."""
        raise NotImplementedError

    def silences(self) -> dict[str, float]:
        """Returns for how many seconds nothing has come from each other address, as far as is known.

        Those count that have not answered since a connection was begun, or answer no probes for at least 4 s. Of
        several connections the most silent counts.
        """
        longest: dict[str, float] = {}
        unanswered: set[int] = set()
        for each, inode, listens in self._found():
            with contextlib.suppress(OSError):  # it is being closed
                state = None if listens else state_of(each)
                if state == SYN_SENT:
                    unanswered.add(inode)
                elif state == ESTABLISHED and (since_s := silence_s(each)) >= _SHORTEST_S:
                    other = address_in(each.getpeername())
                    longest[other] = max(since_s, longest.get(other, 0.0))
        # By the address, since gloo begins another attempt with another socket.
        now_s = self._clock()
        self._unanswered_since = {
            other: self._unanswered_since.get(other, now_s) for other in unanswered_by(unanswered)
        }
        return longest | {other: now_s - since_s for other, since_s in self._unanswered_since.items()}


class Connections(_Sockets):
    """The connections of one gloo process group, identified by the inode numbers of their sockets.

    A forked child inherits them, but only its parent may change them: in the child no method does anything.
    """

    def __init__(self) -> None:
        super().__init__()
        # File descriptors of the devices' event loops, each with the inode of its listener.
        self.loops: dict[int, int] = {}
        self.inodes: set[int] = set()
        self.addresses: tuple[str, ...] = ()
        self._pid = os.getpid()
        self._group: Callable[[], Any] = lambda: None
        self._others: list[int] = []
        self.devices = len(_interfaces())

    def belong_to(self, group: Any, rank: int, size: int) -> None:
        """Names the process group whose operations `end_waits` ends; keeps no reference to it."""
        self._group = weakref.ref(group)
        self._others = [other for other in range(size) if other != rank]

    def end_waits(self) -> None:
        """End all operations in progress on the connections with an error, here and on the other ranks.

        It takes a few milliseconds. Data on their way may be lost. An operation of which a message was written or read
        in part is blocked until its timeout, though nothing is transferred any more: `deferred_close.keep_until` keeps
        the group from being destroyed meanwhile.
        """
        # To shut down the sockets alone would not do. If an operation fails on one connection, gloo drops its buffers
        # on the others. Where data for such a buffer arrive later, gloo reads nothing more from that connection, not
        # even that it was shut down. So this first waits for a message that no rank sends, from each rank in turn: gloo
        # closes all connections when a wait has timed out. It fails at once where the connection is closed already.
        of_group, self._group = self._group, lambda: None
        group: Any = of_group()
        is_own = group is not None and self._pid == os.getpid()
        for tag, other in itertools.product(range(self.devices), self._others) if is_own else ():
            with contextlib.suppress(RuntimeError):  # a message's tag chooses the device
                group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], other, tag).wait(_AT_ONCE)
        self.shut_down()

    def shut_down(self) -> None:
        """Shut down the connections, before the group is destroyed. Data already sent still arrive."""
        for each, _, _ in self._found():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.inodes.clear()

    def probe(self) -> None:
        """Has the kernel probe the connections from now on; notes the ``addresses`` at this end, usually one."""
        addresses = set()
        for each, _, _ in self._found():
            with contextlib.suppress(OSError):
                addresses.add(address_in(each.getsockname()))
                probe(each)
        self.addresses = tuple(sorted(addresses))

    def _found(self) -> Iterator[tuple[socket.socket, int, bool]]:
        is_own = self.inodes and self._pid == os.getpid()
        for number in _open_files() if is_own else ():
            with contextlib.suppress(OSError):
                inode = os.stat(f"/proc/self/fd/{number}").st_ino
                if inode in self.inodes and (each := copy_of(number, inode)) is not None:
                    with each:
                        yield each, inode, False


class OpeningGroups(_Sockets):
    """The sockets of the groups that threads of this process are opening now."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """This end's addresses, at which gloo listens; none before it does."""
        return tuple(sorted({address_in(each.getsockname()) for each, _, listens in self._found() if listens}))

    def listeners(self) -> set[int]:
        """Returns what identifies the groups: the inodes of their listeners."""
        return set(_connecting.listeners())

    def end_waits(self, size: int, let_in: set[int], of: Collection[int] | None = None) -> None:
        """Makes gloo fail where it waits for one of ``size`` ranks, for all or some `listeners`; gloo then tries again.

        ``let_in`` has the inodes of listeners that this process has connected to: empty at first, then the same.
        """
        for each, inode, listens in self._found(of):
            with contextlib.suppress(OSError):  # gloo has closed it meanwhile
                if listens and inode not in let_in:
                    _connect_to_itself(each, size)
                    let_in.add(inode)
                elif not listens and state_of(each) == SYN_SENT:
                    each.shutdown(socket.SHUT_RDWR)

    def _found(self, of: Collection[int] | None = None) -> Iterator[tuple[socket.socket, int, bool]]:
        for listener, loop in _connecting.listeners().items():
            if of is None or listener in of:
                yield from _sockets_of(loop)


def own_addresses() -> tuple[str, ...]:
    """Returns the addresses at which gloo listens in this process, for which it makes devices that it drops again."""
    connections = Connections()
    devices = make_devices(connections)
    listening = (each for loop in connections.loops for each, _, listens in _sockets_of(loop) if listens)
    found = {address_in(each.getsockname()) for each in listening}
    del devices
    return tuple(sorted(found))


def cut_links() -> int:
    """Drops all further packets from other hosts to this process's gloo connections; returns how many it has cut.

    For faults on purpose: it cannot be undone, and later groups have new connections.
    """
    count = 0
    for loop in _event_loops():
        for each, _, listens in _sockets_of(loop):
            with contextlib.suppress(OSError):  # gloo has closed it meanwhile
                if not listens and each.getpeername()[0] != each.getsockname()[0]:
                    drop_packets(each)
                    count += 1
    return count


def make_devices(connections: Connections) -> list[dist.ProcessGroupGloo.Device]:
    """Returns new gloo devices, which listen at this process's addresses, and adds their loops to ``connections``."""
    return [_make_device(interface, connections) for interface in _interfaces()]


def _interfaces() -> list[str]:
    """Returns the network interfaces that gloo uses, each for a device of its own; "" lets gloo choose one."""
    return [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each] or [""]


def _make_device(interface: str, connections: Connections) -> dist.ProcessGroupGloo.Device:
    gloo = dist.ProcessGroupGloo
    for _ in range(_DEVICE_ATTEMPTS):
        before = _listeners()
        device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        new = _listeners(before)
        if not new:
            raise _not_found()
        # The new device's listener is one of them: a single new one must be its own. File descriptors do not tell that,
        # since its loop may have that of one which another thread has closed meanwhile.
        if len(new) == 1:
            connections.loops |= {loop: inode for inode, loop in new.items()}
            return device
    raise CommunicationError(
        "hvdlite cannot identify gloo's listening socket, because other threads of this process keep opening gloo "
        "process groups: call hvd.init(), and take the first step of each optimizer, while no other thread opens one"
    )


def _not_found() -> CommunicationError:
    return CommunicationError(
        f"hvdlite does not find the socket on which gloo of torch {torch.__version__} listens, in /proc/self/fdinfo: "
        "so it cannot keep other programs from connecting to it, end waits for a lost rank, or see that a network is "
        "cut. Mount /proc, or install another version of torch: that of an earlier job, if this one is new"
    )


@contextlib.contextmanager
def while_connecting() -> Iterator[Connections]:
    """A context in which gloo connects the ranks of a group; afterwards its listeners let nobody else in.

    Yields a `Connections`, which is filled at the end. If other threads of this process may open gloo groups at the
    same time, the devices must be those of `make_devices`. A listener that is not found is a warning here.
    """
    connections = Connections()
    with _connecting:
        before = set(_listeners())
        yield connections
        listeners = _listeners(before)
        if not connections.loops:
            connections.loops = {loop: inode for inode, loop in listeners.items()}
            if not connections.loops:
                # Ranks of one host need no more of gloo than this group: so a sandbox such as gVisor, whose
                # /proc/self/fdinfo is empty, can train.
                log.warning("%s", _not_found())
            # In this mode torch makes a second group within.
            if len(connections.loops) > connections.devices * (2 if get_debug_level() == DebugLevel.DETAIL else 1):
                connections.loops = {}
                log.warning(
                    "another thread of this process began to listen while gloo connected, so hvdlite cannot tell which "
                    "socket is gloo's: its port stays open to connections of other programs, although their data are "
                    "ignored, and a network that is cut is not noticed. Call hvd.init() while no other thread does so"
                )
        for loop, listener in connections.loops.items():
            # Another thread may have the number of a loop that is closed.
            if listeners.get(listener) == loop:
                connections.inodes |= _close_listeners(loop)


class _ConnectingThreads:
    """A context in which threads of this process connect, and may open as many files as the system allows.

    Gloo aborts the process when strangers have opened so many connections that no file is left. It keeps these, so the
    limit stays higher if there are many.
    """

    def __init__(self) -> None:
        self._lock = forks.lock_of_process()
        self._count = 0
        self._before: set[int] = set()  # the listeners, by their inodes
        self._files = (0, 0)
        self._room = 0  # how many more files the process could open before

    def leave_to_parent(self) -> None:
        self._count = 0

    def listeners(self) -> dict[int, int]:
        with self._lock:
            return _listeners(self._before) if self._count else {}

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = set(_listeners())
                self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._room = max(0, self._files[0] - len(_open_files()))
                _allow_files(self._files[1], self._files[1])
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                soft, hard = self._files
                _allow_files(max(soft, min(hard, len(_open_files()) + self._room // 2)), hard)


_connecting = _ConnectingThreads()
forks.when_forked(_connecting)


def _allow_files(soft: int, hard: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        raise _not_found() from None


def _event_loops() -> set[int]:
    """Returns the file descriptors of this process's epoll instances; gloo has one for each device."""
    found = set()
    for number in _open_files():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]":
                found.add(number)
    return found


def _listeners(besides: Collection[int] = ()) -> dict[int, int]:
    """Returns the inodes of the sockets that gloo listens on, each with the file descriptor of its event loop."""
    found = ((inode, loop) for loop in _event_loops() for _, inode, listens in _sockets_of(loop) if listens)
    return {inode: loop for inode, loop in found if inode not in besides}


def _sockets_of(loop: int) -> Iterator[tuple[socket.socket, int, bool]]:
    """Yields each TCP socket of this event loop, open until the next is asked for; its inode; and whether it listens.

    An OSError where this process has too many open files.
    """
    watched = []
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{loop}", encoding="ascii") as info:
        watched = [line.split() for line in info if line.startswith("tfd:")]
    for _, number, *rest in watched:
        # Not every system names the inode.
        inode = next((int(word[4:], 16) for word in rest if word.startswith("ino:")), None)
        if (each := copy_of(int(number), inode)) is not None:
            with each:
                listens = bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                yield each, os.fstat(each.fileno()).st_ino, listens


def _close_listeners(loop: int) -> set[int]:
    """Drops further packets to the listening sockets of this gloo loop; returns the inodes of its connected sockets."""
    # Not by closing: gloo owns them, and aborts the process where it finds one closed.
    connected = set()
    for each, inode, listens in _sockets_of(loop):
        if not listens:
            connected.add(inode)
            continue
        try:
            drop_packets(each)
        except OSError as error:
            log.warning(
                "gloo's port %s stays open to connections of other programs, although their data are ignored: this "
                "system cannot filter packets (%s)",
                each.getsockname()[:2],
                error,
            )
    return connected


def _connect_to_itself(listener: socket.socket, size: int) -> None:
    for number in range(size):
        with socket.socket(listener.family) as own:
            own.settimeout(_OWN_CONNECTION_S)
            own.connect(listener.getsockname())
            own.sendall(_PAIR.pack(number))


def copy_of(number: int, inode: int | None) -> socket.socket | None:
    """Returns a copy of the TCP socket with this file descriptor, and this inode if it is known.

    None if the file is another one, or closed: any thread may do that meanwhile. An OSError if no file can be opened.
    """
    try:
        copy = os.dup(number)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    file = os.fstat(copy)
    if not stat.S_ISSOCK(file.st_mode) or inode not in (None, file.st_ino):
        os.close(copy)
        return None
    found = socket.socket(fileno=copy)
    if found.proto == socket.IPPROTO_TCP:
        return found
    found.close()
    return None


def state_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def silence_s(connection: socket.socket) -> float:
    """Returns for how many seconds nothing has come over a connection; has the kernel probe it from now on."""
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        probe(connection)
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
    # An answer to a probe is an acknowledgement; but data may come without one.
    return float(min(_LAST_RECEIVED.unpack(info)) / 1000)


def unanswered_by(unanswered: Collection[int]) -> set[str]:
    """Returns the addresses to which these sockets begin to connect: only the kernel's table has them by then."""
    found = set()
    for name in ("tcp", "tcp6") if unanswered else ():
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as table:
            for line in itertools.islice(table, 1, None):
                _, _, other, state, *_ = columns = line.split()
                if int(state, 16) == SYN_SENT and int(columns[_INODE]) in unanswered:
                    # Words of 32 bits, as they are in memory.
                    address = bytes.fromhex(other.partition(":")[0])
                    words = struct.unpack(f">{len(address) // 4}I", address)
                    family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                    found.add(address_in((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), 0)))
    return found


def drop_packets(to: socket.socket) -> None:
    """Has the kernel drop all further packets to a socket. An OSError if this system cannot filter packets."""
    # A classic BPF program of one instruction, "ret #0": keep 0 bytes of each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def address_in(name: tuple[str, int]) -> str:
    """Returns the address in a socket's name, in one form for IPv4 and none of a link's scope."""
    return name[0].removeprefix("::ffff:").partition("%")[0]
