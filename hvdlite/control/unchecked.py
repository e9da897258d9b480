"""
Operations in the order of their calls, without a check that the ranks agree: for one rank, and with HVDLITE_CHECK=0.

    submit ── carried out by the caller, at once

Asynchronous ones are done when they return. Pairing by name, and `join`, need the `control_client`; so do several
threads that call operations: which belong together nobody can know, so a call while another thread is in one of the
same process set is a RuntimeError.
"""

from __future__ import annotations

from typing import Protocol

from ..comm.group import Group
from ..comm.recorder import OPERATIONS, Recorder
from ..errors import MismatchError
from .controller import SitOut, StandIn
from .handle import Handle
from .mismatch import words_of_difference
from .operation import Execution, Operation
from .reducer_registry import OneThread


class Listener(Protocol):
    """The client that hears of other ranks' ends; the controller closes it."""

    def close(self) -> None: ...


class UncheckedController:
    """A controller that trusts the program."""

    def __init__(self, size: int, recorder: Recorder, listener: Listener | None = None) -> None:
        """``listener`` hears of the other ranks' ends, if there are others."""
        self._size = size
        self._recorder = recorder
        self._listener = listener
        self._one_thread: dict[int, OneThread] = {}  # by process set

    def open_channel(self, group: Group) -> None:
        return

    def close_channel(self, group: Group) -> None:
        return

    def submit(self, group: Group, operation: Operation) -> Handle:
        what = operation.describe()
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
                    result = operation.run(Execution(group, what, owns, group.size))
                handle.succeed(result)
            except Exception as error:  # noqa: BLE001 - it is raised by whoever waits for the handle
                handle.fail(error)
        return handle

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        if self._size > 1:
            raise RuntimeError(
                "hvd.join() needs to know what the other ranks do: leave HVDLITE_CHECK unset, or set it to 1"
            )
        handle = Handle("join")
        handle.succeed(0)
        return handle

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _compare(group: Group, operation: Operation) -> None:
    what = operation.describe()
    values = group.agree(operation.same, what)
    if values is not None:
        hosts = dict(zip(group.ranks, group.hosts, strict=True))
        asked = dict(zip(group.ranks, values, strict=True))
        raise MismatchError(words_of_difference(operation.kind, what, asked, hosts))
