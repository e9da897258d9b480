"""
`ControlBlock`: one rank's counters, state and operation headers in shared memory, which the ranks of its host read.

    posted, reduced, done   how far this rank is: operations it has written the data of, has reduced, has read the
                            results of. They only grow
    state                   of the rank's engine over shared memory: open, left, failed or revoked
    reason                  why the engine was revoked, if it was
    token                   a random number, by which other ranks know that this is the block which they looked for
    freed                   how many pieces of its memory the rank has freed
    awaited                 while the rank sleeps until a peer's counter reaches a value: this value
    headers                 of the latest operations: which collective, its arguments, and where the data lies
    board                   the rank's votes on the order of operations, see `board`
    payloads                the data of the latest operations, where they are small
    vote_data               the data that go with the rank's votes, see `board`

Only its own rank writes a control block. It writes header and data first and raises the counter after them, so readers
take no lock. A counter has the number of the operation in progress in its upper bits, and how many chunks of it are
finished in the lower ones. `peers` waits for the counters, and `shm_operation` reads and writes headers and payloads.
With it goes what ranks need to wait for such words: a memory barrier, a short spin, and sleep by futex (Linux only).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import forks
from .segment import Piece

# Offsets in 64-bit words. Each counter has a cache line to itself.
POSTED, REDUCED, DONE, _STATE, _AWAITED, _BELL, TOKEN, FREED = range(0, 8 * 8, 8)
OPEN, LEFT, FAILED, REVOKED = 0, 1, 2, 3

WINDOW = 16  # operations that may be posted and not done; a power of two
PAYLOAD_BYTES = 4096
_HEADER_BYTES = 128
# The revocation's time (ns of the host's monotonic clock) and the length of its reason, followed by the reason.
_REASON = struct.Struct("=QQ")
_REASON_START = 512
_HEADERS_START = 1024
_BOARD_START = _HEADERS_START + WINDOW * _HEADER_BYTES
_PAYLOADS_START = 4096
_VOTE_DATA_START = _PAYLOADS_START + WINDOW * PAYLOAD_BYTES
VOTE_SLOTS = 2
CONTROL_BLOCK_BYTES = _VOTE_DATA_START + VOTE_SLOTS * PAYLOAD_BYTES

# An operation's signature: its number; kind, op, dtype, root; elements.
SIGNATURE = struct.Struct("=QHHHHQ")
# The location of its data: how, the offset and bytes of the piece, and the position within it.
_PLACE = struct.Struct("=QQQQ")

NOWHERE, INLINE, RESIDENT, STAGED = range(4)

# The most lists of views that `Payloads` keeps.
_REMEMBERED = 256

_NUMBER_OF_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# Not FUTEX_PRIVATE_FLAG, which is for threads of one process.
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

# How long a rank with a core of its own checks before it sleeps: enough for two ranks in step.
_SPIN_S = 100e-6
_LOOKS_PER_CLOCK = 50
# With fewer cores than ranks, spinning would delay the other ranks: this rank yields its core a few times instead.
_YIELDS = 4

_IS_X86 = platform.machine() == "x86_64"
# Whether a reader needs no `fence`. ARM may read the data that a counter stands for before it reads the counter.
READS_IN_ORDER = _IS_X86
_libc = ctypes.CDLL(None, use_errno=True)
_barrier = forks.lock_of_process()


@dataclass(frozen=True, slots=True)
class DataLocation:
    """Where a rank's data are in an operation; ``how`` is NOWHERE, INLINE, RESIDENT or STAGED."""

    how: int
    offset: int = 0
    nbytes: int = 0
    within: int = 0


class Payloads:
    """A piece of memory of each rank, in rank order: the payloads of one operation, or the data of one vote."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = pieces
        self._views: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def elements(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Returns the first elements of each piece: views, which are made once."""
        key = (dtype, numel)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _REMEMBERED:
                self._views.clear()
            nbytes = numel * dtype.itemsize
            views = self._views[key] = [piece[:nbytes].view(dtype) for piece in self.pieces]
        return views


