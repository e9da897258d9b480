"""
A controller that negotiates: one rank's end of the connection to rank 0, and the thread that receives from it.

    submit ── ask ──► coordinator ──► go ── the executor: run(turn), in the order of the goes ── handle
                                      no ── the handle's error

What is said over the connection is listed in `coordinator`; the order of the goes is the same on all ranks, which
is what makes collectives on one engine pair up. The thread here carries nothing out and waits for nobody, so that it
hears of other ranks' ends, and tells of this one's waits, whatever becomes of an operation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..comm.group import Group
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from ..log import log
from ..shm.board import HasBoard
from .call_sites import places_of_threads
from .callers import Callers
from .controller import SitOut, StandIn
from .coordinator import Coordinator
from .executor import Agreed, Executor
from .frames import FrameError
from .generation import Generation
from .handle import Handle
from .heartbeat import LOOK_S, Heartbeat, Silence
from .mailbox import Mailbox
from .operation import Execution, Kind, Operation, Run, kind_named
from .pending import Ask
from .reducer_registry import SitsOut, unpin
from .stall import JOIN, Blocked, StallRules
from .thread_labels import ThreadLabels
from .voting import MOST_BYTES, Voter

# How long what is still to be said may take when all is over.
_PARTING_S = 1.0

_ERRORS: dict[str, type[HvdliteError]] = {
    error.__name__: error for error in (MismatchError, CommunicationError, PeerLostError)
}


_Name = tuple[int, str, str]  # of the process set, the kind, the user's


@dataclass(frozen=True, slots=True)
class Welcome:
    """What rank 0 tells of itself when a rank has come."""

    pid: int
    rules: StallRules

    @classmethod
    def read(cls, message: list[Any]) -> Welcome:
        """A ValueError if that is no welcome."""
        match message:
            case ["welcome", int(pid), None | int() | float(), None | int() | float()]:
                return cls(pid, StallRules(message[2], message[3]))
            case _:
                raise ValueError("it does not speak as hvdlite's rank 0 does")


@dataclass(frozen=True, slots=True)
class _Asked:
    handle: Handle
    run: Run
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


class ControlClient:
    """Has what all ranks have asked for carried out, on a thread of its own."""

    def __init__(
        self,
        mailbox: Mailbox,
        group: Group,
        generation: Generation,
        coordinator: Coordinator | None,
        welcome: Welcome,
    ) -> None:
        """``mailbox`` leads to the coordinator, whose ``welcome`` has been read; ``group`` are all ranks.

        ``coordinator`` is the one of rank 0, to be closed with this.
        """
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._group = group
        self._watch = watch = generation.watch
        self._recorder = generation.recorder
        self._reducers = generation.reducers
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}  # by ticket, the handle's number
        self._names: set[_Name] = set()
        self._channels: dict[int, Group] = {}
        self._groups: dict[int, Group] = {}
        self._joining: _Joining | None = None
        # What lives here and was asked for, for a join of other ranks.
        self._pinned: _Pinned = {}
        self._pid = os.getpid()
        self._labels = ThreadLabels()
        # Who has called hvd.init() need not be who trains.
        watch.beginners.clear()
        self._callers = Callers(lambda ticket: self._say(["wait", ticket, watch.begun.copy()]), watch.beginners)
        self._heartbeat = Heartbeat(welcome.rules)
        self._pid_of_rank_0 = welcome.pid
        self._rules = welcome.rules
        # Why nothing can be carried out any more.
        self._over: str | None = None
        self._is_closing = False
        # Whether rank 0 has lost another rank: then its own end is not the first.
        self._rank_0_follows = False
        self._has_said_lost = False
        self._executor = Executor(self._recorder)
        # Where all ranks share memory: then what they call at the same time needs no messages.
        self._voter: Voter | None = None
        # The ticket that is voted on: by the board it may have had its go when the connection ends.
        self._voted_ticket: int | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        mailbox.wake = self._wake_up
        self._thread = threading.Thread(target=self._run, name="hvdlite-listener", daemon=True)

    def start(self, early: Iterable[list[Any]] = ()) -> None:
        """``early`` is what rank 0 has said right after its welcome."""
        self._mailbox.send(["here", self._pid])
        self._executor.start()
        for message in early:
            self._take(message)
        self._thread.start()

    def open_channel(self, group: Group) -> None:
        self._groups[group.set_id] = group
        channel = self._channels[group.set_id] = group.duplicate()
        if group.set_id == 0 and isinstance(channel.engine, HasBoard):
            self._voter = Voter(
                channel.engine.board,
                self._lock,
                close_round=lambda number: self._say(["close_round", number]),
                decide_round=None if self._coordinator is None else self._coordinator.decide_round,
                is_over=lambda: self._over is not None,
            )
            if self._coordinator is not None:
                self._coordinator.open_board(channel.engine.board)

    def close_channel(self, group: Group) -> None:
        del self._groups[group.set_id]
        self._channels.pop(group.set_id).close()

    # -- from any thread

    def submit(self, group: Group, operation: Operation) -> Handle:
        what = operation.describe()
        handle = Handle(what)
        if group.size == 1:
            Agreed(handle, operation.run, Execution(group, what, [operation.own], 1)).carry_out(self._recorder)
            return handle
        name = None if operation.name is None else (group.set_id, operation.kind.name, operation.name)
        caller = None
        if operation.name is None or not operation.has_users_name:
            caller = self._labels.of_call((group.set_id, operation.kind.name, operation.name))
        members = None if group.set_id == 0 else group.ranks
        same, own = operation.same, operation.own
        head = ["ask", int(handle), group.set_id, operation.kind.name, operation.name, what]
        ask = [*head, members, same, own, None if caller is None else caller.pack()]
        call = b""
        if self._voter is not None and group.set_id == 0:
            call = json.dumps([*head[2:], same, own, None if caller is None else caller.name]).encode()
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
            self._asked[int(handle)] = _Asked(handle, operation.run, group, name)
            handle.while_waiting = partial(self._callers.blocked_in, int(handle))
            self._callers.called()
            may_vote = self._may_vote(call)
            if may_vote:
                self._voted_ticket = int(handle)
                self._executor.put_word(partial(self._vote, handle, ask, call))
            is_held = (
                not may_vote and self._voter is not None and self._voter.hold(partial(self._send_ask, handle, ask))
            )
        if not (may_vote or is_held):
            self._ask(handle, ask)
        return handle

    def _may_vote(self, call: bytes) -> bool:
        """Whether this rank has nothing under way but the call that was just noted, and so begins a vote on it."""
        return (
            self._voter is not None
            and 0 < len(call) <= MOST_BYTES
            and not self._voter.is_voting
            and len(self._asked) == 1
            and self._joining is None
            and self._executor.is_idle
            and self._over is None
            and os.getpid() == self._pid
            and self._voter.begin()
        )

    def _ask(self, handle: Handle, ask: list[Any]) -> None:
        try:
            self._say(ask)
        except ValueError as error:
            with self._lock:
                self._fail_asked(handle, error)

    def _send_ask(self, handle: Handle, ask: list[Any]) -> None:
        """Ask for what was held during a vote, under the lock; whether nothing can be asked for is seen after that."""
        try:
            self._mailbox.send(ask)
        except ValueError as error:
            self._fail_asked(handle, error)

    def _fail_asked(self, handle: Handle, error: ValueError) -> None:
        if int(handle) in self._asked:
            self._take_asked(int(handle))
        handle.fail(CommunicationError(f"{handle.what} cannot be asked for: {error}"))

    def _vote(self, handle: Handle, ask: list[Any], call: bytes) -> None:
        """By the executor: carry an operation out, if all ranks vote for it now; else ask for it."""
        assert self._voter is not None, "a vote has begun"
        _, ticket, set_id, kind, name, what, _, _, own, _ = ask
        go = self._voter.vote(call, Ask(ticket, set_id, kind_named(kind), name, what, self._group.ranks, {}, None))
        with self._lock:
            self._voted_ticket = None
            asked = self._take_asked(ticket) if go else None
            self._executor.begun += go
        if not go:
            self._ask(handle, ask)
        if self._voter.say_held() or asked is None:
            # Rank 0 could not know before what threads are blocked in that it is asked for only now.
            self._callers.tell_again()
            if self._over is not None:
                self._fail_all()
        if asked is None:
            return
        owns = [own] * self._group.size
        execution = Execution(self._channels[set_id], what, owns, self._group.size)
        self._executor.carry_out(Agreed(handle, asked.run, execution, asked.since_ns))

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        handle = Handle("join")
        groups = [group for group in list(self._groups.values()) if group.size > 1]
        with self._lock:
            if self._joining is not None:
                raise RuntimeError("hvd.join() has been called already, and all ranks have not joined yet")
            pinned = {group.set_id: self._reducers.pin(group) for group in groups}
            self._joining = _Joining(handle, stand_in, sit_out, pinned)
        living = [[each.set_id, None if each.set_id == 0 else each.ranks, list(pinned[each.set_id])] for each in groups]
        join = ["join", average_of_active, living]
        with self._lock:
            is_held = self._voter is not None and self._voter.hold(partial(self._mailbox.send, join))
        if not is_held:
            self._say(join)
        return handle

    def close(self) -> None:
        with self._lock:
            self._over = self._over or "hvd.shutdown() was called"
        self._mailbox.send(["bye"])
        self._is_closing = True
        self._wake_up()
        if self._thread.ident is None:
            # Never started: nobody else closes them.
            for each in (self._mailbox, self._wake, self._woken):
                each.close()
        else:
            if threading.current_thread() is not self._thread:
                self._thread.join()
            # Not for long: it may be in an operation that another rank has left.
            self._executor.ended_within(LOOK_S)
        if self._coordinator is not None:
            self._coordinator.close()

    def _say(self, message: list[Any]) -> None:
        if os.getpid() != self._pid:
            self._over = "this is a forked child, which is none of the ranks: leave collectives to its parent"
        elif self._over is None:
            self._mailbox.send(message)
        if self._over is not None:
            # The thread may be past its end, and nobody else would tell who has asked since.
            self._fail_all()

    def _wake_up(self) -> None:
        # A full buffer wakes it too, and one that is closed has nobody to wake.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # -- the thread that listens

    def _run(self) -> None:
        self._watch.listener, self._watch.say_lost = threading.get_ident(), self._say_lost
        why, left_by_itself = "", False
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._mailbox, selectors.EVENT_READ)
                self._listen(selector)
                self._part(selector)
        except EOFError as error:
            why, left_by_itself = str(error), bool(str(error))
        except FrameError as error:
            why = f"what comes over the connection to {self._group.describe_rank(0)} is not what it says: {error}"
        except OSError:
            pass
        finally:
            self._hear_of_rank_0(left_by_itself=left_by_itself)
            with self._lock:
                self._over = self._over or why or self._words_of_first_end()
            self._fail_all()
            if self._is_closing:
                self._executor.give_up(self._error_of_end)
            else:
                # What has been agreed on is carried out on the other ranks too.
                self._executor.finish()
            self._mailbox.close()
            self._wake.close()
            self._woken.close()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        """Until this rank closes; until rank 0 is no more, which is an EOFError."""
        looks_at_s = time.monotonic() + LOOK_S
        is_flushing = False
        while not self._is_closing:
            ready = selector.select(max(0.0, looks_at_s - time.monotonic()))
            for key, events in ready:
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    continue
                if events & selectors.EVENT_READ:
                    self._hear()
            if is_flushing or self._mailbox.has_outgoing:
                self._mailbox.flush()
                if is_flushing != self._mailbox.has_outgoing:
                    is_flushing = not is_flushing
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_flushing else 0)
                    selector.modify(self._mailbox, events)
            if (now_s := time.monotonic()) >= looks_at_s:
                looks_at_s = now_s + LOOK_S
                self._look(now_s)

    def _part(self, selector: selectors.BaseSelector) -> None:
        """Send what is still to be said, if rank 0 reads it."""
        give_up_at_s = time.monotonic() + _PARTING_S
        selector.unregister(self._woken)
        selector.modify(self._mailbox, selectors.EVENT_WRITE)
        self._mailbox.flush()
        while self._mailbox.has_outgoing and (left_s := give_up_at_s - time.monotonic()) > 0:
            selector.select(left_s)
            self._mailbox.flush()
        self._mailbox.hang_up()

    def _hear(self) -> None:
        try:
            messages = self._mailbox.receive()
        except EOFError:
            # Without its own words, if it had any: they end the loop before.
            raise EOFError from None
        self._heartbeat.heard()
        for message in messages:
            if message[0] == "over":
                raise EOFError(message[1])
            self._take(message)

    def _say_lost(self) -> None:
        """This rank has lost another one, and may end of that: so that nobody takes its end for the first."""
        if not self._has_said_lost:
            self._has_said_lost = True
            self._mailbox.send(["lost"])

    def _hear_of_ranks(self, message: list[Any]) -> None:
        """Which rank was the first to end, or that rank 0 would not be."""
        if message[0] == "left":
            self._watch.hear_of_end(message[1], message[2])
        else:
            self._rank_0_follows = True

    def _hear_of_rank_0(self, *, left_by_itself: bool) -> None:
        """The connection to rank 0 is at its end."""
        if self._group.rank == 0 or self._is_closing:
            return
        if self._rank_0_follows:
            self._watch.hear_of_nobody()
        else:
            self._watch.hear_of_end(0, left_by_itself)

    def _words_of_first_end(self) -> str:
        first = self._watch.known_end
        if first is None:
            return "another rank has gone" if self._rank_0_follows else f"{self._group.describe_rank(0)} has gone"
        return f"{self._group.describe_rank(first[0])} has {'ended' if first[1] else 'gone'}"

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["alive"]:
                return
            case ["go", ticket, owns, divisor]:
                with self._lock:
                    # At once, as others see it: who finds nothing asked for finds it in the queue.
                    asked = self._take_asked(ticket)
                    execution = Execution(self._channels[asked.group.set_id], asked.handle.what, owns, divisor)
                    self._executor.put(Agreed(asked.handle, asked.run, execution, asked.since_ns))
            case ["stand_in", set_id, owns, divisor, kind, what, same]:
                self._stand_in(Execution(self._channels[set_id], what, owns, divisor), kind_named(kind), same)
            case ["no", ticket, error, words]:
                self._pop(ticket).handle.fail(_ERRORS[error](words))
            case ["pin", int(), int()] | ["where"]:
                self._answer(message)
            case ["unpin"]:
                self._unpin(None)
            case ["sit_out", set_id, numbers]:
                self._sit_out(set_id, numbers)
            case ["joined", last_rank]:
                # After those operations in which this rank stands in.
                self._executor.put_word(partial(self._end_join().succeed, last_rank))
            case ["not_joined", error, words]:
                self._executor.put_word(partial(self._end_join().fail, _ERRORS[error](words)))
            case ["left", int(), bool()] | ["lost", 0]:
                self._hear_of_ranks(message)
            case ["end", words]:
                self._end_process(words)
            case _:
                raise FrameError(f"{str(message)[:200]} is no word of rank 0's")

    def _stand_in(self, execution: Execution, kind: Kind, same: Mapping[str, Any]) -> None:
        assert self._joining is not None, "only who has joined is told of what it has not asked for"
        stand_in = self._joining.stand_in

        def run(execution: Execution) -> Any:
            # Made only here: if that is an error, it is the operation's.
            return stand_in(kind, same)(execution)

        self._executor.put(Agreed(Handle(execution.what), run, execution))

    def _pop(self, ticket: int) -> _Asked:
        with self._lock:
            return self._take_asked(ticket)

    def _take_asked(self, ticket: int) -> _Asked:
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

    def _answer(self, message: list[Any]) -> None:
        """What can be told at once, whatever the program is in."""
        if message[0] == "pin":
            self._pin(message[1], message[2])
        else:
            self._mailbox.send(["at", places_of_threads(self._callers.threads())])

    def _pin(self, join: int, set_id: int) -> None:
        """Answer what lives here, in whatever the program is just now, and keep that."""
        group = self._groups.get(set_id)
        pinned = {} if group is None else self._reducers.pin(group)
        self._pinned[set_id] = pinned
        self._mailbox.send(["pinned", join, set_id, list(pinned)])

    def _sit_out(self, set_id: int, numbers: Sequence[int]) -> None:
        joining = self._joining
        assert joining is not None, "only who has joined is told what to sit out"
        # Rank 0 may know of what lived here when it asked, or of what did when this rank joined.
        members = {**self._pinned.get(set_id, {}), **joining.pinned.get(set_id, {})}
        for number in numbers:
            joining.sit_out(members[number], joining.handle)

    def _unpin(self, joining: _Joining | None) -> None:
        """By the executor, since channels may be closed by that, and before whoever waits for the join goes on."""
        self._executor.put_word(partial(_unpin_all, self._take_pinned(joining)))

    def _take_pinned(self, joining: _Joining | None) -> list[dict[int, SitsOut]]:
        with self._lock:
            asked, self._pinned = self._pinned, {}
        return [*asked.values(), *(joining.pinned.values() if joining is not None else ())]

    def _fail_all(self) -> None:
        with self._lock:
            # Whether that which is voted on has failed is known to the executor, which is about to see it.
            kept = {ticket: each for ticket, each in self._asked.items() if ticket == self._voted_ticket}
            asked = [each for ticket, each in self._asked.items() if ticket not in kept]
            self._asked = kept
            self._names = {each.name for each in kept.values() if each.name is not None}
            joining, self._joining = self._joining, None
        _unpin_all(self._take_pinned(joining))
        for handle in [*(each.handle for each in asked), *([joining.handle] if joining else [])]:
            handle.fail(self._error_of_end(handle.what))

    def _error_of_end(self, what: str) -> CommunicationError:
        why = self._over or self._words_of_first_end()
        error = PeerLostError if why.endswith("has gone") else CommunicationError
        # The first words are Horovod's.
        return error(f"Horovod has been shut down. {what} cannot be done, since {why}")

    # -- about once a second

    def _look(self, now_s: float) -> None:
        """Let rank 0 know what this process is blocked in, and see whether rank 0 is there."""
        self._callers.look()
        executor = self._executor
        waits = self._watch.blocked()
        waits.pop(executor.ident or 0, None)
        blocked = [Blocked(what, since_s, place=place) for what, since_s, place in waits.values()]
        current = executor.current
        if current is not None:
            blocked.append(Blocked(*current, is_operation=True))
        is_stuck = executor.is_idle and not self._callers.can_ask(waits.keys())
        # While others have joined they wait for this rank, which then says that it is there.
        is_waiting = bool(self._asked or self._joining or self._pinned or blocked or not executor.is_idle)
        messages = self._heartbeat.look(
            now_s,
            blocked,
            is_stuck=is_stuck,
            is_waiting=is_waiting,
            over_count=executor.ended,
            begun=self._watch.begun.copy(),
            size=self._group.size,
        )
        self._mailbox.send_all(messages)
        silence = self._heartbeat.silence(now_s)
        if silence is not None:
            self._tell_silence(silence, blocked)

    def _tell_silence(self, silence: Silence, blocked: Iterable[Blocked]) -> None:
        words = (
            f"stalled: {self._describe(0, self._pid_of_rank_0)} has not answered for {silence.lasted_s:.0f} s: it is "
            f"stopped, something holds its interpreter, or its machine is gone. "
            f"{self._describe(self._group.rank, self._pid)} waits in {self._words_of_waits(blocked)}"
        )
        if silence.is_end:
            self._end_process(words)
        log.warning("%s. %s", words, self._rules.way_out)

    def _words_of_waits(self, blocked: Iterable[Blocked]) -> str:
        with self._lock:
            asked = {ticket: each.handle.what for ticket, each in self._asked.items()}
            joining = self._joining
        waits = [each.what for each in sorted(blocked, key=lambda each: each.since_s)]
        waits += [asked.pop(ticket) for ticket, _ in self._callers.blocked() if ticket in asked]
        waits += [JOIN] if joining is not None else []
        whats = list(dict.fromkeys([*waits, *asked.values()]))
        return ", ".join(whats[:8]) + (f" and {len(whats) - 8} more" if len(whats) > 8 else "")

    def _describe(self, rank: int, pid: int) -> str:
        return f"rank {rank} ({self._group.hosts[rank]}, pid {pid})"

    def _end_process(self, words: str) -> None:
        # Nothing else reaches a thread that is blocked in the engine.
        own = self._group.describe_rank(self._group.rank)
        print(f"hvdlite: {own} is ended: {words}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)


def _unpin_all(everything: Iterable[Mapping[int, SitsOut]]) -> None:
    for pinned in everything:
        unpin(pinned)
