"""``hvdlite-run --check``: asks the hosts of a job, before it is started, whether it can run there, and prints tables.

    `host_facts` of each host ──► `hvdlite.round_trips` between those that can train ──► `diagnosis` ──► tables

`cli` calls it. `ask_hosts` runs both programs in agents, as for a job, in the environment that its workers would have.
The failure of one host does not end the others.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from hvdlite_wire.codec import MessageError, decode

from ..agents.agent_group import Agents
from ..agents.wait_for_agents import SignalledError
from ..errors import LauncherError
from ..job.launch import signals_as_events
from ..plan.hosts import Host, plan_slots
from ..plan.job_spec import JobSpec
from ..protocol.messages import AgentSaid, Event, Exited, Interrupted, LoopFailed, Lost, Output, Refused, Started
from ..system import machine, process_tree
from ..system.process_tree import shell_code
from ..system.terminal_text import one_line, say, write
from ..workers.failure_message import Tail
from . import host_facts
from .diagnosis import RoundTrips, diagnose, show
from .host_facts import Facts

# As in `hvdlite.round_trips`: how long two hosts try to connect, and how long everything else may take.
_CONNECT_S, _SLACK_S = 20.0, 20.0
_MOST_BYTES = 1 << 20  # of a host's stdout


@dataclass(frozen=True)
class Reply:
    """A host's lines on stdout; ``trouble`` is the reason if its program failed or did not end in time."""

    lines: tuple[str, ...] = ()
    trouble: str | None = None


def check(job: JobSpec) -> int:
    """Prints the tables and returns 0 if all is well, else 1.

    As for `launch`, this process must have no other children, and must call this from its main thread.
    """
    process_tree.adopt_orphans()
    hosts = tuple(replace(host, slots=1) for host in job.hosts)
    program = ("-c", inspect.getsource(host_facts), job.cwd, inspect.getsource(machine))
    replies = ask_hosts(job, hosts, program, "importing torch", job.start_timeout_s)
    found = {label: _facts_in(reply) for label, reply in replies.items()}
    facts = {host: of for host, of in found.items() if isinstance(of, Facts)}
    can_train = {host for host, of in facts.items() if of.torch is not None and of.hvdlite is not None and of.gloo}
    trips = _measure(job, [host for host in hosts if host.label in can_train]) if len(can_train) > 1 else None
    judged = diagnose(facts, job.cwd)
    text, is_well = show({host: of if isinstance(of, str) else judged[host] for host, of in found.items()}, trips)
    # Messages of ssh and torch may contain any characters.
    encoding = sys.stdout.encoding
    write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    return 0 if is_well else 1


def _facts_in(reply: Reply) -> Facts | str:
    """Returns a host's facts, or the reason why there are none."""
    facts = next(filter(None, map(facts_from, reply.lines)), None)
    if facts is None:
        return reply.trouble or f"its report cannot be read: {reply.lines[:1]}"
    # Each text on one printable line, so that no host can add lines to the table.
    said: dict[str, Any] = {}
    for name, value in vars(facts).items():
        if isinstance(value, str):
            said[name] = one_line(value)
        elif isinstance(value, tuple):
            said[name] = tuple(map(one_line, value))
    return replace(facts, **said)


def facts_from(line: str) -> Facts | None:
    """Returns the facts that `host_facts` printed as ``line``; None if the line is anything else."""
    try:
        return decode(Facts, line)
    except MessageError:
        return None


def _measure(job: JobSpec, hosts: Collection[Host]) -> RoundTrips:
    rounds = len(hosts) - 1 + len(hosts) % 2
    program = ("-m", "hvdlite.round_trips", f"{job.start_timeout_s:g}")
    patience_s = job.start_timeout_s + rounds * _CONNECT_S + _SLACK_S
    return round_trips_in(ask_hosts(job, hosts, program, "measuring round trips", patience_s))


def round_trips_in(replies: Mapping[str, Reply]) -> RoundTrips:
    """Combines what both hosts of each pair report: if both measured a time, the first one's counts."""
    labels = list(replies)
    said = {label: _said_of_peers(reply, labels) for label, reply in replies.items()}
    trips = RoundTrips(labels)
    for first, second in [(first, second) for i, first in enumerate(labels) for second in labels[i + 1 :]]:
        of_both = {pair: said[pair[0]].get(pair[1], {}) for pair in ((first, second), (second, first))}
        blocked = {pair: one_line(str(word["blocked"])) for pair, word in of_both.items() if "blocked" in word}
        errors = [one_line(str(word["error"])) for word in of_both.values() if "error" in word]
        measured = [word["us"] for word in of_both.values() if "us" in word]
        if blocked:
            trips.blocked.update(blocked)
        elif measured and not errors:
            trips.times_us[first, second] = measured[0]
        else:
            silent = [reply.trouble for reply in (replies[first], replies[second]) if reply.trouble is not None]
            whys = [*errors, *silent, "one of them did not take part in the measurement"]
            trips.troubles[first, second] = whys[0]
    return trips


