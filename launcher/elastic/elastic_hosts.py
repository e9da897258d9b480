"""The hosts of an elastic job: which are listed, being connected to, connected, or given up.

    hosts found ──► connect ──► Answered, Lost ──► the slots that workers may use

`elastic_job` calls it with what happens, and gives the usable slots to `membership`. A machine that is listed under
several names is used under the first. It has no thread and no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..agents.agent_group import Agents
from ..agents.wait_for_agents import not_there_yet, still_not_there
from ..plan.hosts import AUTO
from ..protocol.messages import Hello


@dataclass
class _Connecting:
    """A host that is being connected to until ``late_at_s``. ``why_not_there``: why that is not possible so far."""

    late_at_s: float
    why_not_there: str | None = None


@dataclass
class _Connected:
    """A host that has answered. ``is_given_up``: it is to be lost."""

    hello: Hello
    has_run_worker: bool = False
    is_given_up: bool = False


class ElasticHosts:
    """The hosts of one elastic job and the state of each, by their labels."""

    def __init__(self, connections: Agents, *, start_timeout_s: float, say: Callable[[str], None]) -> None:
        self._connections = connections
        self.start_timeout_s = start_timeout_s
        self._say = say
        self._wanted: dict[str, int] = {}
        self._connecting: dict[str, _Connecting] = {}
        self._connected: dict[str, _Connected] = {}
        self._same_as: dict[str, str] = {}  # further names of connected machines, and the name that is used
        self._have_been_known = False

    def found(self, hosts: Mapping[str, int]) -> None:
        self._wanted = dict(hosts)

    def connect(self, now_s: float, barred_until_s: Callable[[str], float]) -> None:
        """Connects to the wanted hosts that are not connected, except those that get no workers now."""
        for label, slots in self._wanted.items():
            if not self.knows(label) and barred_until_s(label) <= now_s:
                self._connecting[label] = _Connecting(now_s + self.start_timeout_s)
                self._connections.connect_later(label, slots)

    def answered(self, label: str, hello: Hello) -> None:
        """Notes that a host has answered, which was being connected to."""
        if self._connecting.pop(label, None) is None:  # it was given up
            return
        machines = {other.hello.machine: known for known, other in self._connected.items()}
        first = None if hello.machine is None else machines.get(hello.machine)
        if first is None:
            self._connected[label] = _Connected(hello)
            return
        self._same_as[label] = first
        self._connections.leave(label)
        self._say(f"{label} is a further name of {first}, and not a host of its own")

    def not_there_yet(self, label: str, cause: str, why: str) -> None:
        if (host := self._connecting.get(label)) is not None:
            if host.why_not_there is None:
                self._say(not_there_yet(label, cause, self.start_timeout_s))
            host.why_not_there = why

    def lost(self, label: str) -> bool:
        """Notes that a host is lost, or cannot be connected to; returns whether it was connected."""
        self._connecting.pop(label, None)
        was_connected = self._connected.pop(label, None) is not None
        self._same_as = {other: first for other, first in self._same_as.items() if first != label}
        self._connections.leave(label)
        return was_connected

    def late(self, now_s: float) -> dict[str, str]:
        """Returns the hosts that have not answered in time, and why each is given up."""
        timeout_s = self.start_timeout_s
        no_answer = f"no answer within {timeout_s:g} s (--start-timeout)"
        return {
            label: no_answer if host.why_not_there is None else still_not_there(host.why_not_there, timeout_s)
            for label, host in self._connecting.items()
            if host.late_at_s <= now_s
        }

    def let_go(self, in_use: Collection[str]) -> None:
        """Hangs up on hosts that are no longer wanted, except those ``in_use``, and stops connecting to such."""
        unwanted = [label for label in self._connecting if label not in self._wanted]
        usable = self.usable()
        unwanted += [label for label in self._connected if label not in usable and label not in in_use]
        for label in unwanted:
            self.lost(label)

    def ran_worker(self, label: str) -> None:
        if label in self._connected:
            self._connected[label].has_run_worker = True

    def has_run_worker(self, label: str) -> bool:
        return label in self._connected and self._connected[label].has_run_worker

    def give_up(self, label: str) -> bool:
        """Notes that a connected host is to be lost; returns False if that is known already, or it is not connected."""
        host = self._connected.get(label)
        if host is None or host.is_given_up:
            return False
        host.is_given_up = True
        return True

    @property
    def are_wanted(self) -> bool:
        """Whether any hosts are listed, though perhaps none of them can be reached."""
        return bool(self._wanted)

    def have_been_known(self) -> bool:
        """Whether the hosts that were found first are known, for which the first generation waits.

        Each has answered, failed, or is not there yet while others can be used.
        """
        if not self._have_been_known:
            not_there = all(host.why_not_there is not None for host in self._connecting.values())
            self._have_been_known = not self._connecting or (bool(self.usable()) and not_there)
        return self._have_been_known

    def usable(self) -> dict[str, int]:
        """Returns the slots of the connected hosts that are wanted, in the order in which they were named."""
        slots: dict[str, int] = {}
        for label, count in self._wanted.items():
            name = self._same_as.get(label, label)
            if host := self._connected.get(name):
                slots[name] = slots.get(name, 0) + (host.hello.slots or 1 if count == AUTO else count)
        return slots

    def all_are_given_up(self, barred_until_s: Callable[[str], float]) -> bool:
        """Whether hosts are wanted, and all of them are excluded for ever after failures."""
        return bool(self._wanted) and all(barred_until_s(label) == math.inf for label in self._wanted)

    def due_s(self, barred_until_s: Callable[[str], float]) -> float | None:
        """Returns when the next host counts as late, or is to be connected to again."""
        late = [host.late_at_s for host in self._connecting.values()]
        again = [barred_until_s(label) for label in self._wanted if not self.knows(label)]
        return min([*late, *(at_s for at_s in again if math.isfinite(at_s))], default=None)

    def start(self, label: str, worker: int, variables: Mapping[str, str]) -> None:
        hellos = {known: host.hello for known, host in self._connected.items()}
        self._connections.start_worker(label, worker, variables, hellos)

    def label_here(self) -> str:
        return self._connections.label_here()

    def knows(self, label: str) -> bool:
        return label in self._connecting or label in self._connected or label in self._same_as
