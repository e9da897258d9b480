"""`JobFaults`: the faults that are caused on purpose in an elastic job (``--chaos``), with a report on each.

    a worker at a point ── chaos/ask/<worker> ── may it? ── chaos/answer/<worker>/<n>: now, later ── it has its fault
    events ──► JobFaults ──► Record: where it happened, and how the worker ended

`supervisor` tells it of all events, before the job's judgement. A worker waits for the answer before its fault, so the
report has each. Faults by the clock, and those of a host, are caused from here.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdlite_wire.job_contract import ASKS, answer_key, worker_form

from ..agents.agent_group import Agents
from ..plan.chaos_spec import OF_A_HOST, ChaosFault, ChaosSpec
from ..protocol.messages import Event, Exited, FaultAsked, InitDone, Lost
from ..store.server import Store
from ..system.process_tree import signal_name
from ..system.terminal_text import table
from ..workers.ending import Ending, Observer
from .elastic_workers import Member
from .membership import Membership

_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_RETRY_S = 0.2  # how soon a fault by the clock is tried again, while too few ranks would be left


@dataclass
class Record:
    """One fault that has happened.

    ``at_s`` counts from the job's start. ``step`` and ``point`` are None for a fault by the clock, ``rank`` for a
    worker that had none. ``end`` is how the worker ended.
    """

    at_s: float
    kind: str
    point: str | None
    step: int | None
    worker: int
    rank: int | None
    host: str
    generation: int
    is_seeded: bool
    end: str = "still there when the job ended"


@dataclass
class ChaosReport:
    """The faults of one job. ``never`` has a line for each that has not happened, with the reason."""

    records: list[Record] = field(default_factory=list)
    never: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        return {"faults": [asdict(record) for record in self.records], "never": self.never}

    def text(self) -> str:
        rows: list[Sequence[str]] = [("after", "fault", "step", "worker", "rank", "host", "its end")]
        for each in self.records:
            kind = each.kind if each.point is None else f"{each.kind}@{each.point}"
            step, rank = ("–" if number is None else str(number) for number in (each.step, each.rank))
            rows.append((f"{each.at_s:.1f} s", kind, step, str(each.worker), rank, each.host, each.end))
        lines = table(rows) if self.records else []
        number = len(self.records)
        return "\n".join([f"chaos: {number} {'fault' if number == 1 else 'faults'}", *lines, *self.never])


class JobFaults(Observer):
    """The faults of one elastic job: which each worker was given, which have happened, and those by the clock."""

    def __init__(self, spec: ChaosSpec, membership: Membership, ending: Ending, *, store: Store, hosts: Agents) -> None:
        self._spec = spec
        self._membership = membership
        self._ending = ending
        self._roster = ending.roster
        self._store = store
        self._hosts = hosts
        self._began_at = ending.clock()
        self._has_done = False  # whether a worker has ended with exit code 0
        self.given: dict[int, tuple[ChaosFault, ...]] = {}  # the faults of each worker, by its number
        self._begun: set[ChaosFault] = set()
        self._records: dict[int, Record] = {}  # the last fault of each worker
        self._clock_from: float | None = None
        self._clock_number = 0
        self._retry_at: float | None = None
        self._seeded_count = 0
        self.report = ChaosReport()

    def variable_of(self, worker: int) -> str:
        """Returns the HVDLITE_CHAOS of a worker that is started now."""
        self.given[worker] = self._spec.of_worker(worker, self._membership.policy.first_np)
        return worker_form(each.of_worker for each in self.given[worker])

    def on_event(self, event: Event) -> None:
        match event:
            case FaultAsked():
                self._answer(event)
            case InitDone() if self._clock_from is None:
                self._clock_from = self._ending.clock()
            case Exited() if event.worker in self._roster:
                self._has_done = self._has_done or event.returncode == 0
                code = event.returncode
                self._ends([event.worker], f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}")
            case Lost():
                there = self._ending.running.intersection(self._roster.on_host(event.host))
                self._ends(there, f"lost with {event.host}")

    def _ends(self, workers: Collection[int], how: str) -> None:
        for worker in workers:
            if worker in self._records:
                self._records[worker].end = how

    def _answer(self, asked: FaultAsked) -> None:
        given = self.given.get(asked.worker, ())
        if asked.worker not in self._roster or asked.index >= len(given):
            return
        fault = given[asked.index]
        may = self._may(fault)
        if may:
            self._begin(fault.kind, fault.worker, fault=fault, step=asked.step)
        if asked.number:
            self._store.delete(answer_key(asked.worker, asked.number - 1))
        self._store.put(answer_key(asked.worker, asked.number), b"now" if may else b"later")
        if may and fault.kind in ("agent", "host"):
            self._end_host(fault.kind, fault.worker)

    def _may(self, fault: ChaosFault) -> bool:
        if not fault.is_seeded:
            return True
        if fault.point == "init":
            return self._membership.current is not None and self._is_left()
        return self._leaves_enough(fault.worker, fault.kind)

    def _is_left(self) -> bool:
        count = self._spec.seeded.count if self._spec.seeded is not None else 0
        return not self._has_done and (count is None or self._seeded_count < count)

    def _leaves_enough(self, worker: int, kind: str) -> bool:
        """Whether a seeded fault of this rank leaves so many ranks that the others go on."""
        members = self._members()
        own = next((each for each in members if each.worker == worker), None)
        if own is None or not self._is_left():
            return False
        takes_host = kind in OF_A_HOST
        left = [each for each in members if each != own and not (takes_host and each.place.host == own.place.host)]
        policy = self._membership.policy
        if len(left) >= policy.min_np:
            return True
        # If --min-np equals -np, one fault at a time: the job waits for each replacement.
        is_whole = len(members) >= policy.first_np and policy.on_failure.replaces
        return bool(left) and is_whole and policy.first_np == policy.min_np

    def _members(self) -> list[Member]:
        """Returns the ranks of the current generation that are there and have no fault."""
        current = self._membership.current
        if current is None:
            return []
        faulty = {worker for worker, record in self._records.items() if record.generation >= current.number}
        running = self._ending.running - faulty
        return [each for each in current.members if each.worker in running]

    def _begin(self, kind: str, worker: int, *, fault: ChaosFault | None = None, step: int | None = None) -> None:
        current, known = self._membership.current, self._roster[worker]
        is_seeded = fault is None or fault.is_seeded
        record = Record(
            at_s=round(self._ending.clock() - self._began_at, 3),
            kind=kind,
            point=None if fault is None else fault.point,
            step=step,
            worker=worker,
            rank=known.rank,
            host=known.host,
            generation=0 if current is None else current.number,
            is_seeded=is_seeded,
        )
        self.report.records.append(record)
        self._records[worker] = record
        self._seeded_count += is_seeded
        if fault is not None:
            self._begun.add(fault)
        where = "by the clock" if fault is None else f"at {fault.point!r} in its step {step}"
        self._ending.say(f"chaos: {kind} of worker {worker} on {known.host} {where}")

    def _end_host(self, kind: str, worker: int) -> None:
        host = self._roster[worker].host
        if kind == "host":
            self._hosts.signal(self._roster.on_host(host), signal.SIGKILL)
        self._hosts.kill_agent(host)

    def time_left_s(self) -> float | None:
        """Returns the seconds until the next fault by the clock; None if none comes, as once the job ends."""
        seeded = self._spec.seeded
        if seeded is None or seeded.every_s is None or self._clock_from is None or not self._is_left():
            return None
        if self._ending.outcome is not None:
            return None
        due_at = self._clock_from + seeded.by_clock(self._clock_number).at_s
        return max(0.0, max(due_at, self._retry_at or due_at) - self._ending.clock())

    def time_passes(self) -> None:
        assert self._spec.seeded is not None, "there is one"
        drawn = self._spec.seeded.by_clock(self._clock_number)
        members = sorted(each.worker for each in self._members())
        worker = members[int(drawn.share * len(members))] if members else None
        if worker is None or not self._leaves_enough(worker, drawn.kind):
            self._retry_at = self._ending.clock() + _RETRY_S
            return
        self._clock_number, self._retry_at = self._clock_number + 1, None
        self._begin(drawn.kind, worker)
        if drawn.kind in _SIGNALS:
            self._hosts.signal([worker], _SIGNALS[drawn.kind])
        else:
            self._end_host(drawn.kind, worker)

    def final_report(self) -> ChaosReport:
        """Returns the report at the job's end, with the faults that never came."""
        for fault in self._spec.faults:
            if fault not in self._begun:
                why = "the job ended first" if fault.worker in self.given else "it was never started"
                self.report.never.append(f"{fault} never came: worker {fault.worker} did not reach it, {why}")
        seeded = self._spec.seeded
        if seeded is not None and seeded.count is not None and self._seeded_count < seeded.count:
            self.report.never.append(
                f"{seeded.count - self._seeded_count} of {seeded.count} seeded faults never came: the job ended first"
            )
        return self.report


def asked_fault(key: bytes, value: bytes) -> FaultAsked | None:
    """Returns what a worker asks by setting this key in the store; None if that is no question about a fault."""
    worker, numbers = key.removeprefix(ASKS), value.split(b" ")
    if len(numbers) != 3 or not all(each.isdigit() and len(each) < 10 for each in (worker, *numbers)):
        return None
    return FaultAsked(int(worker), *map(int, numbers))
