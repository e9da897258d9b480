"""
All that reaches into gloo from outside, which has no way of its own for what a job needs of it.

    make_gloo ── Connections ── prove the peer (`open_proven`), end the waits (`end_waits`), measure silence
                                (`silences`), shut down (`shut_down`)

Gloo is torch's engine between CPU hosts. What it lacks, in torch 2.11 as in 2.14:

- Its listener takes any peer that connects first and sends a number that is easy to guess; the wheels looked at
  (2.11.0, 2.14.1) have no TLS. So each rank sends each other rank a signature with the job's key, which a stranger
  cannot make, as the first collective of a group. Then the kernel drops all further packets to the listeners.
- Nothing ends a collective in progress before its timeout: `abort` and `shutdown` of a gloo group do nothing, and
  `reconfigure` (2.14, experimental) connects anew from the handles of all members. Connecting, which cannot be
  interrupted, is put off to the first collective (``lazy_init``), for which a thread need not wait. Operations between
  connected ranks end when their sockets are shut down.
- It does not notice that the network between two hosts is cut. The kernel does: it probes a connection that is idle,
  and repeats data that are not acknowledged; the other kernel answers even while the process there hangs.

The sockets of a group are those that the event loops (epoll) of its devices watch, as /proc/self/fdinfo lists them.
Where a torch's gloo or a system lets none of this be done, the first group says in one line what is lost (`warn_that`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import resource
import socket
import stat
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions, DebugLevel, Store, get_debug_level

from .. import forks
from ..errors import CommunicationError
from ..log import log
from ..signing import TAG_BYTES
from .connecting import ConnectingRanks
from .deferred_close import keep_until

# The longest that ranks may be apart after all have connected, even where many share few cores.
_PROOF_S, _PROOF_S_PER_RANK = 15.0, 0.25

# The shortest timeout that gloo takes.
_AT_ONCE = timedelta(milliseconds=1)

# How gloo words a connection that was not made, in contrast to one that has ended. The last is the system's at once.
_NOT_CONNECTED = re.compile("connect timeout|timed out connecting|connect: ", re.IGNORECASE)

_LAZY = "TORCH_GLOO_LAZY_INIT"

# Retries in case a thread of the program opens a listener at the same moment, which is rare.
_DEVICE_ATTEMPTS = 100

_SO_ATTACH_FILTER = 26  # linux: asm-generic/socket.h

# Of TCP_INFO (linux/tcp.h): the state, which is its first byte, and the milliseconds since the last data and the last
# acknowledgement came.
_ESTABLISHED, _SYN_SENT, _LISTEN = 1, 2, 10
_LAST_RECEIVED = struct.Struct("=52xII")

_INODE = 9  # the place in a line of /proc/net/tcp

_PROBE_EVERY_S = 2
# The kernel gives an idle connection up after this many probes, about four minutes: an error of the rank. In an elastic
# job hvdlite-run decides before.
_MOST_PROBES = 127
_SHORTEST_S = 2.0 * _PROBE_EVERY_S

# A process group of torch.distributed, or its gloo backend alone.
ProcessGroup = TypeVar("ProcessGroup")

# Held while devices are made, so that new listeners are known to be theirs. It is not held while ranks connect, but in
# torch's debug mode DETAIL, whose groups connect when they are made.
_making = forks.lock_of_process()


class Connections:
    """The TCP connections of one gloo process group. Any thread may call its methods; a forked child has none."""

    def __init__(self) -> None:
        # File descriptors of the devices' event loops, each with the inode of its listener.
        self._loops: dict[int, int] = {}
        self.addresses: tuple[str, ...] = ()
        """This end's addresses, at which gloo listens; usually there is one."""
        self._group: Callable[[], Any] = lambda: None
        self._others: Sequence[int] = ()
        self._pid = os.getpid()
        self._unanswered_since: dict[str, float] = {}
        _alive.add(self)

    @contextlib.contextmanager
    def made_within(self) -> Iterator[None]:
        """A context in which torch makes the group's devices by itself, and connects it no sooner than it is used."""
        earlier = os.environ.get(_LAZY)
        # torch's debug mode has a group of its own within, which the proof does not connect.
        if get_debug_level() is not DebugLevel.DETAIL:
            os.environ[_LAZY] = "1"
        try:
            with _making:
                before = _listeners()
                yield
                self._add(_new_listeners(before))
        finally:
            if earlier is not None:
                os.environ[_LAZY] = earlier
            else:
                os.environ.pop(_LAZY, None)

    def make_device(self, interface: str) -> dist.ProcessGroupGloo.Device:
        """Returns a new gloo device, which listens at an interface's address; at "" gloo chooses one."""
        for _ in range(_DEVICE_ATTEMPTS):
            with _making:
                before = _listeners()
                if interface:
                    device = dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
                else:
                    device = dist.ProcessGroupGloo.create_default_device(lazy_init=True)
                new = _new_listeners(before)
            # The new device's listener is one of them: a single new one must be its own. File descriptors do not tell
            # that, since its loop may have that of one which another thread has closed meanwhile.
            if len(new) < 2:
                self._add(new)
                return device
        raise CommunicationError(
            "hvdlite cannot identify gloo's listening socket, because other threads of this process keep opening gloo "
            "process groups: call hvd.init(), and take the first step of each optimizer, while no other thread opens "
            "one"
        )

    def _add(self, new: Mapping[int, int]) -> None:
        self._loops |= new
        if not new:
            warn_that(
                "operations with a lost rank last until their timeout, a network that is cut is not noticed, and ports "
                "stay open to connections of other programs, although their data are ignored: its sockets are not "
                "found in /proc/self/fdinfo. Mount /proc, or install the torch of an earlier job"
            )
        found = {address_in(each.getsockname()) for each, _ in self._sockets(_LISTEN)}
        self.addresses = tuple(sorted(found))

    def belong_to(self, group: Any, rank: int, size: int) -> None:
        """Name the process group whose operations `end_waits` ends. This keeps no reference to it."""
        self._group = weakref.ref(group)
        self._others = [other for other in range(size) if other != rank]

    @property
    def are_connected(self) -> bool:
        """Whether all ranks of the group are connected, as far as is known."""
        return not self._loops or len(list(self._sockets(_ESTABLISHED))) >= len(self._loops) * len(self._others)

    def close_listeners(self) -> None:
        """Drop all further packets to the group's listeners. (Gloo aborts the process where it finds one closed.)"""
        for each, _ in self._sockets(_LISTEN):
            try:
                _drop_all(each)
            except OSError as error:
                warn_that(
                    "its ports stay open to connections of other programs, although their data are ignored: packets "
                    f"cannot be filtered ({error})"
                )

    def end_waits(self) -> None:
        """End all operations in progress on the connections with an error, here and on the other ranks.

        It takes a few milliseconds. Data on their way may be lost.

        To shut down the sockets alone would not do. If an operation fails on one connection, gloo drops its buffers on
        the others. Where data for such a buffer arrive later, gloo reads nothing more from that connection, not even
        that it was shut down: other operations that wait for it would wait until their timeout. So this first waits for
        a message that no rank sends, from each rank in turn: gloo closes all connections when a wait has timed out. (It
        fails at once where the connection is closed already. After a shutdown gloo would still answer messages that
        came before, and block where it cannot.)

        Gloo does not end an operation of which a message could only be written or read in part before the connection
        closed: that one is blocked until its timeout, though nothing is transferred any more. (Gloo tells only those
        that wait for a message to begin.) `deferred_close.keep_until` keeps the group from being destroyed meanwhile.
        """
        group = self._group() if self._pid == os.getpid() else None
        self._group = lambda: None
        if group is not None:
            for tag, other in itertools.product(range(len(_interfaces())), self._others):  # the tag chooses the device
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], other, tag).wait(_AT_ONCE)
        self.shut_down()

    def shut_down(self) -> None:
        """Shut down the connections, before the group is destroyed. Data already sent still arrive.

        Without this, destroying a group waits for its operations in progress, up to their timeout if another rank never
        joins them.
        """
        for each, _ in self._sockets(_ESTABLISHED, _SYN_SENT):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._loops = {}

    def probe(self) -> None:
        """Has the kernel probe the connections from now on, so that `silences` knows of all."""
        for each, _ in self._sockets(_ESTABLISHED):
            with contextlib.suppress(OSError):  # it is being closed
                _probe(each)

    def silences(self) -> dict[str, float]:
        """Returns for how many seconds nothing has come from each other address, but none of less than 4 s.

        That is so where the other kernel has not answered since a connection was begun, and where it does not answer
        probes. Of several connections to an address that counts over which nothing has come for longest. A rank that
        computes, is stopped, or waits for another is not silent.
        """
        longest: dict[str, float] = {}
        unanswered: set[int] = set()
        for each, inode in self._sockets(_ESTABLISHED, _SYN_SENT):
            with contextlib.suppress(OSError):  # it is being closed
                if _state(each) == _SYN_SENT:
                    unanswered.add(inode)
                elif not each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    _probe(each)
                else:
                    other = address_in(each.getpeername())
                    longest[other] = max(_silence_s(each), longest.get(other, 0.0))
        # By the address, since gloo begins another attempt with another socket.
        now_s = time.monotonic()
        self._unanswered_since = {other: self._unanswered_since.get(other, now_s) for other in _others(unanswered)}
        longest |= {other: now_s - since_s for other, since_s in self._unanswered_since.items()}
        return {other: silent_s for other, silent_s in longest.items() if silent_s >= _SHORTEST_S}

    def drop_packets(self) -> int:
        """Drop all further packets from other hosts, as where the network is cut; returns of how many connections."""
        count = 0
        for each, _ in self._sockets(_ESTABLISHED):
            with contextlib.suppress(OSError):  # gloo has closed it meanwhile
                if each.getpeername()[0] != each.getsockname()[0]:
                    _drop_all(each)
                    count += 1
        return count

    def _sockets(self, *states: int) -> Iterator[tuple[socket.socket, int]]:
        """Yields each socket in these states, open until the next is asked for, and its inode."""
        for loop, listener in list(self._loops.items()) if self._pid == os.getpid() else ():
            # Gloo may have closed the loop; its number may then be another one's.
            if any(inode == listener for _, inode in _sockets_of(loop)):
                for each, inode in _sockets_of(loop):
                    if _state(each) in states:
                        yield each, inode


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def cut_links() -> int:
    """Drop all further packets from other hosts to this process's gloo connections, as where the network is cut.

    For faults on purpose: it cannot be undone, and later groups have new connections. Returns how many it has cut.
    """
    return sum(each.drop_packets() for each in list(_alive))


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, connections: Connections
) -> dist.ProcessGroupGloo:
    """Returns a gloo backend that connects to the other ranks when it is used; ``connections`` get its devices.

    It takes the interfaces of GLOO_SOCKET_IFNAME if that is set, as `dist.ProcessGroupGloo` does.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's own stubs lack it
    options._devices = [connections.make_device(interface) for interface in _interfaces()]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def own_addresses() -> tuple[str, ...]:
    """Returns the addresses at which gloo listens in this process, for which it makes devices that it drops again."""
    connections = Connections()
    _devices = [connections.make_device(interface) for interface in _interfaces()]
    return connections.addresses


def _interfaces() -> list[str]:
    """Returns the network interfaces that gloo uses, each for a device of its own; "" lets gloo choose one."""
    return [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each] or [""]


def open_proven(
    make: Callable[[Connections], ProcessGroup],
    discard: Callable[[ProcessGroup], object],
    ranks: ConnectingRanks,
    label: str,
    connections: Connections | None = None,
) -> tuple[ProcessGroup, Connections]:
    """Open a process group with ``make``, and prove that its CPU connections lead to these ranks.

    Returns the group and its connections, which the caller must shut down before it destroys the group. ``make`` must
    use `make_gloo` or `Connections.made_within`.

    Every rank must call it soon after `wait_for_all`, with a label that these ranks have not used before: so a stranger
    has only a few milliseconds to connect. If the proof fails it passes the group to ``discard``, and raises a
    CommunicationError that names the ranks whose connections lead elsewhere, or a RuntimeError if there is no
    connection.
    """
    connections = connections or Connections()
    with _room_for_strangers:
        group = make(connections)
        connections.belong_to(group, ranks.rank, ranks.size)
        try:
            _prove(group, ranks, label, connections)
        except BaseException:
            connections.shut_down()
            discard(group)
            raise
        connections.close_listeners()
    return group, connections


def _prove(group: Any, ranks: ConnectingRanks, label: str, connections: Connections) -> None:
    own, others = ranks.rank, range(ranks.size)
    signatures = b"".join(ranks.signer.sign("gloo", label, own, other) for other in others)
    counts = [TAG_BYTES] * ranks.size
    clock = _ProofClock(ranks, connections)
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=clock.limit_s + clock.patience_s)
    received, works = [], []
    failure: BaseException | None = None
    try:
        for _ in _interfaces():  # one after the other use the devices in turn
            sent = torch.frombuffer(bytearray(signatures), dtype=torch.uint8)
            received.append(torch.zeros(ranks.size * TAG_BYTES, dtype=torch.uint8, device="cpu"))
            works.append(group.alltoall_base(received[-1], sent, counts, counts, options))
        for work in works:
            ranks.ends.wait_until_over(work, clock.is_late, ranks.global_ranks, ranks.names)
    except CommunicationError as error:
        raise type(error)(f"{ranks.own_name} could not connect to the other ranks: {error}") from error
    except TimeoutError as error:
        failure = error
        if not connections.are_connected:
            raise RuntimeError(f"timed out connecting to the other ranks within {clock.limit_s:g} s") from error
    except RuntimeError as error:
        failure = error
        if _NOT_CONNECTED.search(str(error)):
            raise
    finally:
        if left := [work for work in works if not work.is_completed()]:
            keep_until(lambda: all(work.is_completed() for work in left), group)
    came = [[bytes(tag) for tag in each.view(ranks.size, TAG_BYTES).tolist()] for each in received]
    strange = [
        other
        for other in others
        if not all(ranks.signer.is_signed(each[other], "gloo", label, other, own) for each in came)
    ]
    if strange or failure is not None:
        is_silent = not any(any(each[other]) for each in came for other in strange)
        raise CommunicationError(_words(ranks, strange, is_silent, clock.patience_s, failure))


class _ProofClock:
    """How long a proof may take: as long as ranks may connect, and after that only as long as they may be apart."""

    def __init__(self, ranks: ConnectingRanks, connections: Connections) -> None:
        self.limit_s = ranks.init_timeout.left().total_seconds()
        self.patience_s = _PROOF_S + _PROOF_S_PER_RANK * ranks.size
        self._connections = connections
        self._until_s = time.monotonic() + self.limit_s
        self._is_connected = False

    def is_late(self) -> bool:
        now_s = time.monotonic()
        if not self._is_connected and self._connections.are_connected:
            self._is_connected, self._until_s = True, now_s + self.patience_s
        return now_s > self._until_s


def _words(
    ranks: ConnectingRanks, strange: Sequence[int], is_silent: bool, patience_s: float, failure: BaseException | None
) -> str:
    who = ", ".join(ranks.names[group_rank] for group_rank in strange[:8]) or "another rank"
    if is_silent:
        seen = f"no data signed with this job's key arrived within {patience_s:g} s"
    else:
        seen = "the data received from there are not signed with this job's key"
    line = str(failure or "").strip().partition("\n")[0]
    return (
        f"{ranks.own_name}: the connection to {who} does not lead there: {seen}. Either that rank has ended: "
        "look for its own error. Or another program connected to this host's port first: start the job again, and "
        f"check who else can reach this network{f' ({line})' if line else ''}"
    )


class _RoomForStrangers:
    """A context in which threads connect: the limit of open files is at the system's maximum.

    Gloo aborts the process when strangers have opened so many connections that no file is left. It keeps these
    connections, so the limit stays higher if there are many.
    """

    def __init__(self) -> None:
        self._lock = forks.lock_of_process()
        self._threads = 0
        self._files = (0, 0)
        self._room = 0  # how many more files the process could open before

    def leave_to_parent(self) -> None:
        self._threads = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._room = max(0, self._files[0] - _open_files())
                _allow_files(self._files[1], self._files[1])
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                soft, hard = self._files
                _allow_files(max(soft, min(hard, _open_files() + self._room // 2)), hard)


_room_for_strangers = _RoomForStrangers()
forks.when_forked(_room_for_strangers)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _allow_files(soft: int, hard: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@functools.cache
def warn_that(lost: str) -> None:
    """Warns once that this torch's gloo, or this system, does not do what is needed here."""
    log.warning("gloo of torch %s on this system: %s", torch.__version__, lost)


