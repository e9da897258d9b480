"""Runs an elastic job: carries out what `membership` decides, until no generation can follow.

    events ──► ElasticJob ──► Membership ──► workers to start and to end, ranks in the store, lines on the screen

`supervisor` calls it. In hvd.init() a worker asks for its rank in the next generation, and reads it in the store: see
`rank_assignments`. Once nothing can follow, `first_failure` judges the ends of the last generation's workers, as in a
job that is not elastic.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from hvdlite_wire.assignments import Dismissal, RankAssignment

from ..plan.worker_environment import elastic_environment
from ..system.signals import shell_code, signal_name
from ..wire.messages import (
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
from ..workers.ending import FAILURE_GRACE_S, Ending
from ..workers.failure_message import JobOutcome, failure_message, name_workers
from ..workers.first_failure import FirstFailure
from ..workers.generation_table import GenerationRow, GenerationTable
from ..workers.roster import Roster
from .cut_links import CutLinks, CutOff
from .elastic_hosts import ElasticHosts
from .hangs import Hangs
from .host_slots import Place
from .membership import (
    Action,
    Dismiss,
    ElasticGeneration,
    EndJob,
    EndWorkers,
    JobDone,
    Membership,
    Notify,
    Publish,
    Say,
    StartWorker,
)
from .rank_assignments import RankAssignments, Store
from .refused_links import MOST_FAILED_MEETINGS, RefusedLinks


class Screen(Protocol):
    """Shows output and messages: `screen.Screen`."""

    def begin(self, worker: int) -> None: ...
    def set_rank(self, worker: int, rank: int | None) -> None: ...
    def finish(self, worker: int) -> None: ...
    def say(self, text: str) -> None: ...


class ElasticJob:
    """One elastic job while it runs. It has the methods of `supervisor.Judgement`."""

    def __init__(
        self,
        membership: Membership,
        hosts: ElasticHosts,
        ending: Ending,
        roster: Roster,
        *,
        store: Store,
        screen: Screen,
        signal_workers: Callable[[Collection[int], int], None],
        log: Callable[[str], None],
        here: Callable[[], str],
        start_timeout_s: float,
        hang_timeout_s: float,
        post: Callable[[Lost | Unresponsive | Exited], None],
        chaos_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        """``hang_timeout_s``: see `Hangs` and `CutLinks`. ``post`` puts an event behind all others.

        ``chaos_of`` returns the faults of a worker that is started now.

        ``here`` returns the label of the launcher's own machine, for an agent's refusal that names no host.
        """
        self._membership = membership
        self._hosts = hosts
        self._ending = ending
        self._roster = roster
        self._assignments = RankAssignments(store)
        self._hangs = Hangs(hang_timeout_s, store, ending.clock, post)
        self._links = CutLinks(hang_timeout_s)
        self._refused = RefusedLinks()
        self._have_met = False  # whether all ranks of any generation were connected
        self._hang_timeout_s = hang_timeout_s
        self._given_up: set[str] = set()  # hosts that are to be lost, since others cannot reach them
        self._have_run: set[str] = set()  # hosts on which a worker of the job has come to hvd.init()
        self._refusals: dict[int, str] = {}  # why workers could not be started, until their end is counted
        self._post = post
        self._screen = screen
        self._signal_workers = signal_workers
        self._log = log
        self._here = here
        self._start_timeout_s = start_timeout_s
        self._chaos_of = chaos_of
        self._began_at = ending.clock()
        self._has_hosts = False  # whether it is known of all hosts that were found first whether they are there
        self._late_at: float | None = None  # when a worker that has not called hvd.init() ends the job
        self._connected: set[int] = set()
        self._failed_meetings = 0
        self._kill_at: dict[int, float] = {}
        self._told_to_end: dict[int, str] = {}  # those that were signalled, and why
        self._dismissed: set[int] = set()  # those that have no place in later generations, and were told so
        self._living: set[int] = set()
        self._published: ElasticGeneration | None = None
        self._names: dict[int, str] = {}  # of its members, with their ranks
        # Since it was published: how its members have ended, in order, and why each is gone.
        self._ends: list[Exited | Lost] = []
        self._why_gone: dict[int, str] = {}
        self._has_ended_members = False  # whether some of them were ended since others could not go on for them
        self._last_failure = ""  # what is said of it, if a limit ends the job
        self._last: FirstFailure | None = None
        self._is_over = False
        self.table = GenerationTable()

    # ------------------------------------------------------------------ events

    @property
    def goes_on(self) -> bool:
        """Whether the job may go on though no worker runs."""
        return not self._is_over

    @property
    def knows_failure(self) -> bool:
        """Whether a worker has failed that ends the job."""
        return self._last is not None and self._last.knows_failure

    def on_hosts(self, event: HostEvent) -> None:
        if not self._decides():
            return
        match event:
            case DiscoveryFailed():
                self.decide(JobOutcome(1, event.why))
                self._end()
                return
            case HostsFound():
                self._log(f"hosts: {', '.join(f'{label}:{slots}' for label, slots in event.hosts.items()) or 'none'}")
                self._hosts.found(event.hosts)
            case Answered():
                self._hosts.answered(event.host, event.hello)
            case NotThereYet():
                self._hosts.not_there_yet(event.host, event.cause, event.why)
        self._look_at_hosts()

    def on_init(self, event: InitStarted | InitDone | InitFailed) -> None:
        if not self._decides():
            return
        if isinstance(event, InitDone):
            self._connected.add(event.worker)
            if self._is_met():
                self._have_met = True
                self._refused.forget_all()
        elif isinstance(event, InitFailed) and event.after == 0:
            if self._assignments.take_back(event.worker):
                self._do(self._membership.takes_back(event.worker, self._now()))
        elif isinstance(event, InitFailed):
            self._on_failed_meeting(event)
        if not isinstance(event, InitStarted):
            return
        after = event.after or 0
        self._have_run.add(self._roster[event.worker].host)
        self._assignments.asked(event.worker, after)
        self._hangs.begin(event.worker)
        if self._membership.current is None and self._late_at is None:
            self._late_at = self._now() + self._start_timeout_s
        self._do(self._membership.asks(event.worker, after, self._now(), event.newcomers))

    def _on_failed_meeting(self, event: InitFailed) -> None:
        """Ends a generation for all, if a rank could not connect to the others; gives up hosts that refuse them."""
        published = self._published
        is_rank = published is not None and event.after == published.number and self._is_member(event.worker)
        if published is None or not is_rank or not event.is_unconnected or self._is_met():
            return
        self._assignments.revoke(published.number, f"{self._name(event.worker)} could not connect to the other ranks")
        # A rank that is lost refuses connections, too. In the first generation it is an error of the job.
        if self._have_met and not self._why_gone:
            host_of = {each.worker: each.place.host for each in published.members}
            self._give_up(self._refused.failed(event, host_of))

    def on_alive(self, alive: Alive) -> None:
        self._hangs.answered(alive)
        if alive.worker in self._living:
            self._links.answered(alive)
            self._give_up_hosts_that_are_cut_off()

    def on_exit(self, end: Exited) -> None:
        self._kill_at.pop(end.worker, None)
        if self._last is not None:
            # A worker that was told to end is no cause, unless it ends in another way.
            if end.worker not in self._told_to_end or -end.returncode not in (0, signal.SIGTERM, signal.SIGKILL):
                self._last.on_exit(end)
            return
        if not self._decides():
            return
        why = self._words_of(end)
        self._forget(end.worker)
        was_told = self._told_to_end.pop(end.worker, None) is not None
        is_dismissed = end.worker in self._dismissed
        self._dismissed.discard(end.worker)
        if end.worker in self._refusals:
            self._last_failure = str(why)
        elif not (was_told or is_dismissed or end.returncode == 0 or end.peer_lost):
            self._last_failure = failure_message(self._roster.failure(end), is_last=True)
        if is_dismissed:
            self._tell_membership(end, why)
        elif self._is_member(end.worker) or self._published is None:
            self._on_end_of_rank(end, why, was_told=was_told)
        elif was_told:
            self._tell_membership(end, why)
        else:
            self._on_end_before_rank(end, why)
        if end not in self._ends:
            self._roster.remove(end.worker)
        self._look_at_hosts()

    def _on_end_of_rank(self, end: Exited, why: str | None, *, was_told: bool) -> None:
        """A rank of the generation has ended, or a worker before there is any generation."""
        if why is not None:
            self._lose([end.worker], why)
        if not was_told:
            self._ends.append(end)
        self._tell_membership(end, why)

    def _on_end_before_rank(self, end: Exited, why: str | None) -> None:
        """A worker has ended by itself while others are the ranks: a cause only if the job ends now."""
        if self._refusals.pop(end.worker, None) is not None:
            self._screen.say(str(why))
        else:
            self._screen.say(f"{why or self._name(end.worker) + ' ended with exit code 0'} before it had a rank")
        self._ends.append(end)
        self._tell_membership(end, why)
        if self._decides() and end in self._ends:
            self._ends.remove(end)

    def _tell_membership(self, end: Exited, why: str | None) -> None:
        self._do(self._membership.ended(end.worker, why, self._now(), was_killed=end.returncode < 0))

    def on_lost(self, lost: Lost) -> None:
        if self._last is not None:
            self._last.on_lost(lost)
            return
        if not self._hosts.knows(lost.host) or not self._decides():
            return
        self._given_up.discard(lost.host)
        self._have_run.discard(lost.host)
        was_connected = self._hosts.lost(lost.host)
        workers = [number for number in self._roster.on_host(lost.host) if number in self._living]
        why = f"lost {lost.host}: {lost.why}" if was_connected else f"{lost.host}: {lost.why}"
        self._screen.say(why)
        for worker in workers:
            self._forget(worker)
            self._told_to_end.pop(worker, None)
            self._dismissed.discard(worker)
            self._screen.finish(worker)
        if any(map(self._is_member, workers)) or (workers and self._published is None):
            self._ends.append(lost)
        if workers:
            self._last_failure = why
        self._lose(workers, why)
        self._do(self._membership.host_lost(lost.host, why, self._now()))
        for worker in workers:
            self._roster.remove(worker)
        self._look_at_hosts()

    def on_refused(self, refused: Refused) -> None:
        host = self._here() if refused.host is None else refused.host
        if self._membership.current is not None:
            # For observers, too, which count faults and lost hosts. A host on which workers run or ran keeps them: what
            # cannot be started now is one worker in its slot. One that has never had any cannot start the command.
            if refused.worker is None or host not in self._have_run:
                self._post(Lost(host, refused.why))
            elif refused.worker in self._living:
                self._refusals[refused.worker] = refused.why
                self._post(Exited(refused.worker, refused.exit_code))
            return
        where = "" if refused.host is None else f"{host}: "
        self.decide(JobOutcome(refused.exit_code, where + refused.why))
        self._is_over = True
        self._ending.running.clear()  # the agent will not report how the started ones end; hanging up ends them

    def decide(self, outcome: JobOutcome) -> None:
        """Sets the outcome, unless there is an earlier cause."""
        if self._last is not None:
            self._last.decide(outcome)
        else:
            self._ending.decide(outcome)

    def settle(self) -> None:
        """Names the worker that failed first, once nothing can follow."""
        if self._last is not None:
            self._last.settle()

    # -------------------------------------------------------------------- time

    def time_left_s(self) -> float | None:
        """Returns the seconds until `time_passes` must be called, or None."""
        if self._last is not None:
            return self._last.time_left_s()
        due = [
            self._membership.deadline_s(),
            self._hosts.due_s(self._membership.barred_until_s),
            self._late_at,
            self._hangs.due_s(),
            min(self._kill_at.values(), default=None),
        ]
        first = min((at_s for at_s in due if at_s is not None), default=None)
        return None if first is None else max(0.0, first - self._now())

    def time_passes(self) -> None:
        if self._last is not None:
            self._last.time_passes()
            return
        now_s = self._now()
        if late := [worker for worker, at_s in self._kill_at.items() if at_s <= now_s]:
            for worker in late:
                del self._kill_at[worker]
            self._signal_workers(late, signal.SIGKILL)
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
        hosts = ", ".join(dict.fromkeys(self._roster[number].host for number in absent))
        self.decide(
            JobOutcome(
                1,
                f"{self._roster.name(absent)} on {hosts} did not call hvd.init() within {self._start_timeout_s:g} s "
                "(--start-timeout) of the first that did",
            )
        )
        self._end()

    # ------------------------------------------------------------------- hosts

    def _look_at_hosts(self) -> None:
        """Connects to hosts, hangs up on those that have been removed, and has the membership use the others."""
        if not self._decides():
            return
        now_s, barred_until_s = self._now(), self._membership.barred_until_s
        self._hosts.connect(now_s, barred_until_s)
        if not self._living and self._hosts.all_are_given_up(barred_until_s):
            self._let_fail(
                "no host is left: each has had a failure and gets no more workers (--blacklist-cooldown-range)"
            )
            return
        # The first generation waits for all hosts, and does not begin with the one that answers first.
        self._has_hosts = self._has_hosts or self._hosts.are_known
        if self._has_hosts:
            usable = self._hosts.usable()
            self._do(self._membership.hosts_found(usable, now_s, are_wanted=self._hosts.are_wanted))
        self._hosts.let_go({self._roster[number].host for number in self._living})

    # ----------------------------------------------------------------- actions

    def _do(self, actions: Collection[Action]) -> None:
        for action in actions:
            if not self._decides():
                return
            self._log(str(action))
            match action:
                case StartWorker(worker, place):
                    self._start(worker, place)
                case Publish(generation):
                    self._publish(generation)
                case Notify(added, removed):
                    assert self._published is not None, "there is somebody to notify"
                    self._assignments.tell_of_hosts(self._published.number, added=added, removed=removed)
                case Dismiss(worker, why):
                    self._dismissed.add(worker)
                    if self._is_member(worker):
                        self._why_gone[worker] = f"{self._name(worker)} has left: {why}"
                    self._assignments.give(worker, Dismissal(why))
                case EndWorkers(workers, why, is_failure):
                    self._end_workers(workers, why, is_failure=is_failure)
                case Say(text):
                    self._screen.say(text)
                case EndJob(why, is_limit):
                    self._let_fail(why, is_limit=is_limit)
                case JobDone():
                    self.decide(JobOutcome())
                    self._end()

    def _start(self, worker: int, place: Place) -> None:
        self._roster.add(worker, place.host)
        self._ending.running.add(worker)
        self._living.add(worker)
        self._screen.begin(worker)
        if self._late_at is not None:  # it has as long as those that were started before
            self._late_at = self._now() + self._start_timeout_s
        self._hosts.start(
            place.host, worker, elastic_environment(worker, place.host, place.slot, self._chaos_of(worker))
        )

    def _end_hanging(self, workers: Collection[int]) -> None:
        for worker in workers:
            self._hangs.forget(worker)
        why = (
            f"it did not respond for {self._hang_timeout_s:g} s (--hang-timeout), and others waited for it: its "
            "process was stopped, or a C extension held the interpreter's lock"
        )
        # At once: a stopped process keeps SIGTERM for later, and a Python handler has no turn in one that hangs.
        self._end_workers(workers, why, signal.SIGKILL, is_failure=True)

    def _give_up_hosts_that_are_cut_off(self) -> None:
        if self._published is None or not self._decides():
            return
        host_of = {each.worker: each.place.host for each in self._published.members if each.worker in self._living}
        # While all compute, the network may come back. Until they are connected, they wait for each other.
        if self._connected.issuperset(host_of) and not self._hangs.those_who_wait(self._membership.waiting_for_ranks()):
            return
        self._give_up(self._links.cut_off(host_of))

    def _give_up(self, hosts: Iterable[CutOff]) -> None:
        for host, why in hosts:
            if host not in self._given_up:
                self._given_up.add(host)
                # `on_lost` hangs up on it, whereupon its agent kills all processes there.
                self._post(Lost(host, why))

    def _end_workers(
        self, workers: Collection[int], why: str, signum: int = signal.SIGTERM, *, is_failure: bool = False
    ) -> None:
        """``is_failure``: see `EndWorkers`."""
        self._told_to_end.update(dict.fromkeys(workers, why))
        for worker in filter(self._is_member, workers):
            words = self._why_gone.setdefault(worker, f"{self._name(worker)} was ended by hvdlite-run: {why}")
            if is_failure:
                self._last_failure, self._has_ended_members = words, True
        self._kill_at.update(dict.fromkeys(workers, self._now() + FAILURE_GRACE_S))
        self._signal_workers(workers, signum)

    def _publish(self, generation: ElasticGeneration) -> None:
        before = () if self._published is None else tuple(each.worker for each in self._published.members)
        now = {each.worker: rank for rank, each in enumerate(generation.members)}
        self._count_failed_meetings()
        if not self._decides():
            return
        gone = [worker for worker in before if worker not in now]
        left = list(dict.fromkeys(self._why_gone.get(worker) or f"{self._names[worker]} has left" for worker in gone))
        for worker in self._living:
            self._roster[worker].rank = now.get(worker)
            self._screen.set_rank(worker, now.get(worker))
        came = [
            f"worker {worker} joins as rank {rank} on {self._roster[worker].host}"
            for worker, rank in now.items()
            if worker not in before
        ]
        for end in self._ends:
            if isinstance(end, Exited):
                self._roster.remove(end.worker)
        self._published, self._late_at = generation, None
        self._links.forget_all()
        self._refused.next_generation()
        self._names = {worker: self._name(worker) for worker in now}
        self._has_ended_members = False
        for kept in (self._ends, self._why_gone, self._connected):
            kept.clear()
        ranks = "1 rank" if len(now) == 1 else f"{len(now)} ranks"
        tell = self._screen.say if before else self._log
        tell("; ".join([f"generation {generation.number}: {ranks}", *left, *came]))
        if not before:
            came = [
                f"{name_workers(now)} on {', '.join(dict.fromkeys(each.place.host for each in generation.members))}"
            ]
        self.table.add(GenerationRow(generation.number, self._now() - self._began_at, len(now), came, left))
        self._assignments.begin(generation.number)
        newcomers = sum(each.since == generation.number for each in generation.members)
        for worker, rank in now.items():
            self._assignments.give(worker, RankAssignment(generation.number, rank, len(now), newcomers))

    def _count_failed_meetings(self) -> None:
        """Ends the job if several generations in a row cannot connect, though no rank is lost."""
        if self._published is None:
            return
        self._failed_meetings = 0 if self._is_met() or self._why_gone else self._failed_meetings + 1
        if self._failed_meetings >= MOST_FAILED_MEETINGS:
            self.decide(
                JobOutcome(
                    1,
                    f"the ranks of {self._failed_meetings} generations in a row called hvd.init(), but were not "
                    "connected to all others: is a firewall between the hosts, or is it the wrong network? See "
                    "hvdlite-run --check, and --network-interface",
                )
            )
            self._end()

    # -------------------------------------------------------------------- ends

    def _lose(self, workers: Collection[int], why: str) -> None:
        """Notes why workers are lost, and revokes their generation, so that no rank waits for them."""
        members = () if self._published is None else tuple(each.worker for each in self._published.members)
        lost = [worker for worker in workers if worker in members]
        self._why_gone.update(dict.fromkeys(lost, why))
        if lost and self._published is not None:
            self._assignments.revoke(self._published.number, why)

    def _forget(self, worker: int) -> None:
        """Deletes what the store has of a worker that has ended. The roster keeps it until it is reported."""
        self._living.discard(worker)
        self._assignments.forget(worker)
        self._hangs.forget(worker)
        self._links.forget(worker)
        self._kill_at.pop(worker, None)

    def _let_fail(self, why: str | None, *, is_limit: bool = False) -> None:
        """Ends the job since no generation can follow. Without ``why``, the ends of the workers explain it.

        ``is_limit``: the failure that led to it is told, too.
        """
        self._is_over = True
        if why is not None:
            self.decide(JobOutcome(1, f"{why}. {self._last_failure}" if is_limit and self._last_failure else why))
            self._ending.end()
            return
        if self._has_ended_members:
            # Not only those that have failed by themselves.
            self.decide(JobOutcome(1, f"no rank is left: {'; '.join(dict.fromkeys(self._why_gone.values()))}"))
            self._ending.end()
            return
        self._last = FirstFailure({}, self._ending, self._roster, start_timeout_s=self._start_timeout_s)
        for end in self._ends:
            if isinstance(end, Exited):
                self._last.on_exit(end)
            else:
                self._last.on_lost(end)
        if all(isinstance(end, Exited) and end.returncode == 0 for end in self._ends):
            self.decide(JobOutcome(1, "; ".join(dict.fromkeys(self._why_gone.values())) or "all ranks were ended"))
            self._ending.end()

    def _end(self) -> None:
        self._is_over = True
        self._ending.end()

    def _decides(self) -> bool:
        """Whether the job still goes on; events after its end are ignored."""
        return not self._is_over and self._ending.outcome is None

    def _words_of(self, end: Exited) -> str | None:
        """Returns how a worker failed, named; None if it has not."""
        name = self._name(end.worker)
        if end.worker in self._refusals:
            return f"{name} could not be started: {self._refusals[end.worker]}"
        if end.worker in self._told_to_end:
            return f"{name} was ended by hvdlite-run: {self._told_to_end[end.worker]}"
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

    def _is_met(self) -> bool:
        """Whether all ranks of the last generation are connected."""
        members = () if self._published is None else self._published.members
        return bool(members) and self._connected.issuperset(each.worker for each in members)

    def _is_member(self, worker: int) -> bool:
        return self._published is not None and any(each.worker == worker for each in self._published.members)

    def _now(self) -> float:
        return self._ending.clock()
