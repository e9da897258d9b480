"""
Opens gloo process groups on authenticated connections: each is proven to lead to a rank of this job.

Gloo's listener accepts any peer that connects first and sends a number that is easy to guess, and it stays open as long
as the group. So `engine`, `runtime.connect_ranks` and `round_trips` open groups in these steps:

1. All ranks wait in the store until every one is ready (in `engine` by `wait_for_all`). So a stranger has only a few
   milliseconds to connect.
2. Gloo listens and connects (`make_gloo`, called within `open_proven`).
3. The kernel drops all further packets to the listeners, once the ranks have connected.
4. Each rank sends each other rank a signature with the job's key, which a stranger cannot make.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from .. import forks
from ..errors import CommunicationError
from ..log import log
from ..signing import TAG_BYTES, Signer
from .ends import Ends

# The longest that ranks may be apart after all have connected, even where many share few cores.
_PROOF_S, _PROOF_S_PER_RANK = 15.0, 0.25

# The shortest timeout that gloo takes.
_AT_ONCE = timedelta(milliseconds=1)

_SO_ATTACH_FILTER = 26  # linux: asm-generic/socket.h
_EPOLL_EVENTS_OF_GLOO = 0x19  # EPOLLIN | EPOLLERR | EPOLLHUP, the events of a socket in gloo's loops

# Retries in case another thread opens a listener at the same moment, which is rare.
_DEVICE_ATTEMPTS = 100

# A process group of torch.distributed, or its gloo backend alone.
ProcessGroup = TypeVar("ProcessGroup")


class InitTimeout:
    """The time that ranks wait for each other: one deadline for all of `hvd.init`, later a timeout for each wait."""

    def __init__(
        self, timeout: timedelta, clock: Callable[[], float] = time.monotonic, limit: timedelta | None = None
    ) -> None:
        """`hvd.init` begins now, and may take as long as ``limit``, or else as long as ``timeout``."""
        self.timeout = timeout
        self.limit = timeout if limit is None else min(timeout, limit)
        self._clock = clock
        self._until_s: float | None = clock() + self.limit.total_seconds()

    def left(self) -> timedelta:
        """Returns the timeout of the next wait: what remains, but at least 1 s (or ``timeout``, if that is shorter)."""
        if self._until_s is None:
            return self.timeout
        least_s = min(1.0, self.timeout.total_seconds())
        return timedelta(seconds=max(least_s, self._until_s - self._clock()))

    def end_of_init(self) -> None:
        """End the deadline of `hvd.init`: from now on each wait has the full timeout."""
        self._until_s = None


@dataclass(frozen=True, slots=True)
class ConnectingRanks:
    """The ranks that open process groups together.

    ``names`` are the ranks as messages name them, such as ``rank 3 (node2)``. Only these ranks have ``store`` and the
    key of ``signer``. ``init_timeout`` is how long they wait for each other, unless one of them is among ``ends``.
    ``numbers`` are their global ranks.
    """

    store: Store
    signer: Signer
    rank: int
    names: tuple[str, ...]
    init_timeout: InitTimeout
    ends: Ends = field(default_factory=Ends)
    numbers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.names)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str) -> ConnectingRanks:
        """Returns some of the ranks, with this one as ``group_rank``.

        ``token`` is equal on these ranks, and never used before.
        """
        return replace(
            self,
            store=PrefixStore(f"hvdlite.{token}", self.store),
            signer=self.signer.derive("among", token),
            rank=group_rank,
            names=tuple(self.names[each] for each in group_ranks),
            numbers=tuple(self.global_ranks[each] for each in group_ranks),
        )

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.numbers or tuple(range(self.size))

    def wait_until_set(self, store: Store, keys: Sequence[str]) -> None:
        """Block until the ranks have set these keys; a CommunicationError if one of them has ended or failed."""
        self.ends.wait_until_set(store, keys, self.init_timeout.left(), self.global_ranks, self.names)

    def store_wait(self) -> Callable[[Store, Sequence[str], timedelta], None]:
        """Returns what waits like `wait_until_set` in the operation of this thread, for gloo's threads."""
        operation = self.ends.operation
        return lambda store, keys, timeout: self.ends.wait_until_set(
            store, keys, timeout, self.global_ranks, self.names, operation
        )


def wait_for_all(ranks: ConnectingRanks, label: str) -> None:
    """Wait until all ranks have called this with this label; a CommunicationError names those that did not."""
    keys = [f"{label}/here/{group_rank}" for group_rank in range(ranks.size)]
    try:
        ranks.store.set(keys[ranks.rank], "1")
        ranks.wait_until_set(ranks.store, keys)
    except CommunicationError as error:
        raise type(error)(f"{ranks.names[ranks.rank]} could not connect to the other ranks: {error}") from error
    except RuntimeError as error:
        late = []
        with contextlib.suppress(RuntimeError):
            late = [name for name, key in zip(ranks.names, keys, strict=True) if not ranks.store.check([key])]
        raise CommunicationError(
            f"{ranks.names[ranks.rank]} could not connect to the other ranks within the timeout_s of hvd.init(). "
            f"Missing: {', '.join(late[:8]) or f'unknown ({error})'}; look at their output for the cause"
        ) from error