def _listeners() -> dict[int, int]:
    """Returns the inodes of the sockets that gloo listens on, each with the file descriptor of its event loop."""
    return {inode: loop for loop in _event_loops() for each, inode in _sockets_of(loop) if _state(each) == _LISTEN}


def _new_listeners(before: Collection[int]) -> dict[int, int]:
    """Returns the event loops with listeners other than these, each with its listener's inode."""
    return {loop: inode for inode, loop in _listeners().items() if inode not in before}


def _event_loops() -> set[int]:
    """Returns the file descriptors of this process's epoll instances; gloo has one for each device."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _sockets_of(loop: int) -> Iterator[tuple[socket.socket, int]]:
    """Yields each TCP socket that an epoll instance watches, open until the next is asked for, and its inode."""
    watched = []
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}", encoding="ascii") as info:
        watched = [line.split() for line in info if line.startswith("tfd:")]
    for _, number, *words in watched:
        with contextlib.suppress(OSError):
            own = os.dup(int(number))
            file = os.fstat(own)
            # What wakes gloo's loop is a pipe. Another thread may have closed the socket, and opened another file.
            if not stat.S_ISSOCK(file.st_mode) or _inode_in(words) not in (None, file.st_ino):
                os.close(own)
                continue
            with socket.socket(fileno=own) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    yield each, file.st_ino


def _inode_in(words: Sequence[str]) -> int | None:
    """Returns the inode that a line of an event loop's fdinfo names; None on systems where it names none."""
    return next((int(word[4:], 16) for word in words if word.startswith("ino:")), None)


