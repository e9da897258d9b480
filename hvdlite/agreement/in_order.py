"""
Operations in the order of their calls, without a check that the ranks agree: for one rank, and with HVDLITE_CHECK=0.

    submit ── carried out by the caller, at once

Asynchronous ones are done when they return. Pairing by name, and `join`, need the `negotiator`.
"""

from __future__ import annotations

from typing import Protocol

from ..channels.collective import Group
from ..channels.recorder import OPERATIONS
from .conductor import Body, StandIn
from .handle import Handle
from .request import Request, Turn


class Listener(Protocol):
    """What is to be closed with a conductor."""

    def close(self) -> None: ...


class InOrder:
    """A conductor that trusts the program."""

    def __init__(self, size: int, listener: Listener | None = None) -> None:
        """``listener`` hears of the other ranks' ends, if there are others."""
        self._size = size
        self._listener = listener

    def open_channel(self, group: Group) -> None:
        return

    def close_channel(self, group: Group) -> None:
        return

    def submit(self, group: Group, request: Request, body: Body) -> Handle:
        what = request.describe()
        handle = Handle(what)
        try:
            if request.own is None or group.size == 1:
                owns = [request.own] * group.size
            else:
                owns = group.all_gather_json(request.own, what)
            with group.recorder.span(OPERATIONS, what):
                result = body(Turn(group, what, owns, group.size))
            handle.succeed(result)
        except Exception as error:  # noqa: BLE001 - it is raised by whoever waits for the handle
            handle.fail(error)
        return handle

    def join(self, *, average_of_active: bool, stand_in: StandIn) -> Handle:
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
