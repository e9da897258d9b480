"""
Opens gloo process groups whose connections are authenticated: each has proven to lead to a rank of this job.

    all are here (store) ── gloo listens and connects ── signatures between every two ranks ── nobody else gets in

Gloo's listener takes whoever connects first and names a number that is easily guessed, and it listens for as long as
the group is there. So the ranks connect only once all of them are there, which leaves a stranger a few milliseconds;
each sends each other a signature with the job's key, which a stranger cannot make; and once they are connected the
system drops whatever else comes for the listener.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from ..errors import CommunicationError
from ..log import log
from ..signing import TAG_BYTES, Signer

# Ranks that have all connected are at most so far apart, also where many share few cores.
_PROOF_S, _PROOF_S_PER_RANK = 15.0, 0.25

_SO_ATTACH_FILTER = 26  # linux: asm-generic/socket.h
_EPOLL_EVENTS_OF_GLOO = 0x19  # EPOLLIN | EPOLLERR | EPOLLHUP: what its loops watch a socket for

# One of torch.distributed's, or its gloo backend by itself.
ProcessGroup = TypeVar("ProcessGroup")


class InitTimeout:
    """How long ranks wait for each other: a time for each wait, and during `hvd.init` one for all waits together."""

    def __init__(self, timeout: timedelta, clock: Callable[[], float] = time.monotonic) -> None:
        """`hvd.init` begins now."""
        self.timeout = timeout
        self._clock = clock
        self._until_s: float | None = clock() + timeout.total_seconds()

    def left(self) -> timedelta:
        """The timeout of the next wait: what is left, but at least 1 s (or all of it, if that is shorter)."""
        if self._until_s is None:
            return self.timeout
        least_s = min(1.0, self.timeout.total_seconds())
        return timedelta(seconds=max(least_s, self._until_s - self._clock()))

    def end_of_init(self) -> None:
        """Each wait has a time of its own from now on."""
        self._until_s = None


@dataclass(frozen=True, slots=True)
class ConnectingRanks:
    """Ranks that open process groups together.

    ``names`` are what messages call them, such as ``rank 3 (node2)``; ``store`` and the key of ``signer`` are theirs
    alone. ``init_timeout`` is how long they wait for each other.
    """

    store: Store
    signer: Signer
    rank: int
    names: tuple[str, ...]
    init_timeout: InitTimeout

    @property
    def size(self) -> int:
        return len(self.names)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str) -> ConnectingRanks:
        """Some of them, this one their ``group_rank``th; ``token`` is equal on these ranks, and never used before."""
        return replace(
            self,
            store=PrefixStore(f"hvdlite.{token}", self.store),
            signer=self.signer.derive("among", token),
            rank=group_rank,
            names=tuple(self.names[each] for each in group_ranks),
        )


def wait_for_all(ranks: ConnectingRanks, label: str) -> None:
    """Wait until all ranks have called this with this label; a CommunicationError names those that do not come."""
    keys = [f"{label}/here/{group_rank}" for group_rank in range(ranks.size)]
    try:
        ranks.store.set(keys[ranks.rank], "1")
        ranks.store.wait(keys, ranks.init_timeout.left())
    except RuntimeError as error:
        late = []
        with contextlib.suppress(RuntimeError):
            late = [name for name, key in zip(ranks.names, keys, strict=True) if not ranks.store.check([key])]
        raise CommunicationError(
            f"{ranks.names[ranks.rank]} waited in vain to connect to the other ranks, for as long as its timeout_s: "
            f"not all have come: {', '.join(late[:8]) or error}"
        ) from error


def open_proven(
    make: Callable[[], ProcessGroup], discard: Callable[[ProcessGroup], object], ranks: ConnectingRanks, label: str
) -> tuple[ProcessGroup, Connections]:
    """The process group that ``make`` gives, once all its connections between CPUs have proven to lead to these ranks.

    With it, these connections, to be cut before the group is destroyed.

    Every rank must call it, soon after `wait_for_all`, with a label that it has not used for these ranks before. A
    CommunicationError names the ranks whose places others have taken; ``discard`` has been given the group then.
    """
    with _doors.open_meanwhile() as connections:
        group = make()
    try:
        _prove(group, ranks, label)
    except BaseException:
        connections.cut()
        discard(group)
        raise
    return group, connections


def _prove(group: Any, ranks: ConnectingRanks, label: str) -> None:
    own, others = ranks.rank, range(ranks.size)
    signatures = b"".join(ranks.signer.sign("gloo", label, own, other) for other in others)
    received = torch.zeros(ranks.size * TAG_BYTES, dtype=torch.uint8)
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
        seen = "what came in its name is not signed with this job's key"
    else:
        seen = f"within {patience_s:g} s nothing came that is signed with this job's key"
    line = "" if failure is None else f" ({str(failure).strip().partition(chr(10))[0]})"
    return (
        f"{ranks.names[ranks.rank]} has a connection in the place of {who} that does not lead there: {seen}. Another "
        "program has connected first, which anybody can who reaches this host's ports, or that rank has ended: look "
        f"for its own error, start the job again, and see who else is on this network{line}"
    )


class Connections:
    """The connections of one process group of gloo's, known by the numbers that the system gives to sockets."""

    def __init__(self) -> None:
        self.inodes: set[int] = set()
        self._pid = os.getpid()

    def cut(self) -> None:
        """End what is under way on them with an error, here and on the other ranks.

        Destroying a group waits for what is under way on it, which may be as long as its timeout where another rank
        never comes. What has been sent still arrives.
        """
        # A forked child has the same connections, and they are its parent's to end.
        is_own = self.inodes and self._pid == os.getpid()
        for name in os.listdir("/proc/self/fd") if is_own else ():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/self/fd/{name}").st_ino in self.inodes:
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
        self.inodes.clear()


