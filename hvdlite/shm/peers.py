"""
`Peers`: waits for the counters of an engine's other ranks, and detects ranks that have died.

The last rank to reach a value that others sleep for rings the bell (a futex). Who waits checks the counters, spins,
then sleeps at the bell, and checks now and then for dead ranks and the deadline.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from ..comm.engine import LostError, PeerGoneError
from .control_block import (
    FAILED,
    LEFT,
    OPEN,
    READS_IN_ORDER,
    REVOKED,
    WINDOW,
    ControlBlock,
    Payloads,
    comes_soon,
    fence,
    sleep_while,
    wake,
)
from .segment import close_all

# The longest sleep, after which a rank checks for dead ranks; it also bounds the delay of a signal that arrives just
# before the sleep.
_WATCH_S = 0.1


class Peers:
    """All ranks of an engine, as this one (``rank``) sees them."""

    def __init__(
        self, rank: int, control_blocks: Sequence[ControlBlock], pids: Sequence[int], timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = len(control_blocks)
        self.control_blocks = control_blocks
        self.own = control_blocks[rank]
        # By place in the window of operations.
        self.payloads = [Payloads([block.payloads[place] for block in control_blocks]) for place in range(WINDOW)]
        self.timeout_s = timeout_s
        self._pids = pids
        self._words = [control_block.words for control_block in control_blocks]
        self._own_words = self.own.words
        self._others = [words for group_rank, words in enumerate(self._words) if group_rank != rank]
        self._bell = control_blocks[0]
        self._cores = len(os.sched_getaffinity(0))
        self._spins = self._cores >= self.size
        self._lives: dict[int, int] = {}
        weakref.finalize(self, close_all, self._lives).atexit = False
        for group_rank, pid in enumerate(pids):
            if pid != os.getpid():
                self._lives[group_rank] = os.pidfd_open(pid)
        self._poll = select.poll()
        for fd in self._lives.values():
            self._poll.register(fd, select.POLLIN)

    def advance(self, counter: int, value: int) -> None:
        """Set this rank's ``counter`` to ``value``; all it wrote before is visible to the others first."""
        fence()
        self._own_words[counter] = value
        fence()
        # The last rank to reach a value wakes the others. If two reach it at once, at least one sees that.
        for control_block in self.control_blocks:
            awaited = control_block.awaits(counter)
            if (
                awaited is not None
                and value >= awaited
                and control_block is not self.own
                and self.reached(counter, awaited)
            ):
                self._wake()
                return

    def reached(self, counter: int, value: int) -> bool:
        """Whether every other rank's ``counter`` is at ``value`` or beyond."""
        for words in self._others:  # a generator would take longer than the rest of this method
            if words[counter] < value:
                return False
        if not READS_IN_ORDER:
            # The caller next reads the headers and payloads that these counters stand for. ARM may have read those
            # before the counters above: without a fence a rank would reduce the data of an earlier operation.
            fence()
        return True

    def has_reached(self, counter: int, value: int) -> bool:
        """Whether every rank's ``counter`` has reached ``value``, this rank's included."""
        return self._own_words[counter] >= value and self.reached(counter, value)

    def late(self, counter: int, value: int) -> list[int]:
        """Returns the group ranks whose ``counter`` has not reached ``value``."""
        return [group_rank for group_rank, words in enumerate(self._words) if words[counter] < value]

    def has_free_cores(self) -> bool:
        """Whether this host has more cores than all ranks' compute threads together."""
        return self._cores > self.size * torch.get_num_threads()

    def wait_for(self, counter: int, value: int, deadline: float, *, may_spin: bool = True) -> None:
        """Waits until every rank's ``counter`` has reached ``value``; ``may_spin``: this thread has a core to itself.

        A RuntimeError if a late rank has died, left or failed, or misses the ``deadline`` (by `time.monotonic`); a
        LostError if a rank has revoked the engine.
        """
        if self.reached(counter, value):
            return
        if may_spin and comes_soon(partial(self.reached, counter, value), has_core=self._spins):
            return
        own, bell = self.own, self._bell
        own.sleep(counter, value)
        try:
            while True:
                fence()
                ring = bell.bell
                if self.reached(counter, value):
                    return
                if own.state not in (OPEN, REVOKED):
                    raise RuntimeError("the engine was closed")
                self._require_alive(counter, value)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    late = ", ".join(map(self.describe, self.late(counter, value)))
                    raise RuntimeError(f"timed out after {self.timeout_s:g} s: {late} did not reach this collective")
                sleep_while(bell.bell_address, ring, min(_WATCH_S, left_s))
        finally:
            own.awake()

    def leave(self, state: int) -> None:
        """Sets this rank's state to ``LEFT`` or ``FAILED``, so that the others do not wait for it."""
        if self.own.state == OPEN:
            self.own.leave(state)
            fence()
            self._wake()

    def revoke(self, reason: str) -> None:
        """Ends the waits of all ranks with a LostError of this reason, unless this rank has left before."""
        if self.own.state == OPEN:
            self.own.write_reason(time.monotonic_ns(), reason)
            fence()
            self.own.leave(REVOKED)
            fence()
            self._wake()

    def close(self) -> None:
        close_all(self._lives)

    def describe(self, group_rank: int) -> str:
        """Returns a rank's number in the group and its process id, for messages."""
        return f"rank {group_rank} of this group (pid {self._pids[group_rank]})"

    def _wake(self) -> None:
        self._bell.ring()
        wake(self._bell.bell_address)

    def _require_alive(self, counter: int, value: int) -> None:
        gone = {fd for fd, _ in self._poll.poll(0)} if self._lives else set()
        dead = [
            group_rank
            for group_rank, fd in self._lives.items()
            if fd in gone and self.control_blocks[group_rank].state == OPEN
        ]
        states = [control_block.state for control_block in self.control_blocks]
        late = [group_rank for group_rank in self.late(counter, value) if group_rank != self.rank]
        if REVOKED in states:
            # Read the reasons only after the states.
            fence()
            _, reason = min(block.reason() for block in self.control_blocks if block.state == REVOKED)
            raise LostError(reason)
        for group_rank in late:
            if states[group_rank] == LEFT or group_rank in dead:
                raise self._gone(group_rank)
        for group_rank in late:
            if states[group_rank] == FAILED:
                # Perhaps because of a dead rank, which this rank no longer waits for: name that one.
                if dead:
                    raise self._gone(dead[0])
                raise RuntimeError(
                    f"{self.describe(group_rank)} has failed with an error of its own: look for it there"
                )

    def _gone(self, group_rank: int) -> PeerGoneError:
        how = "has died" if self.control_blocks[group_rank].state == OPEN else "has left"
        return PeerGoneError(
            f"{self.describe(group_rank)} {how} (connection closed by peer): look for that rank's own error",
            group_rank,
        )