def _said_of_peers(reply: Reply, labels: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the result with each peer: ``us``, else ``blocked`` or ``error`` with the reason."""
    said: dict[str, dict[str, Any]] = {}
    for line in reply.lines:
        try:
            word = json.loads(line)
            said[labels[word["peer"]]] = {"us": float(word["us"])} if "us" in word else word
        # Lines that are no results, as a start-up file of its Python may print them.
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue
    return said


def ask_hosts(
    job: JobSpec, hosts: Collection[Host], program: tuple[str, ...], doing: str, patience_s: float
) -> dict[str, Reply]:
    """Runs a program on each host and returns every host's reply, by its label.

    ``job`` has the options for reaching the hosts, and the environment of the program. ``program`` has arguments for
    the agent's Python, and ``doing`` describes it to the user.
    """
    log = say if job.verbose else lambda _: None
    events: SimpleQueue[Event] = SimpleQueue()
    # The user's working directory may not exist there, or may contain a queue.py.
    job = replace(job, command=program, in_python=True, cwd="/")
    with signals_as_events(events), Agents(job, events) as agents:
        greeted = agents.reach(hosts)
        replies = {label: Reply(trouble=why) for label, why in greeted.failures.items()}
        if reached := tuple(host for host in hosts if host.label in greeted.hellos):
            slots = plan_slots(reached)
            agents.start(slots, greeted.hellos)
            if sys.stderr.isatty():
                say(f"{doing} on {', '.join(greeted.hellos)} ...")
            collector = ReplyCollector({slot.number: slot.host for slot in slots}, agents.output_shown, log)
            replies |= collector.run(events, doing, patience_s)
    return {host.label: replies[host.label] for host in hosts}


@dataclass
class _Worker:
    """What one host's program has written so far, and the reason if it failed."""

    host: Host
    stdout: bytearray = field(default_factory=bytearray)
    stderr: Tail = field(default_factory=Tail)
    is_done: bool = False
    trouble: str | None = None

    def end(self, trouble: str | None) -> None:
        self.is_done, self.trouble = True, self.trouble or trouble


class ReplyCollector:
    """Collects the events of the hosts into replies. Each host has one worker."""

    def __init__(
        self, hosts: Mapping[int, Host], shown: Callable[[Output], object], log: Callable[[str], object]
    ) -> None:
        """``shown`` is called with each output that was received."""
        self._workers = {number: _Worker(host) for number, host in hosts.items()}
        self._shown = shown
        self._log = log

    def run(
        self,
        events: SimpleQueue[Event],
        doing: str,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[str, Reply]:
        """Handles events until every host is done or the patience is over, and returns the replies."""
        give_up_at = clock() + patience_s
        while waiting := [worker for worker in self._workers.values() if not worker.is_done]:
            try:
                self._on(events.get(timeout=max(0.0, give_up_at - clock())), doing)
            except Empty:
                for worker in waiting:
                    worker.end(f"{doing} took more than {patience_s:g} s; --start-timeout allows more time")
        return {
            worker.host.label: Reply(
                tuple(worker.stdout.decode(errors="backslashreplace").splitlines()), worker.trouble
            )
            for worker in self._workers.values()
        }

    def _on(self, event: Event, doing: str) -> None:
        match event:
            case Output():
                self._shown(event)
                worker = self._workers[event.worker]
                if event.stream == "stdout":
                    worker.stdout += event.data[: _MOST_BYTES - len(worker.stdout)]
                else:
                    worker.stderr.add(event.data)
            case Started():
                self._log(f"pid {event.pid} on {self._workers[event.worker].host.label}")
            case Exited(number, returncode):
                worker = self._workers[number]
                last = (worker.stderr.lines() or [f"{doing} failed, and wrote nothing to stderr"])[-1]
                worker.end(f"{last} (exit code {shell_code(returncode)})" if returncode else None)
            case Refused() | Lost():
                for worker in self._workers.values():
                    is_it = worker.host.label == event.host if event.host else worker.host.is_here
                    if is_it and not worker.is_done:
                        worker.end(event.why)
            case LoopFailed():
                raise LauncherError(str(event))
            case AgentSaid():
                self._log(f"{event.host}: {event.text.rstrip()}")
            case Interrupted(signum):
                raise SignalledError(signum, "before the check was done")