def _state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _drop_all(to: socket.socket) -> None:
    # A classic BPF program of one instruction, "ret #0": keep 0 bytes of each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _probe(connection: socket.socket) -> None:
    """Has the kernel probe a connection from now on."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _silence_s(connection: socket.socket) -> float:
    """Returns for how many seconds nothing has come over a connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
    # An answer to a probe is an acknowledgement; but data may come without one.
    return float(min(_LAST_RECEIVED.unpack(info)) / 1000)


def _others(unanswered: Collection[int]) -> set[str]:
    """Returns the addresses to which these sockets begin to connect: only the kernel's table has them by then."""
    found = set()
    for name in ("tcp", "tcp6") if unanswered else ():
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as table:
            for line in itertools.islice(table, 1, None):
                _, _, other, state, *_ = words = line.split()
                if int(state, 16) == _SYN_SENT and int(words[_INODE]) in unanswered:
                    # Words of 32 bits, as they are in memory.
                    digits = other.partition(":")[0]
                    address = b"".join(
                        struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8)
                    )
                    family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                    found.add(address_in((socket.inet_ntop(family, address), 0)))
    return found


def address_in(name: tuple[str, int]) -> str:
    """Returns the address in a socket's name, in one form for IPv4 and none of a link's scope."""
    return name[0].removeprefix("::ffff:").partition("%")[0]
