"""
`KeptMemory`: this process's shared memory, kept from one generation of an elastic job to the next.

    world ends: engines closed ── wait_until_quiet ── hvdlite-run is asked for a rank ── begin(pids) ── engines open

Pages of shared memory that are touched for the first time cost more than the sums in them. So where steps survive the
loss of a rank, the memory of the buckets stays allocated and mapped, here and in the other ranks that are left.
`runtime.make_world` calls `wait_until_quiet` and `begin`; `shm_factory` opens engines in `segment`.

Memory may be used again only if no process can still write to it as in the generation before. Of the ranks of the new
generation none can: each has waited for its own threads before it asked for its rank, and hvdlite-run publishes the
generation only when all have asked. Of all others it is checked here that they have ended, or that all their threads
are exiting; if one has not, because it was given up while it ran, everything begins with new memory.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Collection

from hvdlite_wire.linux import exit_statuses

from .segment import Address, Piece, Segment

# The most staging slots kept; an engine that is opened when all are in use brings its own.
_MOST_SLOTS = 8


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
        """Does what `Segment.see` does; maps only what is not mapped yet."""
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
    """This process's kept segment, and the processes that may have mapped it. The main thread's."""

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
        """Waits until no thread of this process writes to the memory of other ranks any more.

        Call it after the engines are closed, and before hvdlite-run is asked for a rank in the next generation.
        """
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
