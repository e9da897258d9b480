"""``hvdlite-run --check``: asks the hosts of a job, before it is started, whether it can run there, and prints tables.

    `host_facts` of each host ──► `hvdlite.round_trips` between those that can train ──► `diagnosis` ──► tables

`cli` calls it. `ask_hosts` runs both programs in agents, as for a job, in the environment that its workers would have.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from .diagnosis import Cell, diagnose
from .host_facts import Facts

# As in `hvdlite.round_trips`: how long two hosts try to connect, and how long everything else may take.
_CONNECT_S, _SLACK_S = 20.0, 20.0


@dataclass(frozen=True)
class Marks:
    good: str
    bad: str
    none: str
    micro: str

    def fit(self, encoding: str) -> bool:
        try:
            f"{self.good}{self.bad}{self.none}{self.micro}".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


UNICODE = Marks("✓", "✗", "–", "µ")
ASCII = Marks("ok", "!!", "-", "u")


@dataclass(frozen=True)
class RoundTrips:
    """The round trips between hosts, by pairs in the hosts' order: the microseconds, or why there are none.

    ``blocked`` has the reason why the first of two hosts cannot open a TCP connection to the second. Its pairs are in
    any order, and have no other entry.
    """

    hosts: Sequence[str]
    times_us: Mapping[tuple[str, str], float]
    troubles: Mapping[tuple[str, str], str]
    blocked: Mapping[tuple[str, str], str] = field(default_factory=dict)


def check(job: JobSpec) -> int:
    """Prints the tables and returns 0 if all is well, else 1.

    As for `launch`, this process must have no other children, and must call this from its main thread.
    """
    process_tree.adopt_orphans()
    hosts = tuple(replace(host, slots=1) for host in job.hosts)
    found = _ask(job, hosts)
    facts = {host: of for host, of in found.items() if isinstance(of, Facts)}
    can_train = {host for host, of in facts.items() if of.torch is not None and of.hvdlite is not None and of.gloo}
    able = [host for host in hosts if host.label in can_train]
    trips = _measure(job, able) if len(able) > 1 else None
    notes = ["round trips between hosts: not measured, because fewer than two hosts have torch and hvdlite"]
    judged = diagnose(facts, job.cwd)
    rows = {host: of if isinstance(of, str) else judged[host] for host, of in found.items()}
    encoding = sys.stdout.encoding
    marks = UNICODE if UNICODE.fit(encoding) else ASCII
    text, is_well = show(rows, trips, marks, notes if trips is None and len(hosts) > 1 else ())
    # Messages of ssh and torch may contain any characters.
    write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    return 0 if is_well else 1


def _ask(job: JobSpec, hosts: Collection[Host]) -> dict[str, Facts | str]:
    """Returns each host's facts, or the reason why there are none."""
    program, counts = map(inspect.getsource, (host_facts, machine))
    question = Question("importing torch", ("-c", program, job.cwd, counts), patience_s=job.start_timeout_s)
    return {label: _facts_in(reply) for label, reply in ask_hosts(question, job, hosts).items()}


def facts_from(line: str) -> Facts | None:
    """Returns the facts that `host_facts` printed as ``line``; None if the line is anything else."""
    try:
        return decode(Facts, line)
    except MessageError:
        return None


def _facts_in(reply: Reply) -> Facts | str:
    for line in reply.lines:
        if facts := facts_from(line):
            return _readable(facts)
    return reply.trouble or f"its report cannot be read: {reply.lines[:1]}"


def _readable(facts: Facts) -> Facts:
    """Returns the facts with every text on one printable line, so that no host can add lines to the table."""
    said: dict[str, Any] = {}
    for name, value in vars(facts).items():
        if isinstance(value, str):
            said[name] = one_line(value)
        elif isinstance(value, tuple):
            said[name] = tuple(map(one_line, value))
    return replace(facts, **said)


def _measure(job: JobSpec, hosts: Collection[Host]) -> RoundTrips:
    rounds = len(hosts) - 1 + len(hosts) % 2
    question = Question(
        "measuring round trips",
        ("-m", "hvdlite.round_trips", f"{job.start_timeout_s:g}"),
        patience_s=job.start_timeout_s + rounds * _CONNECT_S + _SLACK_S,
    )
    return round_trips_in(ask_hosts(question, job, hosts))


def round_trips_in(replies: Mapping[str, Reply]) -> RoundTrips:
    """Combines what both hosts of each pair report: if both measured a time, the first one's counts."""
    labels = list(replies)
    times_us: dict[tuple[str, str], float] = {}
    troubles: dict[tuple[str, str], str] = {}
    blocked: dict[tuple[str, str], str] = {}
    pairs = [(first, second) for i, first in enumerate(labels) for second in labels[i + 1 :]]
    said = {label: _said_of_peers(reply, labels) for label, reply in replies.items()}
    for first, second in pairs:
        of_both = [said[first].get(second), said[second].get(first)]
        directions = zip([(first, second), (second, first)], of_both, strict=True)
        if found := {pair: word.why for pair, word in directions if isinstance(word, BlockedPeer)}:
            blocked |= found
            continue
        errors = [word for word in of_both if isinstance(word, str)]
        silent = [r.trouble for r in (replies[first], replies[second]) if r.trouble is not None]
        measured = [word for word in of_both if isinstance(word, float)]
        if measured and not errors:
            times_us[first, second] = measured[0]
        else:
            troubles[first, second] = next(iter([*errors, *silent]), "one of them did not take part in the measurement")
    return RoundTrips(labels, times_us, troubles, blocked)