def open_proven(
    make: Callable[[Connections], ProcessGroup],
    discard: Callable[[ProcessGroup], object],
    ranks: ConnectingRanks,
    label: str,
    on_connected: Callable[[Connections], object] = lambda _: None,
) -> tuple[ProcessGroup, Connections]:
    """Open a process group with ``make``, and prove that its CPU connections lead to these ranks.

    Returns the group and its connections, which the caller must shut down before it destroys the group. If other
    threads of this process may open gloo groups at the same time, ``make`` must use `make_gloo`. ``on_connected`` gets
    the connections before they are proven.

    Every rank must call it soon after `wait_for_all`, with a label that these ranks have not used before. If the proof
    fails it passes the group to ``discard``, and raises a CommunicationError that names the ranks whose connections
    lead elsewhere.
    """
    with ranks.ends.connecting(ranks.global_ranks, ranks.names, ranks.rank):
        with _listener_filter.while_connecting() as connections:
            group = make(connections)
        connections.belong_to(group, ranks.rank, ranks.size)
        try:
            on_connected(connections)
            _prove(group, ranks, label)
        except BaseException:
            connections.cut()
            discard(group)
            raise
    return group, connections


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, connections: Connections
) -> dist.ProcessGroupGloo:
    """Returns a gloo backend connected to the other ranks, and adds its event loops to ``connections``.

    It takes the interfaces of GLOO_SOCKET_IFNAME if that is set, as `dist.ProcessGroupGloo` does.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's own stubs lack it
    options._devices = make_devices(connections)
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def make_devices(connections: Connections) -> list[dist.ProcessGroupGloo.Device]:
    """Returns new gloo devices, which listen at this process's addresses, and adds their loops to ``connections``."""
    return [_make_device(interface, connections) for interface in _interfaces()]


def _interfaces() -> list[str]:
    """Returns the network interfaces that gloo uses, each for a device of its own; "" lets gloo choose one."""
    return [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each] or [""]


def _make_device(interface: str, connections: Connections) -> dist.ProcessGroupGloo.Device:
    """Returns a new gloo device, whose event loop is added to ``connections``."""
    is_any_found = False
    for _ in range(_DEVICE_ATTEMPTS):
        before = _listeners()
        if interface:
            device = dist.ProcessGroupGloo.create_device(interface=interface)
        else:
            device = dist.ProcessGroupGloo.create_default_device()
        new = {inode: loop for inode, loop in _listeners().items() if inode not in before}
        # The new device's listener is one of them: a single new one must be its own. File descriptors do not tell that,
        # since its loop may have that of one which another thread has closed meanwhile.
        if len(new) == 1:
            connections.loops.update({loop: inode for inode, loop in new.items()})
            return device
        is_any_found = is_any_found or bool(new)
    if not is_any_found:
        raise CommunicationError(
            f"hvdlite does not find the socket on which gloo of torch {torch.__version__} listens, in "
            "/proc/self/fdinfo: so it cannot prove that connections lead to ranks of this job, end waits for a lost "
            "rank, or see that a network is cut. Mount /proc, or install another version of torch: that of an earlier "
            "job, if this one is new"
        )
    raise CommunicationError(
        "hvdlite cannot identify gloo's listening socket, because other threads of this process keep opening gloo "
        "process groups: call hvd.init(), and take the first step of each optimizer, while no other thread opens one"
    )


def _prove(group: Any, ranks: ConnectingRanks, label: str) -> None:
    own, others = ranks.rank, range(ranks.size)
    signatures = b"".join(ranks.signer.sign("gloo", label, own, other) for other in others)
    received = torch.zeros(ranks.size * TAG_BYTES, dtype=torch.uint8, device="cpu")
    counts = [TAG_BYTES] * ranks.size
    patience_s = _PROOF_S + _PROOF_S_PER_RANK * ranks.size
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=patience_s)
    failure = None
    try:
        sent = torch.frombuffer(bytearray(signatures), dtype=torch.uint8)
        group.alltoall_base(received, sent, counts, counts, options).wait()
    except RuntimeError as error:
        failure = error
    data = bytes(received.tolist())
    came = [data[other * TAG_BYTES : (other + 1) * TAG_BYTES] for other in others]
    strange = [other for other in others if not ranks.signer.is_signed(came[other], "gloo", label, other, own)]
    if strange or failure is not None:
        raise CommunicationError(_words(ranks, strange, [came[other] for other in strange], patience_s, failure))


