"""
Memory that the ranks of a host share: each rank's own, and that of the others as it is seen from here.

    Segment.allocate ── a Piece of this rank's file ── its offset, told to others ── Segment.of_peer

A file in /dev/shm that never has a name: other ranks open it through the file descriptor of the process that made it.
So it is gone when the last process that has mapped it is, however that ends, and no other user can open it.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTORY = "/dev/shm"
_PAGE = mmap.PAGESIZE


class NoMemoryError(RuntimeError):
    """There is not as much shared memory as was asked for, or none at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one rank's file, mapped; its offset and length are multiples of the page size."""

    offset: int
    memory: mmap.mmap
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process's file can be opened by others of the same user."""

    pid: int
    fd: int


class Segment:
    """This rank's shared memory, which grows, and other ranks' as far as it has been looked at."""

    def __init__(self) -> None:
        """A NoMemoryError where there is none to be had."""
        try:
            self._fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoMemoryError(f"{DIRECTORY}: {error.strerror}") from error
        self.address = Address(os.getpid(), self._fd)
        self._size = 0
        # For `find`: where the pieces begin in this process, ascending.
        self._starts: list[tuple[int, Piece]] = []
        self._files: dict[Address, int] = {}
        self._seen: dict[tuple[Address, int], Piece] = {}
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Piece:
        """More memory, all zero. A NoMemoryError where there is not as much."""
        length = -(-max(nbytes, 1) // _PAGE) * _PAGE
        with self._lock:
            offset = self._size
            try:
                # Taken now: memory that is missing when it is first written to would end the process by SIGBUS.
                os.posix_fallocate(self._fd, offset, length)
                piece = _map(self._fd, offset, length)
            except (OSError, ValueError) as error:
                os.ftruncate(self._fd, offset)
                reason = getattr(error, "strerror", None) or str(error)
                raise NoMemoryError(f"{length / 2**20:.1f} MiB more in {DIRECTORY}: {reason}") from error
            self._size += length
            self._seen[self.address, offset] = piece
            self._starts = sorted([*self._starts, (piece.tensor.data_ptr(), piece)], key=lambda pair: pair[0])
            return piece

    def find(self, tensor: Tensor) -> tuple[Piece, int] | None:
        """The piece that a contiguous tensor lies in, and how many bytes after its beginning."""
        pointer = tensor.data_ptr()
        index = bisect_right(self._starts, pointer, key=lambda pair: pair[0]) - 1
        if index < 0:
            return None
        start, piece = self._starts[index]
        within = pointer - start
        return (piece, within) if within + tensor.numel() * tensor.element_size() <= piece.nbytes else None

    def of_peer(self, address: Address, offset: int, nbytes: int) -> Piece:
        """A piece of another rank's file (or of this one's), as that rank has told it."""
        key = (address, offset)
        piece = self._seen.get(key)
        if piece is None:
            with self._lock:
                piece = self._seen[key] = _map(self._open(address), offset, nbytes)
        return piece

    def _open(self, address: Address) -> int:
        fd = self._files.get(address)
        if fd is None:
            try:
                fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise NoMemoryError(f"the memory of process {address.pid} cannot be opened: {error}") from error
            self._files[address] = fd
        return fd

    def close(self) -> None:
        """No more is to be allocated or looked at. What is mapped stays, as long as a tensor has it."""
        with self._lock:
            for fd in [*self._files.values(), self._fd]:
                os.close(fd)
            self._files.clear()
            self._seen.clear()
            self._starts.clear()


def _map(fd: int, offset: int, length: int) -> Piece:
    # Its pages at once: faults one by one, in the first use, would take longer than that use.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(fd, length, flags=flags, offset=offset)
    return Piece(offset, memory, torch.frombuffer(memory, dtype=torch.uint8))
