"""
The table of operations that this rank has requested and rank 0 has not answered, and of the names that these use.

    add (by the calling thread) ── ticket ── take: rank 0 has answered, or all ranks have voted for it
                                         └── fail_all: the connection to rank 0 has ended

`submission` adds requests; `control_client` takes them. A ticket is the number of the operation's handle; rank 0's
answers carry it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..calls.handle import Handle
from ..calls.messages import MissingRanks
from ..calls.operation import Operation, Run
from ..comm.group import Group
from ..errors import list_names

Name = tuple[int, str, str]  # the process set's id, the kind's name, the user's name


@dataclass(frozen=True, slots=True)
class Request:
    """A requested operation, with what is needed to run it."""

    handle: Handle
    run: Run
    group: Group
    name: Name | None
    since_ns: int = field(default_factory=time.monotonic_ns)


class Requests:
    """The table of requests, by ticket; `add`, `take` and `take_answered` must be called under its lock."""

    def __init__(self, lock: threading.Lock, describe_rank: Callable[[int], str]) -> None:
        """``describe_rank`` gives the description of a global rank for messages."""
        self._lock = lock
        self._describe_rank = describe_rank
        self._by_ticket: dict[int, Request] = {}
        self._names: set[Name] = set()
        self._failed: set[int] = set()  # the tickets of those that failed with no answer
        # By ticket: the ranks that had not requested it, as of rank 0's last report.
        self._missing: dict[int, str] = {}
        # The request that is being voted on: it may have its go on the board although the connection to rank 0 has
        # ended.
        self.voted_ticket: int | None = None

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    def add(self, handle: Handle, group: Group, operation: Operation) -> None:
        """Adds a request; raises a ValueError if its name is in use."""
        name = None if operation.name is None else (group.set_id, operation.kind.name, operation.name)
        if name in self._names:
            # Horovod's words.
            raise ValueError(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                "that is currently being processed.  If you want to request another tensor, use a different "
                f"tensor name. ({handle.what})"
            )
        if name is not None:
            self._names.add(name)
        self._by_ticket[int(handle)] = Request(handle, operation.run, group, name)

    def take_answered(self, ticket: int) -> Request | None:
        """`take` for an answer of rank 0; returns None if the request has failed before.

        Rank 0 may still answer requests of a rank that has been revoked.
        """
        return None if ticket in self._failed else self.take(ticket)

    def take(self, ticket: int) -> Request:
        """Removes and returns a request; its name may be used again."""
        request = self._by_ticket.pop(ticket)
        if request.name is not None:
            self._names.discard(request.name)
        return request

    def fail(self, ticket: int, error: BaseException) -> None:
        """Fails a request that rank 0 has refused."""
        with self._lock:
            request = self.take_answered(ticket)
        if request is not None:
            request.handle.fail(error)

    def fail_all(self, error_of: Callable[[str], BaseException]) -> None:
        """Fails all requests with ``error_of(what)``, since no answer will arrive; except for the one that is voted on.

        The executor fails that one, if the vote has not led to a go.
        """
        with self._lock:
            tickets = [ticket for ticket in self._by_ticket if ticket != self.voted_ticket]
            failed = [self.take(ticket) for ticket in tickets]
            self._failed.update(tickets)
        for request in failed:
            request.handle.fail(error_of(request.handle.what))

    def note_missing(self, missing: Iterable[MissingRanks]) -> None:
        """Replaces what is known of ranks that have not requested an operation."""
        self._missing = {
            each.ticket: list_names([self._describe_rank(rank) for rank in each.ranks], each.count) for each in missing
        }

    def waits_for(self, ticket: int) -> str:
        """The ranks that have not requested it, in words; empty if unknown, or if all have. Takes no lock."""
        return self._missing.get(ticket, "") if ticket in self._by_ticket else ""

    def whats(self) -> dict[int, str]:
        """The descriptions of all requests, by ticket."""
        with self._lock:
            return {ticket: request.handle.what for ticket, request in self._by_ticket.items()}
