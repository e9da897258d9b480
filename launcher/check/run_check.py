"""``hvdlite-run --check``: asks the hosts of a job, before it is started, whether it can run there, and prints tables.

    `host_facts` of each host ──► `hvdlite.round_trips` between those that can train ──► `diagnosis`, `check_table`

`cli` calls it. `ask_hosts` runs both programs in agents, as for a job, in the environment that its workers would have.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hvdlite_wire.codec import decode
from hvdlite_wire.errors import MessageError

from ..plan.hosts import Host
from ..plan.job_spec import JobSpec
from ..system import machine, process_tree
from ..system.terminal_text import one_line, write
from . import host_facts
from .ask_hosts import Question, Reply, ask_hosts
from .check_table import ASCII, UNICODE, RoundTrips, show
from .diagnosis import diagnose
from .host_facts import Facts

# As in `hvdlite.round_trips`: how long two hosts try to connect, and how long everything else may take.
_CONNECT_S, _SLACK_S = 20.0, 20.0


def check(job: JobSpec) -> int:
    """Prints the tables and returns 0 if all is well, else 1.

    As for `launch`, this process must have no other children, and must call this from its main thread.
    """
    process_tree.adopt_orphans()
    hosts = tuple(replace(host, slots=1) for host in job.hosts)
    found = _ask(job, hosts)
    facts = {host: of for host, of in found.items() if isinstance(of, Facts)}
    able = [host for host in hosts if host.label in facts and _can_train(facts[host.label])]
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
    for field in fields(Facts):
        value = getattr(facts, field.name)
        if isinstance(value, str):
            said[field.name] = one_line(value)
        elif isinstance(value, tuple):
            said[field.name] = tuple(map(one_line, value))
    return replace(facts, **said)


def _can_train(facts: Facts) -> bool:
    return facts.torch is not None and facts.hvdlite is not None and facts.gloo


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
