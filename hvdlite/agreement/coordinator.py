"""
Rank 0's end of the connections to all ranks: what they ask goes into the negotiation, and its answers back.

    rank ──  ask | wait | join | busy | lost | bye  ──► Coordinator ──►  go | no | joined | left | end  ── rank

    ["ask", ticket, set_id, kind, name, what, members, same, own]
                                        an operation, and the rank's own number for it; members is null for all ranks
    ["wait", ticket]                    blocked until it is done
    ["join", average_of_active]
    ["busy", what | null, waited_s]     waiting for other ranks elsewhere, such as for a bucket
    ["lost"]                            has met an error that another rank's end is the cause of
    ["bye"]                             takes part in nothing any more, by itself

    ["go", ticket, owns, divisor]       carry it out now, after all that were told before
    ["stand_in", set_id, owns, divisor, kind, what, same]
                                        ... for a rank that has joined and did not ask
    ["no", ticket, error, words]        it will not be; ``error`` names a class of `errors`
    ["joined", last_rank]               all ranks have called join
    ["not_joined", error, words]        they cannot
    ["left", rank, by_itself]           this rank was the first to take part in nothing any more
    ["end", words]                      end this process: it waits for what will not come
    ["lost", 0]                         rank 0 has lost another rank: if it ends, it was not the first
    ["over", words]                     rank 0 has ended by itself; the words name who did so first

A connection that closes without a bye is a rank that has gone. The rules are in `negotiation`, and `endings` has those
of which end is told when.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from typing import Any

from ..log import log
from .endings import End, Endings
from .mailbox import Mailbox
from .negotiation import Negotiation
from .pending import Ask

# How often time passes for the negotiation, while there is something that may become too late.
_TICK_S = 0.5
_HANDSHAKE_S = 5.0
_LINGER_S = 0.2


class Coordinator:
    """A thread that serves all ranks, its own process's included, until `close`."""

    def __init__(self, negotiation: Negotiation, size: int, listener: socket.socket | None, secret: str) -> None:
        """``listener`` is where the other ranks connect and give ``secret``, in any order."""
        self._negotiation = negotiation
        self._endings = Endings()
        self._all = tuple(range(size))
        self._secret = secret
        self._ticked_at_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._rank_of: dict[Mailbox, int] = {}
        self._mailbox_of: dict[int, Mailbox] = {}
        self._wake, woken = socket.socketpair()
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        self._listener = listener
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hvdlite-coordinator", daemon=True)

    def add(self, rank: int, mailbox: Mailbox) -> None:
        """Serve this rank too; before `start`, or in the thread itself."""
        self._rank_of[mailbox], self._mailbox_of[rank] = rank, mailbox
        self._selector.register(mailbox, selectors.EVENT_READ)
        if len(self._mailbox_of) == len(self._all) and self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more; the others will find rank 0 gone."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
            self._say_over()
        finally:
            if self._listener is not None:
                self._listener.close()
            for mailbox in self._rank_of:
                mailbox.close()
            self._woken.close()
            self._selector.close()

    def _say_over(self) -> None:
        """Let the others know why there is nobody any more; what they have been sent must still reach them."""
        now_s = time.monotonic()
        words = "another rank has gone"
        self._end(0, True, now_s)
        if self._negotiation.has_end:
            words = self._negotiation.first_end
        self._answer(now_s)
        if self._listener is not None:
            self._selector.unregister(self._listener)
        for mailbox in self._rank_of:
            with contextlib.suppress(OSError):
                mailbox.send(["over", words])
                mailbox.end_sending()
        # A socket that is closed with words unread takes back those that the other end has not read yet.
        while self._rank_of and (ready := self._selector.select(_LINGER_S)):
            for mailbox in [key.fileobj for key, _ in ready if isinstance(key.fileobj, Mailbox)]:
                try:
                    mailbox.receive()
                except (OSError, EOFError):
                    self._drop(self._rank_of[mailbox])

    def _serve(self) -> bool:
        """One turn of the loop; False after the last."""
        is_idle = self._negotiation.is_idle and self._endings.is_idle
        ready = self._selector.select(None if is_idle else _TICK_S)
        now_s = time.monotonic()
        for key, _ in ready:
            if key.fileobj is self._woken:
                self._selector.unregister(self._woken)
                return False
            if key.fileobj is self._listener:
                self._accept(now_s)
            elif isinstance(key.fileobj, Mailbox):
                self._hear(key.fileobj, now_s)
        # Not with every message: it looks at all that is pending, which may be much.
        if now_s - self._ticked_at_s >= _TICK_S:
            self._ticked_at_s = now_s
            self._tell(self._endings.due(now_s), now_s)
            self._negotiation.tick(now_s)
        self._answer(now_s)
        return True

    def _accept(self, now_s: float) -> None:
        assert self._listener is not None, "it was selected"
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(_HANDSHAKE_S)
            mailbox = Mailbox(connection)
            (rank, secret), *messages = mailbox.receive()
            self._check(rank, secret)
            connection.settimeout(None)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, EOFError, ValueError, TypeError) as error:
            log.warning("a connection to rank 0 was not one of this job's ranks: %s", error)
            connection.close()
            return
        self.add(rank, mailbox)
        for message in messages:
            self._take(rank, message, now_s)

    def _check(self, rank: object, secret: object) -> None:
        if not hmac.compare_digest(str(secret), self._secret) or rank not in self._all or rank in self._mailbox_of:
            raise ValueError("it does not know this job's secret, or is there already")

    def _hear(self, mailbox: Mailbox, now_s: float) -> None:
        rank = self._rank_of[mailbox]
        try:
            for message in mailbox.receive():
                self._take(rank, message, now_s)
        except (OSError, EOFError):
            self._drop(rank)
            self._end(rank, False, now_s)

    def _end(self, rank: int, by_itself: bool, now_s: float) -> None:
        self._tell(self._endings.ended(rank, by_itself, now_s), now_s)

    def _tell(self, ends: list[End], now_s: float) -> None:
        for rank, by_itself in ends:
            self._negotiation.end(rank, by_itself=by_itself, now_s=now_s)

    def _lose(self, rank: int) -> None:
        self._endings.lost(rank)
        if rank == 0:
            # When rank 0 ends there is nobody any more to tell whose end that follows from.
            self._negotiation.outbox += [(other, ["lost", 0]) for other in self._all if other != 0]

    def _take(self, rank: int, message: list[Any], now_s: float) -> None:
        negotiation = self._negotiation
        match message:
            case ["ask", ticket, set_id, kind, name, what, members, same, own]:
                ranks = self._all if members is None else tuple(members)
                negotiation.ask(rank, Ask(ticket, set_id, kind, name, what, ranks, same, own), now_s)
            case ["wait", ticket]:
                negotiation.wait(rank, ticket)
            case ["join", average_of_active]:
                negotiation.join(rank, average_of_active, now_s)
            case ["busy", what, waited_s]:
                negotiation.busy(rank, what, now_s - waited_s)
            case ["lost"]:
                self._lose(rank)
            case ["bye"]:
                self._end(rank, True, now_s)
            case _:
                raise AssertionError(f"rank {rank} says {message!r}")

    def _answer(self, now_s: float) -> None:
        negotiation = self._negotiation
        for words in negotiation.warnings:
            log.warning("%s", words)
        negotiation.warnings.clear()
        while negotiation.outbox:
            rank, message = negotiation.outbox.pop(0)
            mailbox = self._mailbox_of.get(rank)
            if mailbox is None:
                continue
            try:
                mailbox.send(message)
            except OSError:
                self._drop(rank)
                self._end(rank, False, now_s)

    def _drop(self, rank: int) -> None:
        mailbox = self._mailbox_of.pop(rank, None)
        if mailbox is not None:
            del self._rank_of[mailbox]
            with contextlib.suppress(KeyError):
                self._selector.unregister(mailbox)
            mailbox.close()
