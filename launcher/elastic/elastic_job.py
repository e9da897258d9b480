"""
Runs an elastic job: carries out what `membership` decides, until no generation can follow.

    events ──► ElasticJob ──► Membership ──► workers to start and to end, ranks in the store, lines on the screen

`supervisor` calls it. In hvd.init() a worker asks for its rank in the next generation, and reads it in the store: see
`rank_assignments`. Once nothing can follow, `first_failure` judges the ends of the last generation's workers, as in a
job that is not elastic.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hvdlite_wire.store_requests import Dismissal, RankAssignment

from ..plan.worker_environment import elastic_environment
from ..protocol.messages import (
    Alive,
    Answered,
    DiscoveryFailed,
    Exited,
    HostEvent,
    HostsFound,
    InitDone,
    InitFailed,
    InitStarted,
    Lost,
    NotThereYet,
    Refused,
    Unresponsive,
)
from ..screen.job_screen import Screen
from ..status.job_facts import GenerationRow, GenerationTable
from ..store.server import Store
from ..system.process_tree import shell_code, signal_name
from ..workers.ending import FAILURE_GRACE_S, Ending
from ..workers.failure_message import JobOutcome, failure_message, name_workers
from ..workers.first_failure import FirstFailure
from .elastic_hosts import ElasticHosts
from .elastic_workers import ElasticGeneration, Place, PlacedWorker
from .hangs import MOST_FAILED_MEETINGS, CutLinks, CutOff, Hangs, RefusedLinks
from .membership import (
    Action,
    Dismiss,
    EndJob,
    EndWorkers,
    JobDone,
    Membership,
    Notify,
    Publish,
    Say,
    StartWorker,
)
from .rank_assignments import RankAssignments


@dataclass
class RunningGeneration:
    """The ranks of one generation, and what has happened to them. Number 0 has none: the time before the first.

    ``host_of`` and ``names`` have its members' hosts and words for them by their numbers, in the order of their ranks.
    ``ends``: how its members have ended, in order; before the first generation, how any worker has.
    ``has_ended_members``: some were ended since others could not go on for them.
    """

    number: int = 0
    host_of: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    ends: list[Exited | Lost] = field(default_factory=list)
    why_gone: dict[int, str] = field(default_factory=dict)
    has_ended_members: bool = False

    @property
    def is_met(self) -> bool:
        """Whether all ranks are connected."""
        return bool(self.host_of) and self.connected.issuperset(self.host_of)

    def concerns(self, worker: int) -> bool:
        """Whether a worker's end is one of its ends."""
        return worker in self.host_of or not self.number

    def words_of_gone(self) -> str:
        return "; ".join(dict.fromkeys(self.why_gone.values()))