def _words(
    ranks: ConnectingRanks,
    strange: Sequence[int],
    came: Sequence[bytes],
    patience_s: float,
    failure: RuntimeError | None,
) -> str:
    who = ", ".join(ranks.names[group_rank] for group_rank in strange[:8]) or "another rank"
    if any(any(each) for each in came):
        seen = "the data received from there are not signed with this job's key"
    else:
        seen = f"no data signed with this job's key arrived within {patience_s:g} s"
    line = "" if failure is None else f" ({str(failure).strip().partition(chr(10))[0]})"
    return (
        f"{ranks.names[ranks.rank]}: the connection to {who} does not lead there: {seen}. Either that rank has ended: "
        "look for its own error. Or another program connected to this host's port first: start the job again, and "
        f"check who else can reach this network{line}"
    )


class Connections:
    """The connections of one gloo process group, identified by the inode numbers of their sockets."""

    def __init__(self) -> None:
        # File descriptors of the devices' event loops, each with the inode of its listener; empty without `make_gloo`.
        self.loops: dict[int, int] = {}
        self.inodes: set[int] = set()
        self._pid = os.getpid()
        # Ends gloo's own waits; see `belong_to`.
        self._time_out: Callable[[], None] = lambda: None

    def belong_to(self, group: Any, rank: int, size: int) -> None:
        """Name the process group whose operations `cut` ends. This keeps no reference to it."""
        of_group = weakref.ref(group)
        others = [other for other in range(size) if other != rank]

        def time_out() -> None:
            alive = of_group()
            if alive is not None:
                _time_out(alive, others)

        self._time_out = time_out

    def cut(self) -> None:
        """End all operations in progress on the connections with an error, here and on the other ranks.

        It takes a few milliseconds. Data on their way may be lost.

        Gloo does not end an operation of which a message could only be written or read in part before the connection
        closed: that one is blocked until its timeout, though nothing is transferred any more. (Gloo tells only those
        that wait for a message to begin.) `deferred_close.keep_until` keeps the group from being destroyed meanwhile.
        """
        if self._pid == os.getpid():
            time_out, self._time_out = self._time_out, lambda: None
            time_out()
        self.shut_down()

    def shut_down(self) -> None:
        """Shut down the connections, before the group is destroyed. Data already sent still arrive.

        Without this, destroying a group waits for its operations in progress, up to their timeout if another rank never
        joins them.
        """
        for connection in self.sockets():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.inodes.clear()

    def sockets(self) -> Iterator[socket.socket]:
        """Yields each connected socket, which is open until the next is asked for; none in a forked child.

        A child inherits the connections, but only its parent may change them.
        """
        is_own = self.inodes and self._pid == os.getpid()
        for name in os.listdir("/proc/self/fd") if is_own else ():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/self/fd/{name}").st_ino in self.inodes:
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        # Another thread may have closed that one meanwhile, and opened another.
                        if os.fstat(connection.fileno()).st_ino in self.inodes:
                            yield connection


def _time_out(group: Any, others: Sequence[int]) -> None:
    """Make gloo close all connections of the group, which it does when a wait has timed out.

    To shut down the sockets alone would not do. If an operation fails on one connection, gloo drops its buffers on the
    others. Where data for such a buffer arrive later, gloo reads nothing more from that connection, not even that it
    was shut down: other operations that wait for it would wait until their timeout.

    So this waits for a message that no rank sends, from each rank in turn: it fails at once where the connection is
    closed already. (It is also done first: after a shutdown gloo would still answer messages that came before, and
    block where it cannot.)
    """
    for tag in range(len(_interfaces())):  # a message's tag chooses the device
        for other in others:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], other, tag).wait(_AT_ONCE)


