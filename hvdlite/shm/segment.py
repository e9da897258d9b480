"""
Shared memory between the ranks of a host: allocates this rank's memory, and maps the other ranks'.

`Segment.allocate` returns a `Piece` of this rank's file. The rank sends its offset to the others, which map it with
`Segment.see`. The file is in /dev/shm and never has a name: other ranks open it through the file descriptor of the
process that made it. So it disappears when the last process that has mapped it ends, even in a crash, and no other user
can open it. A piece's memory is freed when nothing refers to it any more; a permanent piece is freed with the file.

A forked child gets private copies of this rank's pieces that are not permanent, at the same addresses: gradients are in
them, to which autograd adds in place. Of all others only the engine makes use, which does nothing in a child.

`KeptMemory` keeps a segment from one generation of an elastic job to the next, where steps survive the loss of a rank:
pages of shared memory that are touched for the first time cost more than the sums in them.

    world ends: engines closed ── wait_until_quiet ── hvdlite-run is asked for a rank ── begin(pids) ── engines open

Memory may be used again only if no process can still write to it as in the generation before. Of the ranks of the new
generation none can: each has waited for its own threads before it asked for its rank, and hvdlite-run publishes the
generation only when all have asked. Of all others it is checked here that they have ended, or that all their threads
are exiting; if one has not, because it was given up while it ran, everything begins with new memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import select
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hvdlite_wire.linux import exit_statuses
from torch import Tensor

from .. import forks

DIRECTORY = "/dev/shm"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_MAP_FIXED = 0x10
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value

# The most staging slots kept; an engine that is opened when all are in use brings its own.
_MOST_SLOTS = 8


class NoMemoryError(RuntimeError):
    """Raised where there is not enough shared memory, or none; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A mapped part of one rank's file; its offset and length are multiples of the page size."""

    offset: int
    memory: ctypes.Array[ctypes.c_ubyte]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Address:
    """The process and file descriptor through which other processes of the same user can open a file.

    ``token`` tells the file from one that a later process with the same pid has.
    """

    pid: int
    fd: int
    token: int = 0


