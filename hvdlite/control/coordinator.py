"""
Rank 0's end of the connections to all ranks: passes their messages to the negotiation, and its answers back.

    rank ──  ask | wait | join | busy | alive | bye  ──► Coordinator ──►  go | no | joined | pin | left | end  ── rank

    ["here", pid]                       the first word of a rank
    ["ask", ticket, set_id, kind, name, what, members, same, own, caller]
                                        an operation, and the rank's own number for it; members is null for all ranks,
                                        caller (see `thread_labels`) where a name of the user's says what is meant
    ["wait", ticket, begun]             blocked until it is done, with nothing else to do; so many collectives of each
                                        group have been begun there, {label: count}
    ["join", average_of_active, [[set_id, members, numbers], ...]]
                                        and which optimizers live there, by process set
    ["pinned", join, set_id, numbers]   these optimizers live here, and will as long as that join is under way
    ["busy", [[what, waited_s, is_operation, [label, number, members]], ...], is_stuck, begun]
                                        what its threads are blocked in, such as a bucket, when that has changed; which
                                        collective that is, or null; members is null for all ranks
    ["alive", count]                    about once a second while it waits for something: so many of the operations
                                        that it was told to carry out are over
    ["lost"]                            has met an error that another rank's end is the cause of
    ["at", place]                       where its program is, as it was asked
    ["close_round", number]             close this round of votes (see `voting`), for which it has waited long enough
    ["bye"]                             takes part in nothing any more, by itself

    ["welcome", pid, warn_after_s, end_after_s]
                                        the first word of rank 0
    ["go", ticket, owns, divisor]       carry it out now, after all that were told before
    ["stand_in", set_id, owns, divisor, kind, what, same]
                                        ... for a rank that has joined and did not ask
    ["no", ticket, error, words]        it will not be; ``error`` names a class of `errors`
    ["pin", join, set_id]               tell which optimizers live there; can be answered while operations are under way
    ["unpin"]                           those may go: the join has failed
    ["sit_out", set_id, numbers]        to who has joined: sit out the steps of these
    ["joined", last_rank]               all ranks have called join
    ["not_joined", error, words]        they cannot
    ["left", rank, by_itself]           this rank was the first to take part in nothing any more
    ["alive"]                           the answer to this word
    ["where"]                           tell where the program is: ranks wait, for this one or with it
    ["end", words]                      end this process: it waits for what will not come
    ["lost", 0]                         rank 0 has lost another rank: if it ends, it was not the first
    ["over", words]                     rank 0 has ended by itself; the words name who did so first

A connection that closes without a bye is a rank that has gone, and so is one over which something else comes. The rules
are in `negotiation`, what a rank's message must be like in `incoming`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..log import log
from ..shm.board import Board
from ..signing import Signer
from .acceptor import Acceptor
from .frames import FrameError
from .incoming import MessageError, handle_message
from .mailbox import Mailbox
from .negotiation import Negotiation
from .pending import Ask
from .stall import StallRules

# How often time passes for the negotiation, while there is something that may become too late.
_TICK_S = 0.25
_LINGER_S = 0.2


class Coordinator:
    """A thread that serves all ranks, its own process's included, until `close`."""

    def __init__(
        self,
        negotiation: Negotiation,
        size: int,
        rules: StallRules,
        listener: socket.socket | None = None,
        signer: Signer | None = None,
    ) -> None:
        """``listener`` is where the other ranks connect and prove that they have ``signer``'s key, in any order.

        ``rules`` are told to all ranks, so that each can tell by itself that rank 0 does not answer.
        """
        self._negotiation = negotiation
        # The negotiation, and rank 0's words on the board, under a lock: rank 0's executor decides rounds of votes.
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._all = tuple(range(size))
        self._welcome = ["welcome", os.getpid(), rules.warn_after_s, rules.end_after_s]
        self._ticked_at_s = 0.0
        # What is ready has a function as its data, to be called.
        self._selector = selectors.DefaultSelector()
        self._mailbox_of: dict[int, Mailbox] = {}
        # Ranks whose sockets had no room for all that they are told.
        self._flushing: set[int] = set()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._is_stopped = False
        self._door: Acceptor | None = None
        if listener is not None and signer is not None:
            self._door = Acceptor(listener, signer, size, self._selector, self._admit, self._is_expected)
        self._thread = threading.Thread(target=self._run, name="hvdlite-coordinator", daemon=True)

    def add(self, rank: int, mailbox: Mailbox) -> None:
        """Serve this rank too; before `start`, or in the thread itself."""
        self._mailbox_of[rank] = mailbox
        self._selector.register(mailbox, selectors.EVENT_READ, partial(self._serve_rank, rank))
        early = [] if self._negotiation.first_left is None else [self._negotiation.first_left]
        self._send(rank, [self._welcome, *early])
        if len(self._mailbox_of) == len(self._all) and self._door is not None:
            self._door.close()
            self._door = None

    def start(self) -> None:
        self._thread.start()

    def open_board(self, board: Board) -> None:
        """From now on ranks may vote there."""
        with self._lock:
            self._board = board
            board.decide(go=False)

    def decide_round(self, number: int, ask: Ask) -> None:
        """Decide a round of votes, in which all ranks have voted: a go if they agree, and nothing is unsettled."""
        with self._lock:
            board, negotiation = self._board, self._negotiation
            if board is None or board.open_round != number:
                return
            go = negotiation.is_settled and board.are_votes_equal()
            if go:
                negotiation.begin_voted(ask, time.monotonic())
            board.decide(go=go)

    def _close_round(self, number: int) -> None:
        """Close this round of votes, unless it is decided already: who has voted asks by a message."""
        if self._board is not None and self._board.open_round == number:
            self._board.decide(go=False)

    def _pause_votes(self) -> None:
        """Have nobody vote while something is unsettled."""
        board, is_paused = self._board, not self._negotiation.is_settled
        if board is not None and is_paused != board.is_paused:
            # In this order: who sees the next round open sees that votes are paused.
            board.pause(is_paused=is_paused)
            if is_paused:
                board.decide(go=False)

    def close(self) -> None:
        """Serve nobody any more; the others will find rank 0 gone."""
        self._wake.close()
        self._thread.join()

    def _is_expected(self, rank: int) -> bool:
        return rank in self._all and rank not in self._mailbox_of

    def _admit(self, rank: int, connection: socket.socket, session: Signer) -> None:
        self.add(rank, Mailbox(connection, session, of_rank_0=True))

    def _stop(self) -> None:
        self._is_stopped = True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._serve()
            self._say_over()
        finally:
            if self._door is not None:
                self._door.close()
            for mailbox in self._mailbox_of.values():
                mailbox.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> None:
        """One turn of the loop."""
        ready = self._selector.select(self._patience_s())
        with self._lock:
            for key, _ in ready:
                key.data()
            now_s = time.monotonic()
            # Not with every message: it looks at what is pending, which may be much.
            if now_s - self._ticked_at_s >= _TICK_S:
                self._ticked_at_s = now_s
                self._negotiation.tick(now_s)
            self._answer()
            self._pause_votes()
            if self._door is not None:
                self._door.look()

    def _patience_s(self) -> float | None:
        times_s = [_TICK_S if self._negotiation.needs_ticks else None]
        if self._door is not None:
            times_s.append(self._door.patience_s)
        return min((each for each in times_s if each is not None), default=None)

    def _serve_rank(self, rank: int) -> None:
        mailbox = self._mailbox_of.get(rank)
        if mailbox is None:
            # Dropped earlier in this turn.
            return
        if rank in self._flushing:
            mailbox.flush()
            self._watch_for_room(rank, mailbox)
        now_s = time.monotonic()
        try:
            messages = mailbox.receive()
            self._negotiation.heard(rank, now_s)
            for message in messages:
                match message:
                    case ["close_round", int(number)]:
                        self._close_round(number)
                    case _:
                        handle_message(self._negotiation, rank, message, self._all, now_s)
        except (FrameError, MessageError) as error:
            log.warning("rank 0 ends its connection to rank %d, over which comes what no rank says: %s", rank, error)
            self._drop(rank, now_s)
        except (OSError, EOFError):
            self._drop(rank, now_s)
        else:
            if any(message[0] == "alive" for message in messages):
                self._send(rank, [["alive"]])

    def _answer(self) -> None:
        negotiation = self._negotiation
        for words in negotiation.warnings:
            log.warning("%s", words)
        negotiation.warnings.clear()
        while negotiation.outbox:
            outbox, negotiation.outbox = negotiation.outbox, []
            by_rank: dict[int, list[list[Any]]] = {}
            for rank, message in outbox:
                by_rank.setdefault(rank, []).append(message)
            # Rank 0's own last: it is the one that may end this process when it hears of it.
            for rank in sorted(by_rank, reverse=True):
                self._send(rank, by_rank[rank])

    def _send(self, rank: int, messages: Iterable[list[Any]]) -> None:
        mailbox = self._mailbox_of.get(rank)
        if mailbox is None:
            return
        try:
            mailbox.send_all(messages)
        except (ValueError, RecursionError) as error:
            log.warning("rank 0 ends its connection to rank %d, to which it cannot say what it must: %s", rank, error)
            self._drop(rank, time.monotonic())
            return
        self._watch_for_room(rank, mailbox)

    def _watch_for_room(self, rank: int, mailbox: Mailbox) -> None:
        if mailbox.has_outgoing == (rank in self._flushing):
            return
        (self._flushing.add if mailbox.has_outgoing else self._flushing.discard)(rank)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if mailbox.has_outgoing else 0)
        self._selector.modify(mailbox, events, partial(self._serve_rank, rank))

    def _drop(self, rank: int, now_s: float) -> None:
        self._negotiation.end(rank, by_itself=False, now_s=now_s)
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
        """Let the others know why there is nobody any more; what they have been sent must still reach them."""
        if self._door is not None:
            self._door.close()
            self._door = None
        self._selector.unregister(self._woken)
        with self._lock:
            self._negotiation.end(0, by_itself=True, now_s=time.monotonic())
            self._answer()
            self._pause_votes()
        for rank in list(self._mailbox_of):
            self._send(rank, [["over", self._negotiation.first_end]])
            self._end_sending(rank)
        # A socket that is closed with words unread takes back those that the other end has not read yet. Who reads
        # nothing for so long is not waited for.
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