class ControlBlock:
    """One rank's control block, mapped into this process."""

    def __init__(self, piece: Piece) -> None:
        data = memoryview(piece.memory).cast("B")
        self.words = data[:_HEADERS_START].cast("Q")
        self._reason = data[_REASON_START:_HEADERS_START]
        self._half_words = data[:_HEADERS_START].cast("I")
        self._headers = [
            data[start : start + _HEADER_BYTES]
            for start in range(_HEADERS_START, _HEADERS_START + WINDOW * _HEADER_BYTES, _HEADER_BYTES)
        ]
        self._signatures = [header[: SIGNATURE.size] for header in self._headers]
        self.payloads = [
            piece.tensor[start : start + PAYLOAD_BYTES]
            for start in range(_PAYLOADS_START, _VOTE_DATA_START, PAYLOAD_BYTES)
        ]
        self.vote_data = [
            piece.tensor[start : start + PAYLOAD_BYTES]
            for start in range(_VOTE_DATA_START, CONTROL_BLOCK_BYTES, PAYLOAD_BYTES)
        ]
        self.payload_addresses = [payload.data_ptr() for payload in self.payloads]
        self.board_bytes = data[_BOARD_START:_PAYLOADS_START]
        self.board = self.board_bytes.cast("Q")
        self.board_address = piece.tensor.data_ptr() + _BOARD_START
        self.bell_address = piece.tensor.data_ptr() + _BELL * 8

    # -- written by its own rank

    def write_header(self, number: int, signature: bytes, place: DataLocation) -> None:
        """Writes the header of operation ``number``, which others may read once `POSTED` says so."""
        header = self._headers[number % WINDOW]
        header[: SIGNATURE.size] = signature
        _PLACE.pack_into(header, SIGNATURE.size, place.how, place.offset, place.nbytes, place.within)

    def leave(self, state: int) -> None:
        self.words[_STATE] = state

    def write_reason(self, since_ns: int, reason: str) -> None:
        """Writes why this rank revokes the engine, cut to the room there is; before the state is `REVOKED`."""
        words = reason.encode()[: len(self._reason) - _REASON.size].decode(errors="ignore").encode()
        _REASON.pack_into(self._reason, 0, since_ns, len(words))
        self._reason[_REASON.size : _REASON.size + len(words)] = words

    def sleep(self, counter: int, value: int) -> None:
        """Announces that this rank sleeps until every rank's ``counter`` has reached ``value``."""
        self.words[_AWAITED] = value
        self.words[_AWAITED + 1] = counter + 1

    def awake(self) -> None:
        self.words[_AWAITED + 1] = 0

    # -- read by all

    @property
    def state(self) -> int:
        return self.words[_STATE]

    def reason(self) -> tuple[int, str]:
        """Returns when (ns) and why this rank revoked the engine; valid once its state is `REVOKED`."""
        since_ns, length = _REASON.unpack_from(self._reason)
        return since_ns, bytes(self._reason[_REASON.size : _REASON.size + length]).decode()

    def awaits(self, counter: int) -> int | None:
        """Returns the value of ``counter`` that this rank sleeps for, if it does."""
        words = self.words
        return words[_AWAITED] if words[_AWAITED + 1] == counter + 1 else None

    def signature(self, number: int) -> memoryview:
        """Returns the signature of an operation that is posted and not yet done on all ranks."""
        return self._signatures[number % WINDOW]

    def place(self, number: int) -> DataLocation:
        return DataLocation(*_PLACE.unpack_from(self._headers[number % WINDOW], SIGNATURE.size))

    # -- the bell: one word in rank 0's control block, on which all ranks of the engine sleep

    @property
    def bell(self) -> int:
        return self._half_words[_BELL * 2]

    def ring(self) -> None:
        """Changes the word. Two ranks may ring at once and change it once: both have written their counters before."""
        self._half_words[_BELL * 2] = (self._half_words[_BELL * 2] + 1) % 2**32


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


def is_available() -> bool:
    """Whether this machine has what this package uses: futexes, pidfds and /proc."""
    return _NUMBER_OF_FUTEX is not None and hasattr(os, "pidfd_open") and os.path.isdir("/proc/self/fd")


def fence() -> None:
    """Act as a full memory barrier: no later read or write is seen before an earlier one."""
    # Acquiring a lock is an atomic read-modify-write, a full barrier on x86; on ARM, a release and then an acquire is.
    with _barrier:
        pass
    if not _IS_X86:
        with _barrier:
            pass


def comes_soon(is_over: Callable[[], bool], *, has_core: bool) -> bool:
    """Whether ``is_over()`` within the time for which it pays not to sleep; ``has_core``: each rank has one."""
    if not has_core:
        for _ in range(_YIELDS):
            os.sched_yield()
            if is_over():
                return True
        return False
    until_s = time.monotonic() + _SPIN_S
    while time.monotonic() < until_s:
        for _ in range(_LOOKS_PER_CLOCK):
            if is_over():
                return True
    return False


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until a rank calls `wake`, unless the 32-bit word differs from ``value``; it may return early.

    Python runs signal handlers only after it returns, so ``timeout_s`` bounds their delay.
    """
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(timeout))


def wake(address: int) -> None:
    """Wake every thread, in all processes, that sleeps at this address."""
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY)