class Segment:
    """This rank's shared memory, which grows and shrinks, and its mappings of the other ranks' memory."""

    def __init__(self) -> None:
        """Raises a NoMemoryError if this machine has no shared memory."""
        try:
            self._fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoMemoryError(f"{DIRECTORY}: {error.strerror}") from error
        self.address = Address(os.getpid(), self._fd, secrets.randbits(63))
        self._size = 0
        # How many pieces have been freed.
        self.freed = 0
        # Set by the engine once it has warned that there is not enough memory.
        self.is_short = False
        self._fds = {self.address: self._fd}
        # This rank's pieces as (pointer, offset, bytes), ascending. Replaced at each change, and never modified, since
        # any thread may call `find`.
        self._pieces: list[tuple[int, int, int]] = []
        # Pieces that nothing refers to, to be freed later: the garbage collector may find one at any point.
        self._returned: deque[tuple[int, int, int]] = deque()
        # Not an RLock: the garbage collector may run in the middle of a block that holds it.
        self._lock = threading.Lock()
        weakref.finalize(self, close_all, self._fds).atexit = False
        forks.when_forked(self)

    def allocate(self, nbytes: int, *, is_permanent: bool = False, populates: bool = True) -> Piece:
        """Returns new memory, all zeros, or raises a NoMemoryError; ``populates`` is as in `see`.

        A piece that others may read after this rank has moved on must be ``is_permanent``: it lasts like the file.
        """
        length = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._held():
            if not self._fds:
                raise NoMemoryError("the shared memory was closed before")
            offset = self._size
            try:
                # Reserved now: if memory were missing at the first write, a SIGBUS would end the process.
                os.posix_fallocate(self._fd, offset, length)
                piece = _map(self._fd, offset, length, unmaps=is_permanent, populates=populates)
            except (OSError, ValueError) as error:
                os.ftruncate(self._fd, offset)
                reason = getattr(error, "strerror", None) or str(error)
                if getattr(error, "errno", None) == errno.EFBIG:
                    reason = "this process may write no larger files: raise the limit with ulimit -f"
                raise NoMemoryError(
                    f"cannot allocate {length / 2**20:.1f} MiB more in {DIRECTORY} of {_mib_in_all():.1f} MiB: {reason}"
                ) from error
            self._size += length
            if is_permanent:
                return piece
            known = (piece.tensor.data_ptr(), offset, length)
            self._pieces = sorted([*self._pieces, known])
            weakref.finalize(piece.memory, self._give_back, known).atexit = False
        return piece

    def take_slots(self, nbytes: int) -> Piece | None:
        """Returns memory that is kept for an engine's staging slots; None if there is none."""
        return None

    def find(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """Returns the piece (offset, bytes) that a contiguous tensor is in, and its position there; None if in none."""
        pieces, pointer = self._pieces, tensor.data_ptr()
        index = bisect_right(pieces, (pointer, self._size, 0)) - 1
        if index < 0:
            return None
        start, offset, nbytes = pieces[index]
        within = pointer - start
        return (offset, nbytes, within) if within + tensor.numel() * tensor.element_size() <= nbytes else None

    def see(self, address: Address, offset: int, nbytes: int, *, populates: bool = True) -> Piece:
        """Maps a piece of a rank's file; a NoMemoryError if that cannot be opened, is another user's, or is too short.

        Unless it ``populates`` all pages at once, `populate` does so for those that are used.
        """
        with self._held():
            fd = self._fds.get(address)
            if fd is None:
                try:
                    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise NoMemoryError(f"the memory of process {address.pid} cannot be opened: {error}") from error
                if os.fstat(fd).st_uid != os.geteuid():
                    # The sender of this address may not be a rank of the job.
                    os.close(fd)
                    raise NoMemoryError(f"process {address.pid} belongs to another user")
                self._fds[address] = fd
            if os.fstat(fd).st_size < offset + nbytes:
                # Reading beyond the end of the file would end this process by a signal.
                raise NoMemoryError(
                    f"the file {address.fd} of process {address.pid} is shorter than that process announced"
                )
            return _map(fd, offset, nbytes, unmaps=True, populates=populates)

    def unsee(self, address: Address, piece: Piece) -> None:
        """Drops what is kept of a piece that `see` returned: it is unmapped when nothing else refers to it."""

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        """Closes the files of other processes that are gone, by their pids. Existing mappings stay."""
        with self._held():
            for address in [each for each in self._fds if each != self.address and is_gone(each.pid)]:
                os.close(self._fds.pop(address))

    def close(self) -> None:
        """Close the files: nothing more can be allocated or mapped. Existing mappings stay."""
        with self._held():
            close_all(self._fds)

    def leave_to_parent(self) -> None:
        self._lock = threading.Lock()
        fd = self._fd if self._fds else None
        for pointer, offset, length in self._pieces:
            _make_private(pointer, length, fd, offset)
        close_all(self._fds)

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            # Pieces returned while the lock was held were left for its holder to free.
            self._take_back()

    def _give_back(self, known: tuple[int, int, int]) -> None:
        """Finalizer of a piece, which the garbage collector may call in any thread at any point."""
        self._returned.append(known)
        self._take_back()

    def _take_back(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._free(self._returned.popleft())
            finally:
                self._lock.release()

    def _free(self, known: tuple[int, int, int]) -> None:
        pointer, offset, length = known
        # First, so that `find` does not take the next mapping at this address for this piece.
        self._pieces = [piece for piece in self._pieces if piece != known]
        self.freed += 1
        # Other ranks then read zeros there. In a forked child the file is closed: its memory is the parent's.
        if self._fds:
            _libc.fallocate(self._fd, _PUNCH_HOLE, offset, length)
        _libc.munmap(pointer, length)


class KeptSegment(Segment):
    """A segment that outlives its engines, with its mappings of other ranks' memory."""

    def __init__(self) -> None:
        super().__init__()
        # The mappings that were asked for in this generation and in the one before; older ones are dropped.
        self._seen: dict[tuple[Address, int, int], Piece] = {}
        self._seen_before: dict[tuple[Address, int, int], Piece] = {}
        self._slots: list[Piece] = []
        self._slots_in_use = 0

    def see(self, address: Address, offset: int, nbytes: int, *, populates: bool = True) -> Piece:
        key = (address, offset, nbytes)
        piece = self._seen.get(key) or self._seen_before.get(key)
        if piece is None:
            piece = super().see(address, offset, nbytes, populates=populates)
        self._seen[key] = piece
        return piece

    def unsee(self, address: Address, piece: Piece) -> None:
        key = (address, piece.offset, len(piece.memory))
        self._seen.pop(key, None)
        self._seen_before.pop(key, None)

    def take_slots(self, nbytes: int) -> Piece | None:
        """Returns the memory of an engine's staging slots, with anything in it; None if the kept ones are in use."""
        with self._held():
            number, self._slots_in_use = self._slots_in_use, self._slots_in_use + 1
        if number >= _MOST_SLOTS:
            return None
        # Several are missing where there was no memory for those of an earlier engine.
        while number >= len(self._slots):
            self._slots.append(self.allocate(nbytes, is_permanent=True, populates=False))
        return self._slots[number]

    def begin(self, is_gone: Callable[[int], bool]) -> None:
        """Begins a generation: drops the mappings of processes that are gone, and takes all slots back."""
        self._seen_before = {key: piece for key, piece in self._seen.items() if not is_gone(key[0].pid)}
        self._seen = {}
        self._slots_in_use = 0
        self.forget(is_gone)


class KeptMemory:
    """This process's kept segment, and the processes that may have mapped it. For the main thread."""

    def __init__(self) -> None:
        self._segment: KeptSegment | None = None
        # Pidfds by pid, of all processes that were ranks of this host while there was this segment.
        self._users: dict[int, int] = {}
        self._closed: list[Callable[[], None]] = []

    def segment(self) -> KeptSegment:
        """Returns the segment of this generation; raises a NoMemoryError if this machine has no shared memory."""
        if self._segment is None:
            self._segment = KeptSegment()
        return self._segment

    def add_closed(self, wait_until_quiet: Callable[[], None]) -> None:
        """Adds an engine that was closed, whose threads may still write to the memory of other ranks."""
        self._closed.append(wait_until_quiet)

    def wait_until_quiet(self) -> None:
        """Waits until no thread of this process writes to the memory of other ranks any more."""
        while self._closed:
            self._closed.pop()()

    def begin(self, pids: Collection[int]) -> None:
        """Begins a generation with these processes on this host, before any engine is opened."""
        ended = self._ended()
        if any(pid not in ended and pid not in pids for pid in self._users):
            self.close()
        if self._segment is not None:
            self._segment.begin(lambda pid: pid in ended or pid not in pids)
        for pid in ended.intersection(self._users):
            os.close(self._users.pop(pid))
        for pid in pids:
            if pid not in self._users and pid != os.getpid():
                try:
                    self._users[pid] = os.pidfd_open(pid)
                except OSError:  # it has ended already, or is in another container, and then maps nothing
                    continue

    def close(self) -> None:
        """Gives the memory up: engines and tensors that have some keep it."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
        users, self._users = self._users, {}
        for fd in users.values():
            os.close(fd)

    def _ended(self) -> set[int]:
        poll = select.poll()
        for fd in self._users.values():
            poll.register(fd, select.POLLIN)
        readable = {fd for fd, _ in poll.poll(0)} if self._users else set()
        # In this order: a pidfd that is not readable keeps the number from being given to another process until then.
        return {pid for pid, fd in self._users.items() if fd in readable or exit_statuses(pid)}


def _mib_in_all() -> float:
    status = os.statvfs(DIRECTORY)
    return status.f_blocks * status.f_frsize / 2**20


def close_all(fds: dict[Any, int]) -> None:
    """Closes these file descriptors, and removes them from the dict."""
    # One by one: if two threads close at once, each closes what the other has not, and never a file that was opened
    # since.
    while fds:
        with contextlib.suppress(KeyError):
            os.close(fds.popitem()[1])


def populate(part: Tensor) -> None:
    """Map all pages of a part of a piece at once. Before Linux 5.14 it does nothing: they are mapped at first use."""
    start = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(start, part.data_ptr() + part.nbytes - start, _POPULATE_WRITE)


def _map(fd: int, offset: int, length: int, *, unmaps: bool, populates: bool = True) -> Piece:
    """Map a piece of a file; it ``unmaps`` itself when nothing refers to it any more, or the caller has to do it."""
    # Populated, since page faults one by one would take longer than the first use itself. Not Python's mmap, which
    # keeps a file descriptor open for each piece of each rank.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populates else 0)
    address = _mapped(None, length, flags, fd, offset)
    memory = (ctypes.c_ubyte * length).from_address(address)
    if unmaps:
        weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return Piece(offset, memory, torch.frombuffer(memory, dtype=torch.uint8))


def _mapped(at: int | None, length: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    return _checked(_libc.mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset))


def _checked(address: int) -> int:
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _make_private(pointer: int, length: int, fd: int | None, offset: int) -> None:
    """Has what is written to a mapped piece from now on stay in this process.

    Pages are copied when they are written to, so that workers of a DataLoader do not each take the gradients' memory.
    """
    try:
        if fd is not None:
            _mapped(pointer, length, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)
        else:
            # The file was closed, by hvd.shutdown(), and the gradients are still there.
            copy = _mapped(None, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            ctypes.memmove(copy, pointer, length)
            _checked(_libc.mremap(copy, length, length, _MOVE_TO, pointer))
    except OSError:
        # Rather a child that ends by a signal than one that changes its parent's gradients.
        _libc.mprotect(pointer, length, mmap.PROT_READ)
        raise
