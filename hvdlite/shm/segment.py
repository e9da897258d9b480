"""
Shared memory between the ranks of a host: allocates this rank's, and maps that of the others.

    Segment.allocate ── a Piece of this rank's file ── its offset, told to others ── Segment.see

A file in /dev/shm that never has a name: other ranks open it through the file descriptor of the process that made it.
So it is gone when the last process that has mapped it is, however that ends, and no other user can open it. A piece's
memory is given back when nothing refers to it any more, or with the file, if others may still look at it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTORY = "/dev/shm"
_PUNCH_HOLE = 1 | 2  # and keep the size

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class NoMemoryError(RuntimeError):
    """There is not as much shared memory as was asked for, or none at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one rank's file, mapped; its offset and length are multiples of the page size."""

    offset: int
    memory: ctypes.Array[ctypes.c_ubyte]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process's file can be opened by others of the same user."""

    pid: int
    fd: int


class Segment:
    """This rank's shared memory, which grows and shrinks, and other ranks' as far as it has been looked at."""

    def __init__(self) -> None:
        """A NoMemoryError where there is none to be had."""
        try:
            self._fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoMemoryError(f"{DIRECTORY}: {error.strerror}") from error
        self.address = Address(os.getpid(), self._fd)
        self._size = 0
        # Whether somebody asked for more than there is, and so it has been told.
        self.is_short = False
        self._fds = {self.address: self._fd}
        # Where this rank's pieces begin in its own memory, ascending: (pointer, offset, bytes). Made anew for each
        # change, since `find` is called by any thread.
        self._pieces: list[tuple[int, int, int]] = []
        # What nothing refers to any more, until it is taken back: the collector finds it in the middle of anything.
        self._returned: deque[tuple[int, int, int]] = deque()
        # Not one that its holder can take again: the collector comes in the middle of what is done under it.
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._fds).atexit = False

    def allocate(self, nbytes: int, *, is_permanent: bool = False) -> Piece:
        """More memory, all zero. A NoMemoryError where there is not as much.

        What others may read after this rank has gone on, or has ended, ``is_permanent``: it lasts as long as the file.
        """
        length = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._held():
            if not self._fds:
                raise NoMemoryError("it was closed before")
            offset = self._size
            try:
                # Taken now: memory that is missing when it is first written to would end the process by SIGBUS.
                os.posix_fallocate(self._fd, offset, length)
                piece = _map(self._fd, offset, length, unmaps=is_permanent)
            except (OSError, ValueError) as error:
                os.ftruncate(self._fd, offset)
                reason = getattr(error, "strerror", None) or str(error)
                raise NoMemoryError(
                    f"{length / 2**20:.1f} MiB more in {DIRECTORY}, {_mib_in_all():.1f} MiB large: {reason}"
                ) from error
            self._size += length
            if is_permanent:
                return piece
            known = (piece.tensor.data_ptr(), offset, length)
            self._pieces = sorted([*self._pieces, known])
            weakref.finalize(piece.memory, self._give_back, known).atexit = False
        return piece

    def find(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """Where a contiguous tensor lies here: offset and bytes of the piece, how far into it; None if it does not."""
        pieces, pointer = self._pieces, tensor.data_ptr()
        index = bisect_right(pieces, (pointer, self._size, 0)) - 1
        if index < 0:
            return None
        start, offset, nbytes = pieces[index]
        within = pointer - start
        return (offset, nbytes, within) if within + tensor.numel() * tensor.element_size() <= nbytes else None

    def see(self, address: Address, offset: int, nbytes: int) -> Piece:
        """A piece of another rank's file (or of this one's), as that rank has told it."""
        with self._held():
            fd = self._fds.get(address)
            if fd is None:
                try:
                    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise NoMemoryError(f"the memory of process {address.pid} cannot be opened: {error}") from error
                if os.fstat(fd).st_uid != os.geteuid():
                    # Whoever has told this address may be none of the job's ranks.
                    os.close(fd)
                    raise NoMemoryError(f"process {address.pid} belongs to another user")
                self._fds[address] = fd
            if os.fstat(fd).st_size < offset + nbytes:
                # Reading what is not there would end this process by a signal.
                raise NoMemoryError(f"the file {address.fd} of process {address.pid} has less than was told")
            return _map(fd, offset, nbytes, unmaps=True)

    def close(self) -> None:
        """No more is to be allocated or looked at; what is mapped stays."""
        with self._held():
            _close_all(self._fds)

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            # Whoever could not take it back meanwhile has left that to who held the lock.
            self._take_back()

    def _give_back(self, known: tuple[int, int, int]) -> None:
        """Called when nothing refers to a piece any more: in any thread, in the middle of anything."""
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
        # First, so that whatever is mapped there next is not taken for this piece.
        self._pieces = [piece for piece in self._pieces if piece != known]
        # To others who look at it, what is given back turns to zeros. A forked child lets go of it too, and the memory
        # is its parent's.
        if self._fds and os.getpid() == self.address.pid:
            _libc.fallocate(self._fd, _PUNCH_HOLE, offset, length)
        _libc.munmap(pointer, length)


def _mib_in_all() -> float:
    status = os.statvfs(DIRECTORY)
    return status.f_blocks * status.f_frsize / 2**20


def _close_all(fds: dict[Address, int]) -> None:
    # One by one: of two threads that close, each closes what the other has not, and no file that was opened since.
    while fds:
        with contextlib.suppress(KeyError):
            os.close(fds.popitem()[1])


def _map(fd: int, offset: int, length: int, *, unmaps: bool) -> Piece:
    """A piece of a file, which ``unmaps`` itself when nothing refers to it any more; else that is for the caller."""
    # Its pages at once: faults one by one, in the first use, would take longer than that use. Not by Python's mmap,
    # which keeps a file descriptor for each piece of each rank.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * length).from_address(address)
    if unmaps:
        weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return Piece(offset, memory, torch.frombuffer(memory, dtype=torch.uint8))
