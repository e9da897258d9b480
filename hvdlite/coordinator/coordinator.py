"""
Rank 0's end of the connections to all ranks: passes their messages to the negotiation, and sends its answers.

    rank ── OperationRequest, HasJoined, Busy, … ──► Coordinator ── Go, No, AllJoined, RankLeft, … ──► rank

The rules are in `negotiation`. It also decides rounds of votes (see `control.voting`). The connection authenticates the
sender; what it says is checked nevertheless, so that a rank with another version or with broken memory loses only its
own connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from hvdlite_wire.codec import MessageError

from ..calls import messages
from ..calls.mailbox import DOWN, UP, FrameError, Mailbox
from ..comm.step_clock import Reading
from ..log import log
from ..shm.board import Board
from ..signing import Signer
from .acceptor import Acceptor
from .negotiation import Negotiation
from .scene import BlockedThread
from .stragglers import StragglerWatch

# Interval between calls of `Negotiation.tick` while something can time out.
_TICK_S = 0.25
_LINGER_S = 0.2
# The interval between messages with the paces of all ranks, in jobs of at most so many ranks.
_PACES_S = 2.0
_PACES_SIZE = 32


class Coordinator:
    """A thread that serves all ranks, including the one in its own process, until `close`."""

    def __init__(
        self,
        negotiation: Negotiation,
        stragglers: StragglerWatch,
        listener: socket.socket | None = None,
        signer: Signer | None = None,
    ) -> None:
        """``listener`` is where the other ranks connect and prove that they have ``signer``'s key."""
        self._negotiation = negotiation
        self._stragglers = stragglers
        # Sealing these for each rank takes time that grows with the square of the number of ranks: all get them so
        # rarely that it takes about a thousandth of rank 0's time.
        size, rules = len(negotiation.scene.hosts), negotiation.stall.rules
        self._paces_interval_s = _PACES_S * max(1.0, (size / _PACES_SIZE) ** 2)
        self._paces_sent_at_s = -math.inf
        # Guards the negotiation and rank 0's words on the board: the thread of rank 0 that votes decides rounds.
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._all = negotiation.scene.everybody
        self._welcome = messages.Welcome(os.getpid(), rules.warn_after_s, rules.end_after_s)
        self._ticked_at_s = 0.0
        # The data of each registered file is a function to call when it is ready.
        self._selector = selectors.DefaultSelector()
        self._mailbox_of: dict[int, Mailbox[messages.FromRank0, messages.ToRank0]] = {}
        # Ranks whose sockets had no room for all of their messages.
        self._flushing: set[int] = set()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._is_stopped = False
        self._has_lost_rank = False
        self._acceptor: Acceptor | None = None
        if listener is not None and signer is not None:
            self._acceptor = Acceptor(listener, signer, size, self._selector, self._admit, self._is_expected)
        self._thread = threading.Thread(target=self._run, name="hvdlite-coordinator", daemon=True)

    def add(self, rank: int, mailbox: Mailbox[messages.FromRank0, messages.ToRank0]) -> None:
        """Serves this rank from now on; call it before `start`, or on the coordinator's thread."""
        self._mailbox_of[rank] = mailbox
        self._selector.register(mailbox, selectors.EVENT_READ, partial(self._serve_rank, rank))
        early = [] if self._negotiation.first_left is None else [self._negotiation.first_left]
        self._send(rank, [self._welcome, *early])
        if len(self._mailbox_of) == len(self._all) and self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def start(self) -> None:
        self._thread.start()

    def open_board(self, board: Board) -> None:
        """Lets ranks vote on this board from now on."""
        with self._lock:
            self._board = board
            board.decide(go=False)

    def decide_round(self, number: int, ask: messages.OperationRequest | None) -> None:
        """Decides a round in which all ranks have voted, on the thread of rank 0 that has: a go if the votes agree.

        ``ask`` is None if the votes came with data: then there is nothing to wait for after a go.
        """
        with self._lock:
            board, negotiation = self._board, self._negotiation
            if board is None or board.open_round != number:
                return
            go = negotiation.is_settled and board.are_votes_equal()
            if go and ask is None:
                negotiation.heard_all(time.monotonic())
            elif go and ask is not None:
                # It is kept until all ranks report its end: without the arguments, which may be large.
                negotiation.begin_voted(replace(ask, members=self._all, same={}, own=None), time.monotonic())
            board.decide(go=go, has_data=ask is None)

    def _close_round(self, number: int) -> None:
        """Closes this round of votes unless it is decided: ranks that voted then send their request as a message."""
        if self._board is not None and self._board.open_round == number:
            self._board.decide(go=False)

    def _pause_votes(self) -> None:
        board, is_paused = self._board, not self._negotiation.is_settled
        if board is not None and is_paused != board.is_paused:
            # In this order, so that a rank that sees the next round open also sees that votes are paused.
            board.pause(is_paused=is_paused)
            if is_paused:
                board.decide(go=False)

    def close(self, *, has_lost_rank: bool = False) -> None:
        """Sends all ranks `Over`, and waits until the thread has ended; ``has_lost_rank`` is why, if it is."""
        self._has_lost_rank = has_lost_rank
        # Not by closing it alone: a forked child, such as that of a DataLoader, has a copy. It may be closed already.
        with contextlib.suppress(OSError):
            self._wake.shutdown(socket.SHUT_RDWR)
        self._wake.close()
        self._thread.join()

    def _is_expected(self, rank: int) -> bool:
        return rank in self._all and rank not in self._mailbox_of

    def _admit(self, rank: int, connection: socket.socket, session: Signer) -> None:
        self.add(rank, Mailbox(connection, session, sends=DOWN, receives=UP))

    def _stop(self) -> None:
        self._is_stopped = True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._serve()
            self._say_over()
        finally:
            if self._acceptor is not None:
                self._acceptor.close()
            for mailbox in self._mailbox_of.values():
                mailbox.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> None:
        ready = self._selector.select(self._patience_s())
        with self._lock:
            for key, _ in ready:
                key.data()
            now_s = time.monotonic()
            # Not with every message: a tick looks at all pending operations, which may be many.
            if now_s - self._ticked_at_s >= _TICK_S:
                self._ticked_at_s = now_s
                self._negotiation.tick(now_s)
            self._answer()
            self._pause_votes()
            if self._acceptor is not None:
                self._acceptor.look()

    def _patience_s(self) -> float | None:
        times_s = [_TICK_S if self._negotiation.needs_ticks else None]
        if self._acceptor is not None:
            times_s.append(self._acceptor.patience_s)
        return min((each for each in times_s if each is not None), default=None)

    def _serve_rank(self, rank: int) -> None:
        mailbox = self._mailbox_of.get(rank)
        if mailbox is None:
            # Dropped earlier in this iteration.
            return
        if rank in self._flushing:
            mailbox.flush()
            self._watch_for_room(rank, mailbox)
        now_s = time.monotonic()
        try:
            received = mailbox.receive()
            self._negotiation.stall.heard(rank, now_s)
            for message in received:
                match message:
                    case messages.CloseRound(number):
                        self._close_round(number)
                    case messages.PaceReading(reading):
                        self._compare_paces(rank, reading, now_s)
                    case _:
                        handle_message(self._negotiation, rank, message, now_s)
        except (FrameError, MessageError, RecursionError) as error:
            log.warning("rank 0 closes its connection to rank %d, which sent an invalid message: %s", rank, error)
            self._drop(rank, now_s)
        except (OSError, EOFError):
            self._drop(rank, now_s)
        else:
            if any(isinstance(message, messages.StillWaiting) for message in received):
                self._send(rank, [self._negotiation.missing(rank)])

    def _compare_paces(self, rank: int, reading: Reading, now_s: float) -> None:
        watch = self._stragglers
        if not watch.add(rank, reading, now_s):
            return
        for words in watch.warnings:
            log.warning("%s", words)
        for words in watch.remarks:
            log.info("%s", words)
        watch.warnings.clear()
        watch.remarks.clear()
        receivers = [0]
        if now_s - self._paces_sent_at_s >= self._paces_interval_s:
            self._paces_sent_at_s = now_s
            receivers = list(self._mailbox_of)
        message = messages.Paces(tuple(pace.rounded() for pace in watch.paces()))
        for receiver in receivers:
            self._send(receiver, [message])

    def _answer(self) -> None:
        negotiation = self._negotiation
        for words in negotiation.warnings:
            log.warning("%s", words)
        negotiation.warnings.clear()
        while negotiation.outbox:
            outbox, negotiation.outbox = negotiation.outbox, []
            by_rank: dict[int, list[messages.FromRank0]] = {}
            for rank, message in outbox:
                by_rank.setdefault(rank, []).append(message)
            # Rank 0's own messages last: they may make rank 0 end this process.
            for rank in sorted(by_rank, reverse=True):
                self._send(rank, by_rank[rank])

    def _send(self, rank: int, said: Iterable[messages.FromRank0]) -> None:
        mailbox = self._mailbox_of.get(rank)
        if mailbox is None:
            return
        try:
            mailbox.send_all(said)
        except (ValueError, RecursionError) as error:
            log.warning("rank 0 closes its connection to rank %d, because a message cannot be sent: %s", rank, error)
            self._drop(rank, time.monotonic())
            return
        self._watch_for_room(rank, mailbox)

    def _watch_for_room(self, rank: int, mailbox: Mailbox[messages.FromRank0, messages.ToRank0]) -> None:
        if mailbox.has_outgoing == (rank in self._flushing):
            return
        (self._flushing.add if mailbox.has_outgoing else self._flushing.discard)(rank)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if mailbox.has_outgoing else 0)
        self._selector.modify(mailbox, events, partial(self._serve_rank, rank))

    def _drop(self, rank: int, now_s: float) -> None:
        self._negotiation.end(rank, ended_normally=False, now_s=now_s)
        self._forget(rank)

    def _forget(self, rank: int) -> None:
        mailbox = self._mailbox_of.pop(rank, None)
        if mailbox is not None:
            self._flushing.discard(rank)
            with contextlib.suppress(KeyError):
                self._selector.unregister(mailbox)
            mailbox.close()

    # -- its end

    def _say_over(self) -> None:
        """Sends `Over` to all ranks, and keeps the connections open until they have read what was sent."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        self._selector.unregister(self._woken)
        with self._lock:
            if self._has_lost_rank:
                self._negotiation.lost(0)
            self._negotiation.end(0, ended_normally=not self._has_lost_rank, now_s=time.monotonic())
            self._answer()
            self._pause_votes()
        for rank in list(self._mailbox_of):
            self._send(rank, [messages.Over(*self._negotiation.first_end)])
            self._end_sending(rank)
        # Closing a socket that has unread input discards data that the other end has not read yet. So read until the
        # other end closes; a rank from which nothing arrives within `_LINGER_S` is not waited for.
        while self._mailbox_of and (ready := self._selector.select(_LINGER_S)):
            for key, _ in ready:
                self._linger(next(rank for rank, mailbox in self._mailbox_of.items() if mailbox is key.fileobj))

    def _linger(self, rank: int) -> None:
        mailbox = self._mailbox_of[rank]
        if rank in self._flushing:
            mailbox.flush()
            self._watch_for_room(rank, mailbox)
            self._end_sending(rank)
        try:
            mailbox.receive()
        except (OSError, EOFError, FrameError):
            self._forget(rank)

    def _end_sending(self, rank: int) -> None:
        mailbox = self._mailbox_of.get(rank)
        if mailbox is not None and not mailbox.has_outgoing:
            with contextlib.suppress(OSError):
                mailbox.end_sending()


def handle_message(  # noqa: PLR0912  # a case for each message
    negotiation: Negotiation, rank: int, message: messages.ToRank0, now_s: float
) -> None:
    """Passes a message of ``rank`` to the negotiation; raises a MessageError, before any effect, if it is wrong.

    It makes the checks that the types of the message's fields cannot make.
    """
    everybody = negotiation.scene.everybody
    match message:
        case messages.OperationRequest():
            if negotiation.has_asked(rank, message.ticket):
                raise MessageError(f"it requests number {message.ticket} twice")
            message.members = _members(message.members, rank, message.set_id, everybody)
            negotiation.ask(rank, message, now_s)
        case messages.WaitsIn(ticket, begun):
            negotiation.wait(rank, ticket, begun)
        case messages.HasJoined(average_of_active, living):
            for each in living:
                each.members = _members(each.members, rank, each.set_id, everybody)
            negotiation.join(rank, average_of_active, now_s, living)
        case messages.Pinned():
            negotiation.joined_steps.pinned(rank, message)
        case messages.Busy(threads, is_stuck, begun):
            blocked = [_blocked(each, now_s, everybody) for each in threads]
            negotiation.busy(rank, blocked, is_stuck=is_stuck, begun=begun)
        case messages.StillWaiting(over_count):
            negotiation.scene.over(rank, over_count)
        case messages.Here(pid):
            negotiation.scene.pids[rank] = pid
        case messages.ProgramLine(line):
            negotiation.stall.program_line(rank, line)
        case messages.HasFailed(label, number, words):
            negotiation.failed(rank, label, number, words)
        case messages.HasLostRank():
            negotiation.lost(rank)
        case messages.Leaving():
            negotiation.end(rank, ended_normally=True, now_s=now_s)
        case _:
            raise MessageError(f"{str(message)[:200]} is not for the negotiation")


def _members(ranks: tuple[int, ...], rank: int, set_id: int, everybody: tuple[int, ...]) -> tuple[int, ...]:
    if bool(ranks) != (set_id != 0):
        raise MessageError(f"process set {set_id} has invalid members, {str(ranks)[:200]}")
    if ranks and rank not in ranks:
        raise MessageError(f"{str(ranks)[:200]} does not have rank {rank} among them")
    return _ranks(ranks, everybody) if ranks else everybody


def _ranks(ranks: tuple[int, ...], everybody: tuple[int, ...]) -> tuple[int, ...]:
    if not all(0 <= each < len(everybody) for each in ranks):
        raise MessageError(f"{str(ranks)[:200]} are not ranks of this job")
    return ranks


def _blocked(thread: messages.WaitingThread, now_s: float, everybody: tuple[int, ...]) -> BlockedThread:
    since_s = now_s - thread.waited_s
    if thread.collective is None:
        return BlockedThread(thread.what, since_s, thread.is_operation)
    if thread.is_operation:
        raise MessageError("an operation is no collective of its own group")
    label, number, ranks = thread.collective
    members = everybody if ranks is None else _ranks(ranks, everybody)
    return BlockedThread(thread.what, since_s, False, (label, number, members))
