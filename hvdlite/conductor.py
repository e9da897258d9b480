"""
Who sees to it that all ranks carry out the same operations in the same order.

    submit(group, request, body) ── Handle ── ... all ranks of the group have asked for the same ... ── body(turn)

`InOrder` trusts the program: what is asked for is carried out at once, and pairs up by the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .collective import Group
from .handle import Handle
from .request import Request, Turn


class Conductor(Protocol):
    """Carries out operations; each rank has one."""

    def submit(self, group: Group, request: Request, body: Callable[[Turn], Any]) -> Handle:
        """Ask for an operation among the ranks of ``group``; ``body`` is called when all of them have.

        The body may use any collective of ``turn.group``, and nothing else that waits. What it returns is what the
        handle's `wait` returns, and what it raises is raised there.
        """
        ...

    def close(self) -> None:
        """Carry out nothing any more. Waits for nobody."""
        ...


class InOrder:
    """Operations in the order of their calls, carried out by the caller; without a check that the ranks agree."""

    def __init__(self) -> None:
        self._channels: dict[int, Group] = {}

    def submit(self, group: Group, request: Request, body: Callable[[Turn], Any]) -> Handle:
        what = request.describe()
        handle = Handle(what)
        try:
            channel = self._channels.setdefault(group.set_id, group)
            owns = [request.own] if group.size == 1 else channel.all_gather_object(request.own, what)
            handle.succeed(body(Turn(channel, what, owns, group.size)))
        except Exception as error:  # noqa: BLE001 - it is raised by whoever waits for the handle
            handle.fail(error)
        return handle

    def close(self) -> None:
        self._channels.clear()
