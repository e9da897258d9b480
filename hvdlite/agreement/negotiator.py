"""
The conductor that asks: one rank's end of the connection to rank 0, and the thread that carries operations out.

    submit ── ask ──► coordinator ──► go ── body(turn), one after the other, in the order of the goes ── handle
                                      no ── the handle's error

What is said over the connection is listed in `coordinator`; the order of the goes is the same on all ranks, which
is what makes collectives on one engine pair up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..channels.collective import Group
from ..channels.recorder import OPERATIONS
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from .callers import Callers
from .conductor import Body, StandIn
from .coordinator import Coordinator
from .handle import Handle
from .mailbox import Mailbox
from .request import Request, Turn

# How often this process looks whether it is blocked elsewhere, and from when on it says so.
WATCH_S = 1.0

_ERRORS: dict[str, type[HvdliteError]] = {
    error.__name__: error for error in (MismatchError, CommunicationError, PeerLostError)
}


_Name = tuple[int, str, str]  # of the process set, the kind, the user's


@dataclass(frozen=True, slots=True)
class _Asked:
    handle: Handle
    body: Body
    group: Group
    name: _Name | None = None
    since_ns: int = field(default_factory=time.monotonic_ns)


class Negotiator:
    """Carries out what all ranks have asked for, on a thread of its own."""

    def __init__(self, mailbox: Mailbox, group: Group, coordinator: Coordinator | None) -> None:
        """``mailbox`` leads to the coordinator, and its socket's timeout is `WATCH_S`; ``group`` are all ranks.

        ``coordinator`` is the one of rank 0, to be closed with this.
        """
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._group = group
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}  # by ticket, the handle's number
        self._names: set[_Name] = set()
        self._channels: dict[int, Group] = {}
        self._joining: tuple[Handle, StandIn] | None = None
        self._pid = os.getpid()
        self._callers = Callers(lambda ticket: self._say(["wait", ticket]))
        # Why nothing can be carried out any more.
        self._over: str | None = None
        self._reported: str | None = None
        # What was heard while the thread waited for another rank in an operation.
        self._unread: deque[list[Any]] = deque()
        # Whether rank 0 has lost another rank: then its own end is not the first.
        self._rank_0_follows = False
        self._has_said_lost = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-operations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_channel(self, group: Group) -> None:
        self._channels[group.set_id] = group.duplicate()

        def exchange(what: str, digest: str) -> list[str]:
            owns: list[str] = self.submit(group, Request(what, own=digest), lambda turn: turn.owns).wait()
            return owns

        group.exchange = exchange

    def close_channel(self, group: Group) -> None:
        group.exchange = None
        self._channels.pop(group.set_id).close()

    # -- from any thread

    def submit(self, group: Group, request: Request, body: Body) -> Handle:
        what = request.describe()
        handle = Handle(what)
        if group.size == 1:
            _carry_out(_Asked(handle, body, group), Turn(group, what, [request.own], 1))
            return handle
        name = None if request.name is None else (group.set_id, request.kind, request.name)
        with self._lock:
            if name in self._names:
                # Horovod's words.
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                    "that is currently being processed.  If you want to request another tensor, use a different "
                    f"tensor name. ({what})"
                )
            if name is not None:
                self._names.add(name)
            self._asked[int(handle)] = _Asked(handle, body, group, name)
            handle.while_waiting = partial(self._callers.blocked_in, int(handle))
            self._callers.called()
        members = None if group.set_id == 0 else group.ranks
        same, own = request.same, request.own
        self._say(["ask", int(handle), group.set_id, request.kind, request.name, what, members, same, own])
        return handle

    def join(self, *, average_of_active: bool, stand_in: StandIn) -> Handle:
        handle = Handle("join")
        with self._lock:
            if self._joining is not None:
                raise RuntimeError("hvd.join() has been called already, and all ranks have not joined yet")
            self._joining = (handle, stand_in)
        self._say(["join", average_of_active])
        return handle

    def close(self) -> None:
        with self._lock:
            self._over = self._over or "hvd.shutdown() was called"
        with contextlib.suppress(OSError):
            self._mailbox.send(["bye"])
            self._mailbox.hang_up()
        if self._thread.ident is None:
            # Never started: nobody else closes it.
            self._mailbox.close()
        elif threading.current_thread() is not self._thread:
            # Not for long: it may be in an operation that another rank has left.
            self._thread.join(WATCH_S)
        if self._coordinator is not None:
            self._coordinator.close()

    def _say(self, message: list[Any]) -> None:
        if self._over is None:
            with contextlib.suppress(OSError):
                self._mailbox.send(message)
                return
        if os.getpid() != self._pid:
            self._over = "this is a forked child, which is none of the ranks: leave collectives to its parent"
        # The thread may be past its end, and nobody else would tell who has asked since.
        self._fail_all()

    # -- its own thread

    def _run(self) -> None:
        watch = self._group.watch
        watch.listener, watch.say_lost, watch.listen = threading.get_ident(), self._say_lost, self._listen
        why = None
        last_look_s = 0.0
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    self._receive()
                while self._unread:
                    message = self._unread.popleft()
                    if message[0] == "over":
                        why = message[1]
                    else:
                        self._take(message)
                now_s = time.monotonic()
                if now_s - last_look_s >= WATCH_S:
                    last_look_s = now_s
                    self._report_wait(now_s)
                    self._callers.look()
        except (OSError, EOFError):
            pass
        finally:
            self._hear_of_rank_0(left_by_itself=why is not None)
            with self._lock:
                self._over = self._over or why or self._words_of_first_end()
            self._fail_all()
            self._mailbox.close()

    def _say_lost(self) -> None:
        if not self._has_said_lost:
            self._has_said_lost = True
            with contextlib.suppress(OSError):
                self._mailbox.send(["lost"])

    def _receive(self) -> None:
        """Take in what has come. Of ends at once, since this thread may be in an operation that waits for word."""
        for message in self._mailbox.receive():
            match message:
                case ["left", rank, by_itself]:
                    self._group.watch.hear_of_end(rank, by_itself)
                case ["lost", 0]:
                    self._rank_0_follows = True
                case _:
                    self._unread.append(message)

    def _listen(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not self._group.watch.has_heard and time.monotonic() < until_s:
            try:
                self._receive()
            except TimeoutError:
                continue
            except (OSError, EOFError):
                self._hear_of_rank_0(left_by_itself=any(message[0] == "over" for message in self._unread))
                return

    def _hear_of_rank_0(self, *, left_by_itself: bool) -> None:
        """The connection to rank 0 is at its end."""
        if self._group.rank == 0 or self._over is not None:
            return
        if self._rank_0_follows:
            self._group.watch.hear_of_nobody()
        else:
            self._group.watch.hear_of_end(0, left_by_itself)

    def _words_of_first_end(self) -> str:
        first = self._group.watch.known_end
        if first is None:
            return "another rank has gone" if self._rank_0_follows else f"{self._group.describe_rank(0)} has gone"
        return f"{self._group.describe_rank(first[0])} has {'ended' if first[1] else 'gone'}"

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["go", ticket, owns, divisor]:
                asked = self._pop(ticket)
                _carry_out(asked, Turn(self._channels[asked.group.set_id], asked.handle.what, owns, divisor))
            case ["stand_in", set_id, owns, divisor, kind, what, same]:
                self._stand_in(Turn(self._channels[set_id], what, owns, divisor), kind, same)
            case ["no", ticket, error, words]:
                self._pop(ticket).handle.fail(_ERRORS[error](words))
            case ["joined", last_rank]:
                self._end_join().succeed(last_rank)
            case ["not_joined", error, words]:
                self._end_join().fail(_ERRORS[error](words))
            case ["end", words]:
                _end_process(f"hvdlite: {self._group.describe_rank(self._group.rank)} is ended: {words}")
            case _:
                raise AssertionError(f"rank 0 says {message!r}")

    def _stand_in(self, turn: Turn, kind: str, same: Mapping[str, Any]) -> None:
        assert self._joining is not None, "only who has joined is told of what it has not asked for"
        _carry_out(_Asked(Handle(turn.what), self._joining[1](kind, same), turn.group), turn)

    def _pop(self, ticket: int) -> _Asked:
        with self._lock:
            asked = self._asked.pop(ticket)
            if asked.name is not None:
                self._names.discard(asked.name)
        return asked

    def _end_join(self) -> Handle:
        with self._lock:
            assert self._joining is not None, "rank 0 answers what was asked"
            (handle, _), self._joining = self._joining, None
        return handle

    def _fail_all(self) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
            self._names.clear()
            joining, self._joining = self._joining, None
        why = self._over or self._words_of_first_end()
        error = PeerLostError if why.endswith("has gone") else CommunicationError
        for handle in [*(each.handle for each in asked), *([joining[0]] if joining else [])]:
            # The first words are Horovod's.
            handle.fail(error(f"Horovod has been shut down. {handle.what} cannot be done, since {why}"))

    def _report_wait(self, now_s: float) -> None:
        """Let rank 0 know what this process is blocked in, if that is none of the operations here."""
        current = self._group.watch.current
        what = current[0] if current is not None and now_s - current[1] >= WATCH_S else None
        if what != self._reported:
            self._reported = what
            self._mailbox.send(["busy", what, 0.0 if current is None else now_s - current[1]])


def _carry_out(asked: _Asked, turn: Turn) -> None:
    recorder = turn.group.recorder
    if recorder.is_on:
        recorder.note_waiting(turn.what, asked.since_ns, time.monotonic_ns())
    try:
        with recorder.span(OPERATIONS, turn.what):
            result = asked.body(turn)
        # Only now: whoever waits may end the timeline next.
        asked.handle.succeed(result)
    except Exception as error:  # noqa: BLE001 - it is raised by whoever waits for the handle
        asked.handle.fail(error)


def _end_process(words: str) -> None:
    # Nothing else reaches a thread that is blocked in the engine.
    print(words, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(1)
