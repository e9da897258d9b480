"""`ChaosJob`: an elastic job in which faults are caused on purpose (``--chaos``), with a report on each.

    a worker at a point ── chaos/ask/<worker> ── may it? ── chaos/answer/<worker>/<n>: now, later ── it has its fault
    events ──► ChaosJob ──► ElasticJob                  └── Record: how it ended, until all are connected, what was lost

It has the methods of `supervisor.Judgement`, and passes every event on to the `ElasticJob`. A worker waits for the
answer before its fault, so the report has each. Faults by the clock, and those of a host, are caused from here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from hvdlite_wire.assignments import NewWorkerPolicy

from ..plan.chaos_spec import OF_A_HOST, ChaosSpec, Fault, worker_form
from ..plan.elastic_spec import OnFailure, Policy
from ..system.signals import signal_name
from ..wire.messages import (
    Alive,
    Exited,
    FaultAsked,
    FaultSaid,
    HostEvent,
    InitDone,
    InitFailed,
    InitStarted,
    Lost,
    LostInCommit,
    Refused,
    StepDiscarded,
)
from ..workers.failure_message import Outcome
from ..workers.roster import Roster
from .chaos_report import BEGUN_AGAIN, DISCARDED, IN_COMMIT, NO_RANK, NOTHING, STAYED, TO_COMMIT, ChaosReport, Record
from .elastic_job import ElasticJob
from .membership import Member, Membership
from .rank_assignments import Store

SAYS = b"chaos/"  # the prefix of all keys that workers set for this
_ASKS = b"chaos/ask/"
_DISCARDED = b"chaos/discarded"
_IN_COMMIT = b"chaos/in_commit"
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_RETRY_S = 0.2  # how soon a fault by the clock is tried again, while too few ranks would be left


class Hosts(Protocol):
    """What causes the faults outside of workers: `agents.agent_group.Agents`."""

    def signal(self, numbers: Collection[int], signum: int) -> None: ...
    def kill_agent(self, label: str) -> None: ...


class ChaosFaults:
    """The faults that each worker was given, by its number."""

    def __init__(self, spec: ChaosSpec, first_np: int) -> None:
        self._spec = spec
        self._first_np = first_np
        self.given: dict[int, tuple[Fault, ...]] = {}

    def variable_of(self, worker: int) -> str:
        """Returns the HVDLITE_CHAOS of a worker that is started now."""
        self.given[worker] = self._spec.of_worker(worker, self._first_np)
        return worker_form(self.given[worker])


class ChaosJob:
    """One elastic job with faults, while it runs."""

    def __init__(
        self,
        job: ElasticJob,
        spec: ChaosSpec,
        faults: ChaosFaults,
        *,
        policy: Policy,
        membership: Membership,
        roster: Roster,
        store: Store,
        hosts: Hosts,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._spec = spec
        self._faults = faults
        self._policy = policy
        self._membership = membership
        self._roster = roster
        self._store = store
        self._hosts = hosts
        self._say = say
        self._clock = clock
        self._began_at = clock()
        self._gone: set[int] = set()  # the workers that have ended
        self._has_done = False  # whether one has ended with exit code 0
        self._begun: set[Fault] = set()
        self._records: dict[int, Record] = {}  # of workers that have a fault and have not ended, or have a cost to come
        self._ways: dict[int, NewWorkerPolicy] = {}  # of the same: what the others have said of newcomers since
        self._connected: tuple[int, set[int]] = (0, set())  # the last generation, and its workers that are connected
        self._clock_from: float | None = None
        self._clock_number = 0
        self._retry_at: float | None = None
        self._seeded_count = 0
        # The generations that have discarded a step, and the faults before each in which no step was begun again.
        self._discarded: set[int] = set()
        # The generations of which ranks were in a commit when one was lost.
        self._in_commit: set[int] = set()
        self._finished: list[tuple[Record, int]] = []
        self.report = ChaosReport()

    # -- asked and said by workers

    def on_fault(self, said: FaultSaid) -> None:
        """Answers a worker that asks for its fault, and notes what the others say of what was lost."""
        if isinstance(said, FaultAsked):
            self._answer(said)
            return
        if isinstance(said, LostInCommit):
            self._in_commit.add(said.generation)
            return
        # Not all workers of that generation may have said that they are connected.
        self._discarded.add(said.generation)
        for record, generation in self._finished:
            if generation == said.generation:
                record.lost = DISCARDED

    def _answer(self, asked: FaultAsked) -> None:
        given = self._faults.given.get(asked.worker, ())
        if asked.worker not in self._roster or asked.index >= len(given):
            return
        fault = given[asked.index]
        may = self._may(fault)
        if may:
            self._begin(fault.kind, fault.worker, fault=fault, step=asked.step)
        if asked.number:
            self._store.delete(_answer_key(asked.worker, asked.number - 1))
        self._store.put(_answer_key(asked.worker, asked.number), b"now" if may else b"later")
        if may and fault.kind in ("agent", "host"):
            self._end_host(fault.kind, fault.worker)

    def _may(self, fault: Fault) -> bool:
        if not fault.is_seeded:
            return True
        if fault.point == "init":
            return self._membership.current is not None and self._is_left()
        return self._leaves_enough(fault.worker, fault.kind)

    def _is_left(self) -> bool:
        """Whether the seeded faults go on."""
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
        if len(left) >= self._policy.min_np:
            return True
        # A job that needs all of its workers waits for each replacement: then one at a time.
        is_whole = len(members) >= self._policy.first_np and self._policy.on_failure is OnFailure.REPLACE
        return bool(left) and is_whole and self._policy.first_np == self._policy.min_np

    def _members(self) -> list[Member]:
        """Returns the ranks of the current generation that are there and have no fault."""
        current = self._membership.current
        if current is None:
            return []
        return [each for each in current.members if each.worker not in self._gone and each.worker not in self._records]

    def _begin(self, kind: str, worker: int, *, fault: Fault | None = None, step: int | None = None) -> None:
        current, known = self._membership.current, self._roster[worker]
        is_seeded = fault is None or fault.is_seeded
        record = Record(
            at_s=round(self._clock() - self._began_at, 3),
            kind=kind,
            point=None if fault is None else fault.point,
            step=step,
            worker=worker,
            rank=known.rank,
            host=known.host,
            generation=0 if current is None else current.number,
            is_seeded=is_seeded,
        )
        if known.rank is None:
            record.lost = NO_RANK
        self.report.records.append(record)
        self._records[worker] = record
        self._ways[worker] = NewWorkerPolicy.NEVER
        self._seeded_count += is_seeded
        if fault is not None:
            self._begun.add(fault)
        where = "by the clock" if fault is None else f"at {fault.point!r} in its step {step}"
        self._say(f"chaos: {kind} of worker {worker} on {known.host} {where}")

    def _end_host(self, kind: str, worker: int) -> None:
        host = self._roster[worker].host
        if kind == "host":
            self._hosts.signal(self._roster.on_host(host), signal.SIGKILL)
        self._hosts.kill_agent(host)

    # -- by the clock

    def time_left_s(self) -> float | None:
        due = [self._job.time_left_s(), self._clock_left_s()]
        return min((left_s for left_s in due if left_s is not None), default=None)

    def time_passes(self) -> None:
        if (left_s := self._clock_left_s()) is not None and left_s <= 0:
            self._fault_by_clock()
        self._job.time_passes()

    def _clock_left_s(self) -> float | None:
        seeded = self._spec.seeded
        if seeded is None or seeded.every_s is None or self._clock_from is None or not self._is_left():
            return None
        due_at = self._clock_from + seeded.by_clock(self._clock_number).at_s
        return max(0.0, max(due_at, self._retry_at or due_at) - self._clock())

    def _fault_by_clock(self) -> None:
        assert self._spec.seeded is not None, "there is one"
        drawn = self._spec.seeded.by_clock(self._clock_number)
        members = sorted(each.worker for each in self._members())
        worker = members[int(drawn.share * len(members))] if members else None
        if worker is None or not self._leaves_enough(worker, drawn.kind):
            self._retry_at = self._clock() + _RETRY_S
            return
        self._clock_number, self._retry_at = self._clock_number + 1, None
        self._begin(drawn.kind, worker)
        if drawn.kind in _SIGNALS:
            self._hosts.signal([worker], _SIGNALS[drawn.kind])
        else:
            self._end_host(drawn.kind, worker)

    # -- what became of it

    def on_init(self, event: InitStarted | InitDone | InitFailed) -> None:
        if isinstance(event, InitStarted):
            for worker, record in self._records.items():
                if event.after and event.after >= record.generation:
                    self._ways[worker] = min(self._ways[worker], event.newcomers)
        self._job.on_init(event)
        current = self._membership.current
        if isinstance(event, InitDone) and current is not None and event.after == current.number:
            if self._connected[0] != current.number:
                self._connected = (current.number, set())
            self._connected[1].add(event.worker)
            if self._connected[1].issuperset(each.worker for each in current.members):
                self._all_are_connected(current.number, {each.worker: each.since for each in current.members})

    def _all_are_connected(self, generation: int, members: Mapping[int, int]) -> None:
        self._clock_from = self._clock() if self._clock_from is None else self._clock_from
        for worker, record in list(self._records.items()):
            if record.generation >= generation or record.rank is None:
                continue
            if worker in members:
                if record.kind != "link":
                    continue
                record.end = STAYED
            record.cost_s = round(self._clock() - self._began_at - record.at_s, 3)
            if self._ways[worker] is NewWorkerPolicy.WELCOME:
                record.lost = IN_COMMIT if record.generation in self._in_commit else TO_COMMIT
            else:
                has_new = any(since > record.generation for since in members.values())
                record.lost = BEGUN_AGAIN if has_new else DISCARDED if generation in self._discarded else NOTHING
                if not has_new:
                    self._finished.append((record, generation))
            del self._records[worker], self._ways[worker]

    def on_exit(self, end: Exited) -> None:
        if (record := self._records.get(end.worker)) is not None:
            code = end.returncode
            record.end = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        self._has_done = self._has_done or end.returncode == 0
        self._end_of([end.worker])
        self._job.on_exit(end)

    def on_lost(self, lost: Lost) -> None:
        workers = self._roster.on_host(lost.host)
        for worker in workers:
            if worker in self._records:
                self._records[worker].end = f"lost with {lost.host}"
        self._end_of(workers)
        self._job.on_lost(lost)

    def _end_of(self, workers: Collection[int]) -> None:
        self._gone.update(workers)
        for worker in workers:
            if worker in self._records and self._records[worker].rank is None:
                del self._records[worker], self._ways[worker]

    def final_report(self) -> ChaosReport:
        """Returns the report at the job's end, with the faults that never came."""
        for fault in self._spec.faults:
            if fault not in self._begun:
                why = "the job ended first" if fault.worker in self._faults.given else "it was never started"
                self.report.never.append(f"{fault} never came: worker {fault.worker} did not reach it, {why}")
        seeded = self._spec.seeded
        if seeded is not None and seeded.count is not None and self._seeded_count < seeded.count:
            self.report.never.append(
                f"{seeded.count - self._seeded_count} of {seeded.count} seeded faults never came: the job ended first"
            )
        return self.report

    # -- passed on

    @property
    def goes_on(self) -> bool:
        return self._job.goes_on

    @property
    def knows_failure(self) -> bool:
        return self._job.knows_failure

    def on_alive(self, alive: Alive) -> None:
        self._job.on_alive(alive)

    def on_refused(self, refused: Refused) -> None:
        self._job.on_refused(refused)

    def on_hosts(self, event: HostEvent) -> None:
        self._job.on_hosts(event)

    def decide(self, outcome: Outcome) -> None:
        self._job.decide(outcome)

    def settle(self) -> None:
        self._job.settle()


def said_of_faults(key: bytes, value: bytes) -> FaultSaid | None:
    """Returns what a worker asks or says by setting this key in the store; None if that is nothing about faults."""
    if key in (_DISCARDED, _IN_COMMIT) and value.isdigit() and len(value) < 10:
        return (StepDiscarded if key == _DISCARDED else LostInCommit)(int(value))
    worker, numbers = key.removeprefix(_ASKS), value.split(b" ")
    if len(numbers) != 3 or not all(each.isdigit() and len(each) < 10 for each in (worker, *numbers)):
        return None
    return FaultAsked(int(worker), *map(int, numbers))


def _answer_key(worker: int, number: int) -> bytes:
    return b"chaos/answer/%d/%d" % (worker, number)
