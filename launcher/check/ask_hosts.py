"""Runs one program on each of several hosts and collects its output; the failure of one host does not end the others.

`run_check` calls it, and it starts the hosts' `agents`. In a job any failure ends everything: see `supervisor`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from ..agents.agent_group import Agents
from ..agents.wait_for_agents import SignalledError
from ..errors import LauncherError
from ..job.launch import signals_as_events
from ..plan.hosts import Host
from ..plan.job_spec import JobSpec
from ..plan.slots import plan_slots
from ..protocol.messages import AgentSaid, Event, Exited, Interrupted, LoopFailed, Lost, Output, Refused, Started
from ..system.signals import shell_code
from ..system.terminal_text import say
from ..workers.failure_message import Tail

_MOST_BYTES = 1 << 20  # of a host's stdout
_LONG_S = 2.0  # after this time a message names the hosts that are not done


@dataclass(frozen=True)
class Reply:
    """A host's lines on stdout; ``trouble`` is the reason if its program failed or did not end in time."""

    lines: tuple[str, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True)
class Question:
    """A program that each host runs, and how long it may take: ``command`` has arguments for its agent's Python.

    ``doing`` describes it to the user.
    """

    doing: str
    command: tuple[str, ...]
    patience_s: float


def ask_hosts(question: Question, job: JobSpec, hosts: Collection[Host]) -> dict[str, Reply]:
    """Returns every host's reply, by its label. If it takes long, a line on the terminal says so.

    ``job`` has the options for reaching the hosts, and the environment of the program.
    """
    log = say if job.verbose else lambda _: None
    events: SimpleQueue[Event] = SimpleQueue()
    # The user's working directory may not exist there, or may contain a queue.py.
    job = replace(job, command=question.command, in_python=True, cwd="/")
    with signals_as_events(events), Agents(job, events) as agents:
        greeted = agents.reach(hosts)
        replies = {label: Reply(trouble=why) for label, why in greeted.failures.items()}
        reached = tuple(host for host in hosts if host.label in greeted.hellos)
        if reached:
            slots = plan_slots(reached)
            agents.start(slots, greeted.hellos)
            collector = ReplyCollector({slot.number: slot.host for slot in slots}, agents.output_shown, log)
            replies |= collector.run(events, question, say if sys.stderr.isatty() else lambda _: None)
    return {host.label: replies[host.label] for host in hosts}


class ReplyCollector:
    """Collects the events of the hosts into replies. Each host has one worker."""

    def __init__(
        self, hosts: Mapping[int, Host], shown: Callable[[Output], object], log: Callable[[str], object]
    ) -> None:
        """``shown`` is called with each output that was received."""
        self._hosts = hosts
        self._shown = shown
        self._log = log
        self._waiting = set(hosts)
        self._stdout = {number: bytearray() for number in hosts}
        self._stderr = {number: Tail() for number in hosts}
        self._trouble: dict[int, str] = {}

    def run(
        self,
        events: SimpleQueue[Event],
        question: Question,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[str, Reply]:
        """Handles events until every host is done or the question's patience is over, and returns the replies."""
        begun = clock()
        alarms = [_LONG_S, question.patience_s] if question.patience_s > _LONG_S else [question.patience_s]
        while self._waiting and alarms:
            try:
                event = events.get(timeout=max(0.0, begun + alarms[0] - clock()))
            except Empty:
                alarms.pop(0)
                if alarms:
                    where = ", ".join(self._hosts[number].label for number in sorted(self._waiting))
                    say(f"{question.doing} on {where} ...")
                continue
            self._on(event)
        for number in sorted(self._waiting):
            self._end(
                number,
                f"{question.doing} took more than {question.patience_s:g} s; --start-timeout allows more time",
            )
        return {host.label: self._reply(number) for number, host in self._hosts.items()}

    def _on(self, event: Event) -> None:
        match event:
            case Output():
                self._shown(event)
                if event.stream == "stdout":
                    self._stdout[event.worker] += event.data[: _MOST_BYTES - len(self._stdout[event.worker])]
                else:
                    self._stderr[event.worker].add(event.data)
            case Started():
                self._log(f"pid {event.pid} on {self._hosts[event.worker].label}")
            case Exited(number, returncode):
                last = (self._stderr[number].lines() or ["it wrote nothing to stderr"])[-1]
                self._end(number, f"{last} (exit code {shell_code(returncode)})" if returncode else None)
            case Refused():
                here = [host.label for host in self._hosts.values() if host.is_here]
                self._end_host(event.host or here[0], event.why)
            case Lost():
                self._end_host(event.host, event.why)
            case LoopFailed():
                raise LauncherError(str(event))
            case AgentSaid():
                self._log(f"{event.host}: {event.text.rstrip()}")
            case Interrupted(signum):
                raise SignalledError(signum, "before the check was done")

    def _end_host(self, label: str, trouble: str) -> None:
        for number, host in self._hosts.items():
            if host.label == label and number in self._waiting:
                self._end(number, trouble)

    def _end(self, number: int, trouble: str | None) -> None:
        self._waiting.discard(number)
        if trouble is not None:
            self._trouble[number] = trouble

    def _reply(self, number: int) -> Reply:
        text = self._stdout[number].decode(errors="backslashreplace")
        return Reply(tuple(text.splitlines()), self._trouble.get(number))