class _ListenerFilter:
    """Closes gloo's listeners to further connections once the ranks have connected.

    For a group made by `make_gloo` the listeners are known. For any other group they are the new ones, closed only when
    no thread of this process is connecting any more: closing one too early would leave its ranks waiting.

    While threads connect, the limit of open files is at the system's maximum, because gloo aborts the process when
    strangers have opened so many connections that no file is left. Gloo keeps these connections, so the limit stays
    higher if there are many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connecting = 0
        self._had_company = False
        # Whether a group was opened without `make_gloo`, so that its listeners are not known yet.
        self._has_unknown = False
        self._before: set[int] = set()  # the listeners, by their inodes
        self._files = (0, 0)
        self._room = 0  # how many more files the process could open before

    def leave_to_parent(self) -> None:
        self._lock, self._connecting, self._has_unknown = threading.Lock(), 0, False

    def loops_connecting(self) -> list[int]:
        """Returns the event loops of the groups that threads are opening; see the function of this name."""
        with self._lock:
            listeners = _listeners() if self._connecting else {}
            return [loop for listener, loop in listeners.items() if listener not in self._before]

    @contextlib.contextmanager
    def while_connecting(self) -> Iterator[Connections]:
        """Yield a `Connections`, which is filled at the end with those that gloo has made in the block.

        Without `make_gloo` it stays empty if other threads connected at the same time.
        """
        connections = Connections()
        with self._lock:
            self._had_company = self._connecting > 0
            if self._connecting == 0:
                self._before = set(_listeners())
                self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._room = max(0, self._files[0] - _open_files())
                _allow_files(self._files[1], self._files[1])
            self._connecting += 1
        try:
            yield connections
        finally:
            with self._lock:
                self._connecting -= 1
                listeners = _listeners()
                for loop, listener in connections.loops.items():
                    # Not if the group could not be made: its loop is closed, and may be another one's by now.
                    if listeners.get(listener) == loop:
                        connections.inodes |= _filter_listeners(loop)
                self._has_unknown |= not connections.loops
                if self._connecting == 0:
                    if self._has_unknown:
                        loops = {loop for listener, loop in listeners.items() if listener not in self._before}
                        connected = {inode for loop in loops for inode in _filter_listeners(loop)}
                        if not self._had_company:
                            connections.inodes |= connected
                    self._has_unknown = False
                    soft, hard = self._files
                    _allow_files(max(soft, min(hard, _open_files() + self._room // 2)), hard)


_listener_filter = _ListenerFilter()
forks.when_forked(_listener_filter)


def _event_loops() -> set[int]:
    """Returns the file descriptors of this process's epoll instances; gloo has one for each device."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _listeners() -> dict[int, int]:
    """Returns the inodes of the sockets that gloo listens on, each with the file descriptor of its event loop."""
    return {inode: loop for loop in _event_loops() for _, inode, listens in sockets_of(loop) if listens}


def loops_connecting() -> list[int]:
    """Returns the file descriptors of the event loops of the groups that threads of this process are opening now."""
    return _listener_filter.loops_connecting()


def sockets_of(loop: int, *, also_unconnected: bool = False) -> Iterator[tuple[socket.socket, int, bool]]:
    """Yields each socket of this gloo loop, open until the next is asked for; its inode; and whether it listens.

    ``also_unconnected``: those too that are about to connect, of which a pair of ranks has not been told yet.
    """
    watched = []
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}", encoding="ascii") as info:
        watched = [line.split() for line in info if line.startswith("tfd:")]
    for _, fd, _, mask, *rest in watched:
        if int(mask, 16) != _EPOLL_EVENTS_OF_GLOO and not also_unconnected:
            continue
        with contextlib.suppress(OSError):
            file = os.fstat(int(fd))
            # What wakes gloo's loop is a pipe. Another thread may have closed the socket, and opened another file.
            if stat.S_ISSOCK(file.st_mode) and _inode_in(rest) in (None, file.st_ino):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    yield each, file.st_ino, bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _inode_in(words: Sequence[str]) -> int | None:
    """Returns the inode that a line of an event loop's fdinfo names; None on systems where it names none."""
    return next((int(word[4:], 16) for word in words if word.startswith("ino:")), None)


def _filter_listeners(loop: int) -> set[int]:
    """Drop further packets to the listening sockets of this gloo loop; returns the inodes of its connected sockets.

    It does not close the listeners: gloo owns them, and aborts the process where it finds one closed.
    """
    connected = set()
    for each, inode, listens in sockets_of(loop):
        if listens:
            _drop_all(each)
        else:
            connected.add(inode)
    return connected


def cut_links() -> int:
    """Drop all further packets from other hosts to this process's gloo connections, as where the network is cut.

    For faults on purpose: it cannot be undone, and later groups have new connections. Returns how many it has cut.
    """
    count = 0
    for loop in _event_loops():
        for each, _, listens in sockets_of(loop):
            with contextlib.suppress(OSError):  # gloo has closed it meanwhile
                is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and not listens
                if is_tcp and each.getpeername()[0] != each.getsockname()[0]:
                    _attach_filter(each)
                    count += 1
    return count


def _attach_filter(to: socket.socket) -> None:
    # A classic BPF program of one instruction, "ret #0": keep 0 bytes of each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _drop_all(listener: socket.socket) -> None:
    try:
        _attach_filter(listener)
    except OSError as error:
        log.warning(
            "gloo's port %s stays open to connections of other programs, although their data are ignored: this system "
            "cannot filter packets (%s)",
            listener.getsockname()[:2],
            error,
        )


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _allow_files(soft: int, hard: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
