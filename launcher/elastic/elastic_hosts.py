"""The hosts of an elastic job: which are listed, being connected to, connected, or given up.

    hosts found ──► connect ──► Answered, Lost ──► the slots that workers may use

`elastic_job` calls it with what happens, and gives the usable slots to `membership`. A machine that is listed under
several names is used under the first. It has no thread and no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from ..agents.wait_for_agents import not_there_yet, still_not_there
from ..plan.hosts import AUTO
from ..wire.messages import Hello


class Connections(Protocol):
    """The agents on hosts: `agents.agent_group.Agents`."""

    def connect_later(self, label: str, slots: int) -> None: ...
    def leave(self, label: str) -> None: ...
    def start_worker(
        self, label: str, worker: int, variables: Mapping[str, str], hellos: Mapping[str, Hello]
    ) -> None: ...


class ElasticHosts:
    """The hosts of one elastic job and the state of each, by their labels."""

    def __init__(self, connections: Connections, *, start_timeout_s: float, say: Callable[[str], None]) -> None:
        self._connections = connections
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._wanted: dict[str, int] = {}
        self._late_at: dict[str, float] = {}  # by host that is being connected to: when it is given up
        self._not_there: dict[str, str] = {}  # by those of them that are not there yet: why
        self._hellos: dict[str, Hello] = {}
        self._same_as: dict[str, str] = {}  # further names of connected machines, and the name that is used

    def found(self, hosts: Mapping[str, int]) -> None:
        """Sets the hosts that are wanted, and the number of slots of each."""
        self._wanted = dict(hosts)

    def connect(self, now_s: float, barred_until_s: Callable[[str], float]) -> None:
        """Connects to the wanted hosts that are not connected, except those that get no workers now."""
        for label, slots in self._wanted.items():
            if not self.knows(label) and barred_until_s(label) <= now_s:
                self._late_at[label] = now_s + self._start_timeout_s
                self._connections.connect_later(label, slots)

    def answered(self, label: str, hello: Hello) -> None:
        """Notes that a host has answered, which was being connected to."""
        if label not in self._late_at:  # it was given up
            return
        del self._late_at[label]
        self._not_there.pop(label, None)
        first = next((known for known, other in self._hellos.items() if _is_same_machine(hello, other)), None)
        if first is None:
            self._hellos[label] = hello
            return
        self._same_as[label] = first
        self._connections.leave(label)
        self._say(f"{label} is a further name of {first}, and not a host of its own")

    def not_there_yet(self, label: str, cause: str, why: str) -> None:
        """Notes that a host cannot be connected to so far; tells the user once."""
        if label not in self._late_at:
            return
        if label not in self._not_there:
            self._say(not_there_yet(label, cause, self._start_timeout_s))
        self._not_there[label] = why

    def lost(self, label: str) -> bool:
        """Notes that a host is lost, or cannot be connected to; returns whether it was connected."""
        self._late_at.pop(label, None)
        self._not_there.pop(label, None)
        was_connected = self._hellos.pop(label, None) is not None
        self._same_as = {other: first for other, first in self._same_as.items() if first != label}
        self._connections.leave(label)
        return was_connected

    def late(self, now_s: float) -> dict[str, str]:
        """Returns the hosts that have not answered in time, and why each is given up."""
        timeout_s = self._start_timeout_s
        no_answer = f"no answer within {timeout_s:g} s (--start-timeout)"
        return {
            label: still_not_there(self._not_there[label], timeout_s) if label in self._not_there else no_answer
            for label, late_at in self._late_at.items()
            if late_at <= now_s
        }

    def let_go(self, in_use: Collection[str]) -> None:
        """Hangs up on hosts that are no longer wanted, except those ``in_use``, and stops connecting to such."""
        for label in [label for label in self._late_at if label not in self._wanted]:
            self.lost(label)
        for label in [label for label in self._hellos if label not in self.usable() and label not in in_use]:
            self.lost(label)

    @property
    def are_wanted(self) -> bool:
        """Whether any hosts are listed, though perhaps none of them can be reached."""
        return bool(self._wanted)

    @property
    def are_known(self) -> bool:
        """Whether each host has answered, failed, or is not there yet while there are others that can be used."""
        return not self._late_at or (bool(self.usable()) and self._late_at.keys() <= self._not_there.keys())

    def usable(self) -> dict[str, int]:
        """Returns the slots of the connected hosts that are wanted, in the order in which they were named."""
        slots: dict[str, int] = {}
        for label, count in self._wanted.items():
            name = self._same_as.get(label, label)
            if hello := self._hellos.get(name):
                slots[name] = slots.get(name, 0) + (hello.slots or 1 if count == AUTO else count)
        return slots

    def all_are_given_up(self, barred_until_s: Callable[[str], float]) -> bool:
        """Whether hosts are wanted, and all of them are excluded for ever after failures."""
        return bool(self._wanted) and all(barred_until_s(label) == math.inf for label in self._wanted)

    def due_s(self, barred_until_s: Callable[[str], float]) -> float | None:
        """Returns when the next host counts as late, or is to be connected to again."""
        again = [barred_until_s(label) for label in self._wanted if not self.knows(label)]
        return min([*self._late_at.values(), *(at_s for at_s in again if math.isfinite(at_s))], default=None)

    def start(self, label: str, worker: int, variables: Mapping[str, str]) -> None:
        """Starts a worker on a connected host."""
        self._connections.start_worker(label, worker, variables, self._hellos)

    def knows(self, label: str) -> bool:
        """Whether a host is connected, or being connected to."""
        return label in self._late_at or label in self._hellos or label in self._same_as


def _is_same_machine(one: Hello, other: Hello) -> bool:
    return one.machine is not None and one.machine == other.machine
