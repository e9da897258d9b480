"""
A controller that runs operations in the order of the calls, without checking that the ranks agree.

    submit ── run by the calling thread, at once

It is there for one rank, and for HVDLITE_CHECK=0. Asynchronous operations are done when they return. Pairing by name
and `join` need the `control_client`. So do several threads that call operations, since nothing shows which calls of the
ranks belong together: a call while another thread is in one of the same process set is a RuntimeError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .. import forks
from ..calls.generation import OneThread
from ..calls.handle import Handle
from ..calls.mismatch import words_of_difference
from ..calls.operation import Controller, DirectCall, Execution, Operation, SitOut, StandIn
from ..comm.group import Group
from ..comm.recorder import OPERATIONS, Recorder
from ..comm.step_clock import RankPace
from ..errors import MismatchError, NotInitializedError


@dataclass(eq=False)
class UncheckedController:
    """A controller that trusts the program; ``_client``, if there are other ranks, receives their ends."""

    _size: int
    _recorder: Recorder
    _client: Controller | None = None
    _one_thread: dict[int, OneThread] = field(default_factory=dict)  # by process set

    def open_group(self, group: Group) -> None:
        return

    def close_group(self, group: Group) -> None:
        return

    def waits(self) -> list[tuple[str, float]]:
        return []

    def submit(self, group: Group, operation: Operation) -> Handle:
        what = operation.describe()
        forks.require_rank(what)
        handle = Handle(what)
        one_thread = self._one_thread.setdefault(group.set_id, OneThread(self._size))
        with one_thread.only(f"{what} with HVDLITE_CHECK=0"):
            try:
                if operation.kind.is_compared:
                    _compare(group, operation)
                if operation.own is None or group.size == 1:
                    owns = [operation.own] * group.size
                else:
                    owns = group.all_gather_json(operation.own, what)
                with self._recorder.span(OPERATIONS, what):
                    execution = Execution(group, what, owns, group.size)
                    result = group.ends.run(group.label, partial(operation.run, execution))
                handle.succeed(result)
            except Exception as error:  # noqa: BLE001 - raised by threads that wait for the handle
                handle.fail(error)
        return handle

    @property
    def calls_directly(self) -> bool:
        return False

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        return self.submit(group, call.operation()).wait()

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        forks.require_rank("hvd.join()")
        if self._size > 1:
            raise RuntimeError("hvd.join() does not work with HVDLITE_CHECK=0: unset HVDLITE_CHECK, or set it to 1")
        handle = Handle("join")
        handle.succeed(0)
        return handle

    def stragglers(self) -> tuple[RankPace, ...]:
        return () if self._client is None else self._client.stragglers()

    def revoke(self, reason: str) -> None:
        # Operations run on the threads that submit them, and wait in their groups alone.
        return

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class StandbyController(UncheckedController):
    """The controller of a worker that is not a rank yet: it refuses every operation."""

    def submit(self, group: Group, operation: Operation) -> Handle:
        raise NotInitializedError(
            f"{operation.describe()}: this worker joins a job that runs already, and has no other ranks until it calls "
            "the function of hvd.elastic.run: call no collective before that, and broadcast no parameters"
        )

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        raise NotInitializedError(
            "hvd.join() was called before the function of hvd.elastic.run, by a worker that joins"
        )


def _compare(group: Group, operation: Operation) -> None:
    what = operation.describe()
    values = group.agree(operation.same, what)
    if values is not None:
        hosts = dict(zip(group.ranks, group.hosts, strict=True))
        asked = dict(zip(group.ranks, values, strict=True))
        raise MismatchError(words_of_difference(operation.kind, what, asked, hosts))