@dataclass(frozen=True)
class BlockedPeer:
    """A host cannot open a TCP connection to its peer: the reason."""

    why: str


def _said_of_peers(reply: Reply, labels: list[str]) -> dict[str, float | str | BlockedPeer]:
    said: dict[str, float | str | BlockedPeer] = {}
    for line in reply.lines:
        try:
            word = json.loads(line)
            said[labels[word["peer"]]] = _result(word)
        # Lines that are no results, as a start-up file of its Python may print them.
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue
    return said


def _result(word: dict[str, Any]) -> float | str | BlockedPeer:
    if "us" in word:
        return float(word["us"])
    return BlockedPeer(one_line(str(word["blocked"]))) if "blocked" in word else one_line(str(word["error"]))


# -- the tables: hosts, round trips between them, and what to do


def show(
    rows: Mapping[str, Mapping[str, Cell] | str],
    trips: RoundTrips | None,
    marks: Marks,
    notes: Iterable[str] = (),
) -> tuple[str, bool]:
    """Returns the text, and whether all is well. A row is a host's cells, or the reason why there are none.

    ``notes`` are written below the tables.
    """
    parts = [_hosts(rows, marks)]
    if trips is not None:
        parts.append(f"round trips between hosts, over gloo\n\n{_trips(trips, marks)}")
    parts += [f"{note}\n" for note in notes]
    todo = [*_todo_of_hosts(rows), *_todo_of_round_trips(trips)]
    if todo:
        parts.append("what to do\n\n" + "".join(f"  {marks.bad} {line}\n" for line in todo))
    return "\n".join(parts), not todo


def _hosts(rows: Mapping[str, Mapping[str, Cell] | str], marks: Marks) -> str:
    titles = next((list(cells) for cells in rows.values() if not isinstance(cells, str)), [])
    indent = " " * (len(marks.good) + 1)
    lines = [["host", *(indent + title for title in titles)]]
    for host, cells in rows.items():
        if isinstance(cells, str):  # without what follows in parentheses, which is in the list of what to do
            lines.append([host, f"{marks.bad} {cells.partition(' (')[0]}"])
        else:
            lines.append([host, *(_cell(cell, marks) for cell in cells.values())])
    return _aligned(lines)


def _cell(cell: Cell, marks: Marks) -> str:
    mark = marks.bad if cell.wrong else marks.good if cell.text else marks.none
    return f"{mark:{len(marks.good)}} {cell.text}".rstrip()


def _trips(trips: RoundTrips, marks: Marks) -> str:
    def cell(host: str, other: str) -> str:
        if host == other:
            return marks.none
        us = trips.times_us.get((host, other), trips.times_us.get((other, host)))
        return marks.bad if us is None else _duration(us, marks)

    lines = [["", *trips.hosts]]
    lines += [[host, *(cell(host, other) for other in trips.hosts)] for host in trips.hosts]
    return _aligned(lines)


def _duration(us: float, marks: Marks) -> str:
    return f"{us:.0f} {marks.micro}s" if us < 1000 else f"{us / 1000:.1f} ms"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Aligns the lines in columns. A line with fewer cells than others may extend beyond them."""
    count = max(map(len, lines))
    widths = [max((len(line[i]) for line in lines if len(line) == count), default=0) for i in range(count)]
    widths[0] = max(len(line[0]) for line in lines)
    rows = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)) for line in lines]
    return "".join(f"{row.rstrip()}\n" for row in rows)


def _todo_of_hosts(rows: Mapping[str, Mapping[str, Cell] | str]) -> Iterable[str]:
    for host, cells in rows.items():
        if isinstance(cells, str):
            yield f"{host}: {cells}"
        else:
            yield from (f"{host}: {cell.wrong}" for cell in cells.values() if cell.wrong)


def _todo_of_round_trips(trips: RoundTrips | None) -> Iterable[str]:
    if trips is None:
        return
    for (host, other), why in trips.troubles.items():
        step = "allow TCP between them, or choose another network with --network-interface"
        yield f"{host} and {other}: {why} ({step})"
    for (host, other), why in trips.blocked.items():
        back = trips.blocked.get((other, host))
        step = "a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface"
        if back is None:
            yield f"{host} cannot connect to {other}: {why} ({step})"
        elif trips.hosts.index(host) < trips.hosts.index(other):
            reasons = why if back == why else f"{why}; {back}"
            yield f"{host} and {other} cannot connect to each other: {reasons} ({step})"


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