class _Doors:
    """Closes gloo's listeners once nobody in this process is connecting any more.

    Which of them belongs to whom cannot be told, and one that is closed too early would leave its ranks waiting.
    Meanwhile this process may have as many open files as the system allows it: gloo aborts it where strangers have
    connected so often that there are no more. It keeps their connections: the limit stays higher where they are many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connecting = 0
        self._had_company = False
        self._before: set[int] = set()
        self._files = (0, 0)
        self._room = 0  # how many files more the process could have opened

    @contextlib.contextmanager
    def open_meanwhile(self) -> Iterator[Connections]:
        """Yield the connections that gloo makes inside, filled in at the end; none if others connected meanwhile."""
        connections = Connections()
        with self._lock:
            self._had_company = self._connecting > 0
            if self._connecting == 0:
                self._before = _event_loops()
                self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._room = max(0, self._files[0] - _open_files())
                _allow_files(self._files[1], self._files[1])
            self._connecting += 1
        try:
            yield connections
        finally:
            with self._lock:
                self._connecting -= 1
                if self._connecting == 0:
                    connected = {inode for loop in _event_loops() - self._before for inode in _close_door(loop)}
                    if not self._had_company:
                        connections.inodes |= connected
                    soft, hard = self._files
                    _allow_files(max(soft, min(hard, _open_files() + self._room // 2)), hard)


_doors = _Doors()


def _event_loops() -> set[int]:
    """The file descriptors of this process's epoll instances: gloo has one for each of its devices."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _close_door(loop: int) -> set[int]:
    """Have the system drop what comes for the sockets that listen in this loop of gloo's; those that are connected.

    Closing them is gloo's, which aborts the process where it finds one closed.
    """
    connected = set()
    watched = []
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}", encoding="ascii") as info:
        watched = [line.split() for line in info if line.startswith("tfd:")]
    for _, fd, _, events, *_ in watched:
        if int(events, 16) == _EPOLL_EVENTS_OF_GLOO:
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                    continue  # a pipe, by which gloo wakes its loop
                with socket.socket(fileno=os.dup(int(fd))) as watched_socket:
                    if watched_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        _drop_all(watched_socket)
                    else:
                        connected.add(os.fstat(watched_socket.fileno()).st_ino)
    return connected


def _drop_all(listener: socket.socket) -> None:
    # A classic BPF program of one instruction: "ret #0", of a packet keep no byte.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError as error:
        log.warning(
            "gloo's port %s goes on taking connections, which carry nothing: this system does not filter packets (%s)",
            listener.getsockname()[:2],
            error,
        )


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _allow_files(soft: int, hard: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
