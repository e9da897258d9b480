"""
A rank's connection to rank 0: sends messages from any thread, receives on one, and keeps the reason of its end.

    say ── mailbox ──► coordinator ──► mailbox ── listening thread ── Listener: take (each message), look, ended

The `Listener` is the `ControlClient`. The listening thread runs no operations and waits for no other thread. So it
receives the ends of other ranks, and reports this one's waits, even while an operation hangs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..calls import messages
from ..calls.mailbox import FrameError, Mailbox
from ..comm.group import Group
from ..comm.work import CollectiveWatch
from ..errors import LOOK_THERE, UNKNOWN_END, CommunicationError, PeerLostError, describe_end

LOOK_S = 0.5
"""Interval between calls of `Listener.look`."""

_PARTING_S = 1.0  # most time for sending the remaining messages on close


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why no operation can be requested any more; ``words`` complete "allreduce failed because"."""

    words: str
    is_peer_loss: bool = False


class Listener(Protocol):
    """What the listening thread calls: ``take`` for each message that is not about the end of a rank."""

    def heard(self) -> None: ...
    def take(self, message: messages.FromRank0) -> None: ...
    def look(self, now_s: float) -> None: ...
    def ended(self, *, is_closing: bool) -> None: ...


class Rank0Connection:
    """Sends to rank 0 and listens to it, until this rank closes or rank 0 ends."""

    def __init__(
        self, mailbox: Mailbox[messages.ToRank0, messages.FromRank0], group: Group, watch: CollectiveWatch
    ) -> None:
        self._mailbox = mailbox
        self.group = group
        self.watch = watch
        self.lock = threading.Lock()
        """Guards the requests, the way in which each is sent, the join, and setting `end_reason`."""
        # Why no request is possible any more; None while requests can be sent.
        self.end_reason: EndReason | None = None
        self._is_closing = False
        self._over: EndReason | None = None  # why rank 0 has ended normally
        self._rank_0_follows = False  # whether rank 0 has lost another rank: then its own end is not the first
        self._has_said_lost = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        mailbox.wake = self._wake_up
        self._thread: threading.Thread | None = None

    def start(self, early: Iterable[messages.FromRank0], listener: Listener) -> None:
        """Starts the thread; ``early`` are the messages that rank 0 sent right after its welcome."""
        self._mailbox.send(messages.Here(os.getpid()))
        self._thread = threading.Thread(
            target=self._run, args=(list(early), listener), name="hvdlite-listener", daemon=True
        )
        self._thread.start()

    # -- on any thread

    def send(self, *said: messages.ToRank0) -> None:
        """Sends messages if the connection still exists; raises a ValueError if one is too long."""
        self._mailbox.send_all(said)

    def say(self, message: messages.ToRank0) -> bool:
        """Sends a message; returns whether an answer may arrive: not if the connection has ended meanwhile."""
        if self.end_reason is None:
            self._mailbox.send(message)
        return self.end_reason is None

    def error_of_end(self, what: str) -> CommunicationError:
        reason = self.end_reason or self._reason_of_first_end()
        # The first words are Horovod's.
        words = f"Horovod has been shut down. {what} failed because {reason.words}"
        return PeerLostError(f"{words}: {LOOK_THERE}") if reason.is_peer_loss else CommunicationError(words)

    def revoke(self, reason: str) -> None:
        """Makes ``reason`` that of the end, unless there is one; the connection stays open until `close`."""
        with self.lock:
            self.end_reason = self.end_reason or EndReason(reason, is_peer_loss=True)

    @property
    def has_lost_rank(self) -> bool:
        return self.end_reason is not None and self.end_reason.is_peer_loss

    def close(self) -> None:
        """Sends `Leaving` to rank 0, and waits for the listening thread's end."""
        with self.lock:
            self.end_reason = self.end_reason or EndReason("hvd.shutdown() was called")
        if self.has_lost_rank:
            # Not `Leaving`: ranks that wait for this one would be told that the programs call different collectives.
            self._say_lost()
        else:
            self._mailbox.send(messages.Leaving())
        self._is_closing = True
        self._wake_up()
        if self._thread is None:
            self._close_sockets()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake_up(self) -> None:
        # A full buffer wakes the thread as well; a closed socket means that it has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _close_sockets(self) -> None:
        for each in (self._mailbox, self._wake, self._woken):
            each.close()

    # -- the thread

    def _run(self, early: Iterable[messages.FromRank0], listener: Listener) -> None:
        self.watch.listening_thread, self.watch.say_lost = threading.get_ident(), self._say_lost
        self.watch.ends.say_failed = lambda *failure: self._mailbox.send(messages.HasFailed(*failure))
        reason: EndReason | None = None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._mailbox, selectors.EVENT_READ)
                for message in early:
                    self._hear(message, listener)
                self._listen(selector, listener)
                self._part(selector)
        except FrameError as error:
            reason = EndReason(f"{self.group.describe_rank(0)} sent invalid data: {error}")
        except (EOFError, OSError):
            pass
        finally:
            self._note_end_of_rank_0()
            with self.lock:
                self.end_reason = self.end_reason or self._over or reason or self._reason_of_first_end()
            listener.ended(is_closing=self._is_closing)
            self._close_sockets()

    def _listen(self, selector: selectors.BaseSelector, listener: Listener) -> None:
        """Serves the connection until this rank closes; raises an EOFError when rank 0 ends."""
        looks_at_s = time.monotonic() + LOOK_S
        is_flushing = False
        while not self._is_closing:
            ready = selector.select(max(0.0, looks_at_s - time.monotonic()))
            for key, events in ready:
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif events & selectors.EVENT_READ:
                    received = self._mailbox.receive()
                    listener.heard()
                    for message in received:
                        self._hear(message, listener)
            if is_flushing or self._mailbox.has_outgoing:
                self._mailbox.flush()
                if is_flushing != self._mailbox.has_outgoing:
                    is_flushing = not is_flushing
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_flushing else 0)
                    selector.modify(self._mailbox, events)
            if (now_s := time.monotonic()) >= looks_at_s:
                looks_at_s = now_s + LOOK_S
                listener.look(now_s)

    def _part(self, selector: selectors.BaseSelector) -> None:
        """Sends the remaining messages, for `_PARTING_S` at most if rank 0 does not read them."""
        give_up_at_s = time.monotonic() + _PARTING_S
        selector.unregister(self._woken)
        selector.modify(self._mailbox, selectors.EVENT_WRITE)
        self._mailbox.flush()
        while self._mailbox.has_outgoing and (left_s := give_up_at_s - time.monotonic()) > 0:
            selector.select(left_s)
            self._mailbox.flush()
        self._mailbox.hang_up()

    def _hear(self, message: messages.FromRank0, listener: Listener) -> None:
        match message:
            case messages.RankLeft(rank, ended_normally):
                self.watch.record_first_end(rank, ended_normally)
            case messages.FailedOnRank(rank, label, number, words):
                self.watch.ends.record_failure(rank, label, number, words)
            case messages.Over(words, is_peer_loss):
                self._over = EndReason(words, is_peer_loss)
                raise EOFError
            case messages.Rank0HasLostRank():
                self._rank_0_follows = True
            case _:
                listener.take(message)

    # -- which rank ended first

    def _say_lost(self) -> None:
        """Reports that this rank has lost another one: if it ends because of that, its end is not the first."""
        if not self._has_said_lost:
            self._has_said_lost = True
            self._mailbox.send(messages.HasLostRank())

    def _note_end_of_rank_0(self) -> None:
        if self.group.rank == 0 or self._is_closing:
            return
        if self._rank_0_follows:
            self.watch.record_unknown_end()
        else:
            self.watch.record_first_end(0, self._over is not None)

    def _reason_of_first_end(self) -> EndReason:
        first = self.watch.known_end
        if first is None and self._rank_0_follows:
            return EndReason(UNKNOWN_END, is_peer_loss=True)
        rank, ended_normally = first or (0, False)
        return EndReason(describe_end(self.group.describe_rank(rank), ended_normally), is_peer_loss=not ended_normally)