class ElasticJob:
    """One elastic job while it runs. It has the methods of `supervisor.Judgement`."""

    def __init__(
        self,
        membership: Membership,
        hosts: ElasticHosts,
        ending: Ending,
        *,
        store: Store,
        screen: Screen,
        hang_timeout_s: float,
        post: Callable[[Lost | Unresponsive | Exited], None],
        chaos_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        """``hang_timeout_s``: see `Hangs` and `CutLinks`. ``post`` puts an event behind all others.

        ``chaos_of`` returns the faults of a worker that is started now.
        """
        self._membership = membership
        self._hosts = hosts
        self._ending = ending
        self._roster = ending.roster
        self._assignments = RankAssignments(store)
        self._hangs = Hangs(hang_timeout_s, store, ending.clock, post)
        self._links = CutLinks(hang_timeout_s)
        self._refused = RefusedLinks()
        self._post = post
        self._screen = screen
        self._chaos_of = chaos_of
        self._began_at = ending.clock()
        self._late_at: float | None = None  # when a worker that has not called hvd.init() ends the job
        self._workers = membership.workers
        self._generation = RunningGeneration()
        self._last_failure = ""  # what is said of it, if a limit ends the job
        self._judge = FirstFailure({}, ending, start_timeout_s=hosts.start_timeout_s)  # of the last ends
        self._is_over = False
        self.table = GenerationTable()

    @property
    def goes_on(self) -> bool:
        return not self._is_over

    @property
    def knows_failure(self) -> bool:
        """Whether a worker has failed that ends the job."""
        return self._judge.knows_failure

    def on_hosts(self, event: HostEvent) -> None:
        if not self._decides():
            return
        match event:
            case DiscoveryFailed():
                self._end(JobOutcome(1, event.why))
                return
            case HostsFound():
                self._ending.log(
                    f"hosts: {', '.join(f'{label}:{slots}' for label, slots in event.hosts.items()) or 'none'}"
                )
                self._hosts.found(event.hosts)
            case Answered():
                self._hosts.answered(event.host, event.hello)
            case NotThereYet():
                self._hosts.not_there_yet(event.host, event.cause, event.why)
        self._look_at_hosts()

    def on_init(self, event: InitStarted | InitDone | InitFailed) -> None:
        # What an ended worker has left running may call hvd.init(), too.
        if not self._decides() or event.worker not in self._workers:
            return
        match event:
            case InitStarted():
                after = event.after or 0
                self._hosts.ran_worker(self._workers[event.worker].place.host)
                self._assignments.asked(event.worker, after)
                self._hangs.begin(event.worker)
                if self._membership.current is None and self._late_at is None:
                    self._late_at = self._now() + self._hosts.start_timeout_s
                self._do(self._membership.asks(event.worker, after, self._now(), event.newcomers))
            case InitDone():
                self._generation.connected.add(event.worker)
                if self._generation.is_met:
                    self._refused.forget_all()
            case InitFailed(after=0):
                if self._assignments.take_back(event.worker):
                    self._do(self._membership.takes_back(event.worker, self._now()))
            case InitFailed():
                self._on_failed_meeting(event)

    def _on_failed_meeting(self, event: InitFailed) -> None:
        """Ends a generation for all, if a rank could not connect to the others; gives up hosts that refuse them."""
        generation = self._generation
        is_rank = event.after == generation.number and event.worker in generation.host_of
        if not is_rank or not event.is_unconnected or generation.is_met:
            return
        self._assignments.revoke(generation.number, f"{self._name(event.worker)} could not connect to the other ranks")
        # A rank that is lost refuses connections, too. In the first generation it is an error of the job.
        if self._refused.have_met and not generation.why_gone:
            self._give_up(self._refused.failed(event, generation.host_of))

    def on_alive(self, alive: Alive) -> None:
        self._hangs.answered(alive)
        if alive.worker in self._workers:
            self._links.answered(alive)
            self._give_up_hosts_that_are_cut_off()

    def on_exit(self, end: Exited) -> None:
        worker = self._workers.get(end.worker)
        if worker is None:
            return
        if not self._decides():
            del self._workers[end.worker]
            # A worker that was told to end is no cause, unless it ends in another way.
            was_told = worker.why_signalled is not None
            if self._is_over and not (was_told and -end.returncode in (0, signal.SIGTERM, signal.SIGKILL)):
                self._judge.on_exit(end)
            return
        why = self._words_of(end, worker)
        self._forget(end.worker)
        is_rank = self._generation.concerns(end.worker)
        if worker.why_refused is not None:
            self._last_failure = str(why)
        elif worker.ends_by_itself and end.returncode != 0 and not end.peer_lost:
            self._last_failure = failure_message(self._roster.failure(end), is_last=True)
        if is_rank and worker.why_dismissed is None and why is not None:
            self._lose([end.worker], why)
        if worker.ends_by_itself:
            self._generation.ends.append(end)
            if worker.why_refused is not None:
                self._screen.say(str(why))
            elif not is_rank:
                self._screen.say(f"{why or self._name(end.worker) + ' ended with exit code 0'} before it had a rank")
        self._do(self._membership.ended(end.worker, why, self._now(), was_killed=end.returncode < 0))
        ends = self._generation.ends
        if not is_rank and self._decides() and end in ends:
            # It has ended while others are the ranks: that is a cause only if the job ends now.
            ends.remove(end)
        if end not in ends:
            self._roster.pop(end.worker, None)
        self._look_at_hosts()

    def on_lost(self, lost: Lost) -> None:
        if self._is_over:
            self._judge.on_lost(lost)
            return
        if not self._hosts.knows(lost.host) or not self._decides():
            return
        was_connected = self._hosts.lost(lost.host)
        workers = [each.number for each in self._workers.values() if each.place.host == lost.host]
        why = f"lost {lost.host}: {lost.why}" if was_connected else f"{lost.host}: {lost.why}"
        self._screen.say(why)
        for worker in workers:
            self._forget(worker)  # the roster keeps it until it is reported
            self._screen.finish(worker)
        if any(map(self._generation.concerns, workers)):
            self._generation.ends.append(lost)
        if workers:
            self._last_failure = why
        self._lose(workers, why)
        self._do(self._membership.host_lost(lost.host, why, self._now()))
        for worker in workers:
            self._roster.pop(worker, None)
        self._look_at_hosts()

    def on_refused(self, refused: Refused) -> None:
        if self._membership.current is None:
            self._judge.on_refused(refused)
            self._is_over = True
            return
        # For observers, too, which count faults and lost hosts. A host on which workers run or ran keeps them: what
        # cannot be started now is one worker in its slot. One that has never had any cannot start the command.
        host = self._hosts.label_here() if refused.host is None else refused.host
        if refused.worker is None:
            self._post(Lost(host, refused.why))
        elif not self._hosts.has_run_worker(host):
            self._give_up([CutOff(host, refused.why)])
        elif refused.worker in self._workers:
            self._workers[refused.worker].why_refused = refused.why
            self._post(Exited(refused.worker, refused.exit_code))

    def decide(self, outcome: JobOutcome) -> None:
        self._judge.decide(outcome)

    def settle(self) -> None:
        """Names the worker that failed first, once nothing can follow."""
        self._judge.settle()

    def time_left_s(self) -> float | None:
        """Returns the seconds until `time_passes` must be called, or None."""
        if self._is_over:
            return self._judge.time_left_s()
        due = [
            self._membership.deadline_s(),
            self._hosts.due_s(self._membership.barred_until_s),
            self._late_at,
            self._hangs.due_s(),
            *(each.kill_at_s for each in self._workers.values()),
        ]
        first = min((at_s for at_s in due if at_s is not None), default=None)
        return None if first is None else max(0.0, first - self._now())

    def time_passes(self) -> None:
        if self._is_over:
            self._judge.time_passes()
            return
        now_s = self._now()
        late = [each for each in self._workers.values() if each.kill_at_s is not None and each.kill_at_s <= now_s]
        for each in late:
            each.kill_at_s = None
        if late:
            self._ending.signal_workers([each.number for each in late], signal.SIGKILL)
        if self._late_at is not None and self._late_at <= now_s:
            self._late_at = None
            self._end_for_those_who_never_came()
        for host, why in self._hosts.late(now_s).items():
            self.on_lost(Lost(host, why))
        if self._decides() and (silent := self._hangs.look(self._membership.waiting_for_ranks())):
            self._end_hanging(silent)
        if self._decides():
            self._do(self._membership.time_passes(now_s))
            self._look_at_hosts()

    def _end_for_those_who_never_came(self) -> None:
        absent = sorted(self._ending.running.difference(self._assignments.those_who_asked))
        if not absent or not self._decides():
            return
        hosts = ", ".join(self._roster.hosts_of(absent))
        self._end(
            JobOutcome(
                1,
                f"{self._roster.name(absent)} on {hosts} did not call hvd.init() within "
                f"{self._hosts.start_timeout_s:g} s (--start-timeout) of the first that did",
            )
        )

    def _look_at_hosts(self) -> None:
        """Connects to hosts, hangs up on those that have been removed, and has the membership use the others."""
        if not self._decides():
            return
        now_s, barred_until_s = self._now(), self._membership.barred_until_s
        self._hosts.connect(now_s, barred_until_s)
        if not self._workers and self._hosts.all_are_given_up(barred_until_s):
            self._let_fail(
                "no host is left: each has had a failure and gets no more workers (--blacklist-cooldown-range)"
            )
            return
        if self._hosts.have_been_known():
            usable = self._hosts.usable()
            self._do(self._membership.hosts_found(usable, now_s, are_wanted=self._hosts.are_wanted))
        self._hosts.let_go({each.place.host for each in self._workers.values()})

    def _give_up_hosts_that_are_cut_off(self) -> None:
        generation = self._generation
        host_of = {worker: host for worker, host in generation.host_of.items() if worker in self._workers}
        if not generation.number or not self._decides():
            return
        # While all compute, the network may come back. Until they are connected, they wait for each other.
        waiting = self._membership.waiting_for_ranks()
        if not generation.connected.issuperset(host_of) or self._hangs.those_who_wait(waiting):
            self._give_up(self._links.cut_off(host_of))

    def _give_up(self, hosts: Iterable[CutOff]) -> None:
        for host, why in hosts:
            if self._hosts.give_up(host):
                # `on_lost` hangs up on it, whereupon its agent kills all processes there.
                self._post(Lost(host, why))

    def _do(self, actions: Collection[Action]) -> None:
        for action in actions:
            if not self._decides():
                return
            self._ending.log(str(action))
            match action:
                case StartWorker(worker, place):
                    self._start(worker, place)
                case Publish(generation):
                    self._publish(generation)
                case Notify(added, removed):
                    self._assignments.tell_of_hosts(self._generation.number, added=added, removed=removed)
                case Dismiss(worker, why):
                    if worker in self._generation.host_of:
                        self._generation.why_gone[worker] = f"{self._name(worker)} has left: {why}"
                    self._assignments.give(worker, Dismissal(why))
                case EndWorkers(workers, why, is_failure):
                    self._end_workers(workers, why, is_failure=is_failure)
                case Say(text):
                    self._screen.say(text)
                case EndJob(why, is_limit):
                    self._let_fail(why, is_limit=is_limit)
                case JobDone():
                    self._end(JobOutcome())

    def _start(self, worker: int, place: Place) -> None:
        self._roster.add(worker, place.host)
        self._ending.running.add(worker)
        self._screen.begin(worker)
        if self._late_at is not None:  # it has as long as those that were started before
            self._late_at = self._now() + self._hosts.start_timeout_s
        self._hosts.start(
            place.host, worker, elastic_environment(worker, place.host, place.slot, self._chaos_of(worker))
        )

    def _end_hanging(self, workers: Collection[int]) -> None:
        for worker in workers:
            self._hangs.forget(worker)
        why = (
            f"it did not respond for {self._hangs.limit_s:g} s (--hang-timeout), and others waited for it: its "
            "process was stopped, or a C extension held the interpreter's lock"
        )
        # A stopped process keeps SIGTERM for later, and a Python handler has no turn in one that hangs.
        self._end_workers(workers, why, signal.SIGKILL, is_failure=True)

    def _end_workers(
        self, workers: Collection[int], why: str, signum: int = signal.SIGTERM, *, is_failure: bool = False
    ) -> None:
        generation = self._generation
        for number in workers:
            worker = self._workers[number]
            worker.why_signalled, worker.kill_at_s = why, self._now() + FAILURE_GRACE_S
            if number in generation.host_of:
                words = generation.why_gone.setdefault(number, f"{self._name(number)} was ended by hvdlite-run: {why}")
                if is_failure:
                    self._last_failure, generation.has_ended_members = words, True
        self._ending.signal_workers(workers, signum)

    def _publish(self, generation: ElasticGeneration) -> None:
        self._count_failed_meetings()
        if not self._decides():
            return
        before, now = self._generation, {each.worker: rank for rank, each in enumerate(generation.members)}
        gone = {worker: f"{name} has left" for worker, name in before.names.items() if worker not in now}
        left = list(dict.fromkeys(before.why_gone.get(worker) or words for worker, words in gone.items()))
        for worker in self._workers:
            self._roster[worker].rank = now.get(worker)
            self._screen.set_rank(worker, now.get(worker))
        for end in before.ends:
            if isinstance(end, Exited):
                self._roster.pop(end.worker, None)
        host_of = {each.worker: each.place.host for each in generation.members}
        names = {worker: self._name(worker) for worker in now}
        self._generation, self._late_at = RunningGeneration(generation.number, host_of, names), None
        self._links.forget_all()
        self._refused.next_generation()
        came = [
            f"worker {worker} joins as rank {rank} on {host_of[worker]}"
            for worker, rank in now.items()
            if worker not in before.host_of
        ]
        ranks = "1 rank" if len(now) == 1 else f"{len(now)} ranks"
        tell = self._screen.say if before.number else self._ending.log
        tell("; ".join([f"generation {generation.number}: {ranks}", *left, *came]))
        if not before.number:
            came = [f"{name_workers(now)} on {', '.join(dict.fromkeys(host_of.values()))}"]
        self.table.add(GenerationRow(generation.number, self._now() - self._began_at, len(now), came, left))
        self._assignments.begin(generation.number)
        newcomers = sum(each.since == generation.number for each in generation.members)
        for worker, rank in now.items():
            self._assignments.give(worker, RankAssignment(generation.number, rank, len(now), newcomers))

    def _count_failed_meetings(self) -> None:
        """Ends the job if several generations in a row cannot connect, though no rank is lost."""
        generation = self._generation
        has_failed = generation.number > 0 and not generation.is_met and not generation.why_gone
        failed = self._refused.failed_meetings = self._refused.failed_meetings + 1 if has_failed else 0
        if failed >= MOST_FAILED_MEETINGS:
            self._end(
                JobOutcome(
                    1,
                    f"the ranks of {failed} generations in a row called hvd.init(), but were not "
                    "connected to all others: is a firewall between the hosts, or is it the wrong network? See "
                    "hvdlite-run --check, and --network-interface",
                )
            )

    def _lose(self, workers: Collection[int], why: str) -> None:
        """Notes why workers are lost, and revokes their generation, so that no rank waits for them."""
        generation = self._generation
        if lost := [worker for worker in workers if worker in generation.host_of]:
            generation.why_gone.update(dict.fromkeys(lost, why))
            self._assignments.revoke(generation.number, why)

    def _forget(self, worker: int) -> None:
        self._assignments.forget(worker)
        self._hangs.forget(worker)
        self._links.forget(worker)

    def _let_fail(self, why: str | None, *, is_limit: bool = False) -> None:
        """Ends the job since no generation can follow; ``is_limit``: the failure that led to it is told, too."""
        generation = self._generation
        if why is not None:
            self._end(JobOutcome(1, f"{why}. {self._last_failure}" if is_limit and self._last_failure else why))
        elif generation.has_ended_members:
            # Not only those that have failed by themselves.
            self._end(JobOutcome(1, f"no rank is left: {generation.words_of_gone()}"))
        else:
            self._is_over = True
            for end in generation.ends:
                if isinstance(end, Exited):
                    self._judge.on_exit(end)
                else:
                    self._judge.on_lost(end)
            if all(isinstance(end, Exited) and end.returncode == 0 for end in generation.ends):
                self._end(JobOutcome(1, generation.words_of_gone() or "all ranks were ended"))

    def _end(self, outcome: JobOutcome) -> None:
        self._is_over = True
        self.decide(outcome)
        self._ending.end()

    def _decides(self) -> bool:
        """Whether the job still goes on; events after its end are ignored."""
        return not self._is_over and self._ending.outcome is None

    def _words_of(self, end: Exited, worker: PlacedWorker) -> str | None:
        """Returns how a worker failed, named; None if it has not."""
        name = self._name(end.worker)
        if worker.why_refused is not None:
            return f"{name} could not be started: {worker.why_refused}"
        if worker.why_signalled is not None:
            return f"{name} was ended by hvdlite-run: {worker.why_signalled}"
        if end.returncode == 0:
            return None
        if end.returncode < 0:
            return f"{name} was killed by {signal_name(-end.returncode)}"
        how = "lost a peer, and ended" if end.peer_lost else "failed"
        return f"{name} {how} with exit code {shell_code(end.returncode)}"

    def _name(self, worker: int) -> str:
        record = self._roster[worker]
        on = f" on {record.host}" if record.rank is None else f" (rank {record.rank} on {record.host})"
        return f"worker {worker}{on}"

    def _now(self) -> float:
        return self._ending.clock()
