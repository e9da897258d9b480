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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..channels.collective import Group
from ..channels.recorder import OPERATIONS
from ..channels.roster import SitsOut, unpin
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from .callers import Callers
from .conductor import Body, SitOut, StandIn
from .coordinator import Coordinator
from .handle import Handle
from .labels import Labels
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


_Pinned = dict[int, dict[int, SitsOut]]  # by process set and number


@dataclass(frozen=True, slots=True)
class _Joining:
    """A join that is under way, with what lives here."""

    handle: Handle
    stand_in: StandIn
    sit_out: SitOut
    pinned: _Pinned


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
        self._groups: dict[int, Group] = {}
        self._joining: _Joining | None = None
        # What lives here and was asked for, for a join of other ranks.
        self._pinned: _Pinned = {}
        self._pid = os.getpid()
        self._labels = Labels()
        self._callers = Callers(lambda ticket: self._say(["wait", ticket]))
        # Why nothing can be carried out any more.
        self._over: str | None = None
        self._reported: str | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlite-operations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_channel(self, group: Group) -> None:
        self._groups[group.set_id] = group
        self._channels[group.set_id] = group.duplicate()

        def exchange(what: str, digest: str) -> list[str]:
            owns: list[str] = self.submit(group, Request(what, own=digest), lambda turn: turn.owns).wait()
            return owns

        group.exchange = exchange

    def close_channel(self, group: Group) -> None:
        group.exchange = None
        del self._groups[group.set_id]
        self._channels.pop(group.set_id).close()

    # -- from any thread

    def submit(self, group: Group, request: Request, body: Body) -> Handle:
        what = request.describe()
        handle = Handle(what)
        if group.size == 1:
            _carry_out(_Asked(handle, body, group), Turn(group, what, [request.own], 1))
            return handle
        name = None if request.name is None else (group.set_id, request.kind, request.name)
        caller = None
        if request.name is None or not request.has_users_name:
            caller = self._labels.of_call((group.set_id, request.kind, request.name)).pack()
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
        self._say(["ask", int(handle), group.set_id, request.kind, request.name, what, members, same, own, caller])
        return handle

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        handle = Handle("join")
        groups = [group for group in list(self._groups.values()) if group.size > 1]
        with self._lock:
            if self._joining is not None:
                raise RuntimeError("hvd.join() has been called already, and all ranks have not joined yet")
            pinned = {group.set_id: group.roster.pin() for group in groups}
            self._joining = _Joining(handle, stand_in, sit_out, pinned)
        living = [[each.set_id, None if each.set_id == 0 else each.ranks, list(pinned[each.set_id])] for each in groups]
        self._say(["join", average_of_active, living])
        return handle

    def close(self) -> None:
        with self._lock:
            self._over = self._over or "hvd.shutdown() was called"
        with contextlib.suppress(OSError):
            self._mailbox.send(["bye"])
            self._mailbox.hang_up()
        if threading.current_thread() is not self._thread:
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
        self._group.watch.listener = threading.get_ident()
        why = f"{self._group.describe_rank(0)} has gone"
        last_look_s = 0.0
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    for message in self._mailbox.receive():
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
            with self._lock:
                self._over = self._over or why
            self._fail_all()
            self._mailbox.close()

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["go", ticket, owns, divisor]:
                asked = self._pop(ticket)
                _carry_out(asked, Turn(self._channels[asked.group.set_id], asked.handle.what, owns, divisor))
            case ["stand_in", set_id, owns, divisor, kind, what, same]:
                self._stand_in(Turn(self._channels[set_id], what, owns, divisor), kind, same)
            case ["no", ticket, error, words]:
                self._pop(ticket).handle.fail(_ERRORS[error](words))
            case ["pin", join, set_id]:
                self._pin(join, set_id)
            case ["unpin"]:
                self._unpin(None)
            case ["sit_out", set_id, numbers]:
                self._sit_out(set_id, numbers)
            case ["joined", last_rank]:
                self._end_join().succeed(last_rank)
            case ["not_joined", error, words]:
                self._end_join().fail(_ERRORS[error](words))
            case ["left", rank, by_itself]:
                self._group.watch.hear_of_end(rank, by_itself)
            case ["end", words]:
                _end_process(f"hvdlite: {self._group.describe_rank(self._group.rank)} is ended: {words}")
            case _:
                raise AssertionError(f"rank 0 says {message!r}")

    def _stand_in(self, turn: Turn, kind: str, same: Mapping[str, Any]) -> None:
        assert self._joining is not None, "only who has joined is told of what it has not asked for"
        _carry_out(_Asked(Handle(turn.what), self._joining.stand_in(kind, same), turn.group), turn)

    def _pop(self, ticket: int) -> _Asked:
        with self._lock:
            asked = self._asked.pop(ticket)
            if asked.name is not None:
                self._names.discard(asked.name)
        return asked

    def _end_join(self) -> Handle:
        with self._lock:
            assert self._joining is not None, "rank 0 answers what was asked"
            joining, self._joining = self._joining, None
        self._unpin(joining)
        return joining.handle

    def _pin(self, join: int, set_id: int) -> None:
        """Answer what lives here, in whatever the program is just now, and keep that."""
        group = self._groups.get(set_id)
        pinned = {} if group is None else group.roster.pin()
        self._pinned[set_id] = pinned
        with contextlib.suppress(OSError):
            self._mailbox.send(["pinned", join, set_id, list(pinned)])

    def _sit_out(self, set_id: int, numbers: Sequence[int]) -> None:
        joining = self._joining
        assert joining is not None, "only who has joined is told what to sit out"
        # Rank 0 may know of what lived here when it asked, or of what did when this rank joined.
        members = {**self._pinned.get(set_id, {}), **joining.pinned.get(set_id, {})}
        for number in numbers:
            joining.sit_out(members[number], joining.handle)

    def _unpin(self, joining: _Joining | None) -> None:
        with self._lock:
            asked, self._pinned = self._pinned, {}
        for pinned in [*asked.values(), *(joining.pinned.values() if joining is not None else ())]:
            unpin(pinned)

    def _fail_all(self) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
            self._names.clear()
            joining, self._joining = self._joining, None
        self._unpin(joining)
        why = self._over or f"{self._group.describe_rank(0)} has gone"
        error = PeerLostError if why.endswith("has gone") else CommunicationError
        for handle in [*(each.handle for each in asked), *([joining.handle] if joining else [])]:
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
