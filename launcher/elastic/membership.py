"""
Decides which workers an elastic job has, and which of them are the ranks of each generation.

    hosts found, workers that ask for a generation or end, time ──► Membership ──► start, publish, notify, dismiss, end

A *generation* is one world: the ranks from one hvd.init() to the next hvd.shutdown(). It ends when one of its workers
is lost, or when its ranks leave it because hosts have changed. Each remaining worker then asks for the next one. When
all of them have asked, it is published: the remaining workers in their order, the oldest first, then new ones. A
worker's number is never used again. Its slot on its host stays the same, and its rank may change.

Nothing here has a thread, process or clock: tests replay events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdlite_wire.store_requests import NewWorkerPolicy

from ..plan.job_spec import Policy, Responses
from .elastic_workers import ElasticGeneration, ElasticWorkers, HostSlots, Place, PlacedWorker

# After this time the user is told for which workers of the last generation the next one waits.
_TELL_OF_LATE_S = 60.0
# Of `Membership`, in a job: how long a slot rests after a worker has failed there before it was a rank.
REST_S = 1.0


# The actions that `Membership` returns, for `ElasticJob` to carry out.


@dataclass(frozen=True)
class StartWorker:
    worker: int
    place: Place


@dataclass(frozen=True)
class Publish:
    generation: ElasticGeneration


@dataclass(frozen=True)
class Notify:
    """Tell rank 0 that hosts have changed, so that all ranks leave the generation at their next commit."""

    added: bool
    removed: bool


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker that asks for the next generation that it has no place any more: it ends with exit code 0."""

    worker: int
    why: str


@dataclass(frozen=True)
class EndWorkers:
    """``is_failure``: others cannot go on for these workers, so their end may be the cause of the job's."""

    workers: tuple[int, ...]
    why: str
    is_failure: bool = False


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class EndJob:
    """No generation can follow. ``why`` is None if the workers' failures explain it.

    ``is_limit``: a limit that the user has set is reached, so that the last failure is the cause behind it.
    """

    why: str | None
    is_limit: bool = False


@dataclass(frozen=True)
class JobDone:
    """All ranks of the last generation have ended with exit code 0: workers that wait for a place end, too."""


Action = StartWorker | Publish | Notify | Dismiss | EndWorkers | Say | EndJob | JobDone


@dataclass
class _Wait:
    """A wait before the next generation, from when somebody began to wait; ``due_s``: when to look again.

    For members that have not left the last generation ("late"), while others of it or only new workers ("state") wait
    for them; or for more workers ("more").
    """

    what: Literal["late", "state", "more"]
    since_s: float
    is_told: bool = False
    due_s: float = math.inf


class Membership:
    """The workers and generations of a job. Methods take an event and return actions; ``now_s`` never goes back."""

    def __init__(self, policy: Policy, jitter: Callable[[], float] = lambda: 0.0, rest_s: float = 0.0) -> None:
        """``jitter`` draws a number from 0 to 1, for cooldowns. ``rest_s``: see `HostSlots`."""
        self.policy = policy
        self._slots = HostSlots(policy, jitter, rest_s)
        self._workers = ElasticWorkers(self._slots)
        self._causes: list[str] = []  # of the end of the current generation
        self._notified: Notify | None = None
        self._wait: _Wait | None = None
        self._done: list[str] = []  # the names of those that have ended with exit code 0
        self._rank0_is_done = False
        # Whether one that was not killed is among the causes: its program has failed.
        self._has_failed = False
        self._has_hosts = False
        self._are_wanted = True
        self._told_of_staying: list[int] = []  # the members that were told to stay, though their places are removed
        self._is_over = False

    @property
    def current(self) -> ElasticGeneration | None:
        """The generation that was published last."""
        return self._workers.current

    @property
    def workers(self) -> dict[int, PlacedWorker]:
        """The workers that were started and have not ended, by their numbers."""
        return self._workers.running

    def hosts_found(self, hosts: Mapping[str, int], now_s: float, *, are_wanted: bool = True) -> list[Action]:
        """Sets the hosts and the slots of each. ``are_wanted``: some are listed, though none may be reached yet."""
        self._has_hosts = True
        self._are_wanted = are_wanted
        self._slots.found(hosts)
        return self._go_on(now_s)

    def asks(
        self, worker: int, after: int, now_s: float, newcomers: NewWorkerPolicy = NewWorkerPolicy.WELCOME
    ) -> list[Action]:
        """A worker asks for the generation after ``after``, which is 0 if it has been in none."""
        if (known := self._workers.running.get(worker)) is not None:
            known.asks_after, known.newcomers = after, newcomers
        return self._go_on(now_s)

    def takes_back(self, worker: int, now_s: float) -> list[Action]:
        """A worker that is in no generation has not asked after all: it makes its model first, and asks then."""
        if (known := self._workers.running.get(worker)) is not None:
            known.asks_after = None
        return self._go_on(now_s)

    def ended(self, worker: int, failure: str | None, now_s: float, *, was_killed: bool = False) -> list[Action]:
        """A worker has ended; ``failure`` is None if it did so with exit code 0. ``was_killed``: by a signal."""
        gone = self._workers.running.pop(worker, None)
        if gone is None or gone.why_dismissed is not None:
            return self._go_on(now_s)
        if failure is None and (self.current is None or self._workers.is_member(gone)):
            self._done.append(str(gone))
            self._rank0_is_done |= self.current is None or self.current.members[0].worker == worker
            return self._go_on(now_s)
        failure = failure or f"{gone} ended before it was a rank"
        if self._workers.is_member(gone):
            self._causes.append(failure)
            self._has_failed |= not was_killed
        elif self.current is None and not gone.is_being_ended and not self._is_over:
            # There is no state yet that could be kept, and new workers would probably fail in the same way.
            return list(self._end(None))
        if gone.is_being_ended:  # for a failure that has been counted
            return self._go_on(now_s)
        return [*self._count_failure(gone, None, now_s), *self._go_on(now_s)]

    def host_lost(self, host: str, why: str, now_s: float) -> list[Action]:
        """A host is lost with all its workers. It gets no new ones until its cooldown is over."""
        lost = self._workers.on_host(host)
        for each in lost:
            del self._workers.running[each.number]
            if self._workers.is_member(each):
                self._causes.append(why)
        self._slots.count_failure(host)
        responses = Responses[Action](
            end_job=lambda: self._end(why), bar_host=lambda: self._bar(host, now_s), tell_of_empty_slot=lambda: ()
        )
        actions = self.policy.on_failure.after_lost_host(responses) if lost else responses.bar_host()
        return [*actions, *self._go_on(now_s)]

    def barred_until_s(self, host: str) -> float:
        return self._slots.barred_until_s(host)

    def time_passes(self, now_s: float) -> list[Action]:
        """Must be called at `deadline_s`."""
        return self._go_on(now_s)

    def deadline_s(self) -> float | None:
        """Returns when `time_passes` must be called, or None. It is later than every ``now_s`` so far."""
        if self._is_over or not self._has_hosts:
            return None
        due = [self._slots.next_change_s()]
        if self._wait is not None and math.isfinite(self._wait.due_s):
            due.append(self._wait.due_s)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def waiting_for_ranks(self) -> set[int]:
        """Returns the workers in hvd.init() that wait for what the ranks do: no spares, which wait for a loss."""
        if self.current is None:
            return {each.number for each in self._workers.asking()}
        members = [each for each in self._workers.members() if each.asks_after is not None]
        return {each.number for each in [*members, *self._workers.waiting_joiners(self._most())]}

    def _go_on(self, now_s: float) -> list[Action]:
        if self._is_over or not self._has_hosts:
            return []
        self._slots.forget(now_s)
        actions = [*self._stay(), *self._dismissals(), *self._starts()]
        wait, self._wait = self._wait, None  # set again below if it goes on
        actions += self._next_generation(wait, now_s)
        return actions

    def _starts(self) -> Iterator[Action]:
        """Starts workers in free slots, up to --max-np and --spares; none once a rank has ended with exit code 0."""
        if self._done or (self.current is not None and not self._workers.members()):
            return
        usable = self._slots.usable()
        if self.current is None and sum(usable.values()) < self._least() and not self._workers.running:
            return
        taken = {each.place for each in self._workers.running.values()}
        room = self._most() + self.policy.spares - sum(place.host in usable for place in taken)
        for host, slots in usable.items():
            for slot in range(slots):
                place = Place(host, slot)
                if room > 0 and place not in taken and self._slots.may_fill(place) and not self._slots.rests(place):
                    room -= 1
                    yield StartWorker(self._workers.add(place).number, place)

    def _stay(self) -> Iterator[Action]:
        """Tells that ranks stay though their hosts were removed, since too few are left without them."""
        staying = (
            [] if self._may_remove() else [e for e in self._workers.members() if not self._slots.is_there(e.place)]
        )
        numbers = [each.number for each in staying]
        if staying and numbers != self._told_of_staying:
            yield Say(
                f"the new list of hosts leaves fewer than {self._words_of_least().removeprefix('at least ')}: "
                f"{_names(staying)} {'stays' if len(staying) == 1 else 'stay'} until workers on other hosts have come"
            )
        self._told_of_staying = numbers

    def _may_remove(self) -> bool:
        """Whether ranks whose places were removed may leave: others have the state, and are enough.

        A list that one wrong name is in, or that lacks the hosts that are to come, must not end the training.
        """
        if self.current is None or not self._are_wanted:
            return True
        there = [each for each in self._workers.members() if self._slots.is_there(each.place)]
        return bool(there) and len(there) + len(self._workers.joiners()) >= self._least()

    def _hands_over(self) -> bool:
        """Whether no rank's place is left, and enough new workers have come to take over from one of the ranks."""
        members, joiners = self._workers.members(), self._workers.joiners()
        is_gone = self._are_wanted and not any(self._slots.is_there(each.place) for each in members)
        return is_gone and bool(members) and len(joiners) >= self._least()

    def _dismissals(self) -> Iterator[Action]:
        """Dismisses workers whose host or slot was removed, once they ask for the next generation."""
        may_remove = self._may_remove()
        for each in list(self._workers.running.values()):
            is_removed = not self._slots.is_there(each.place) and (may_remove or not self._workers.is_member(each))
            if each.asks_after is not None and (each.why_dismissed is not None or is_removed):
                # A dismissed worker that asks again is dismissed again, even if its host has come back.
                each.why_dismissed, each.asks_after = each.why_dismissed or self._slots.removal(each.place), None
                yield Dismiss(each.number, each.why_dismissed)

    def _next_generation(self, wait: _Wait | None, now_s: float) -> Iterator[Action]:
        members, joiners = self._workers.members(), self._workers.joiners()
        if self._done:
            yield from self._last_ends(members, wait, now_s)
            return
        if self.current is not None and not members:
            barred = ", ".join(self._slots.barred())
            words = self.policy.on_failure.words_without_hosts(barred)
            if words is not None and barred and not self._slots.usable():
                yield Say(words)
            if self._causes and (idle := self._workers.started()):
                yield Say(
                    f"no rank is left that has the state of the training, with which {_names(idle)} could go on: start "
                    "the job again, from a checkpoint if the program has saved one"
                )
            yield from self._end(None if self._causes else "all hosts have been removed")
            return
        leaving = [each for each in members if each.asks_after is not None]
        if self.current is not None and not leaving and len(members) == len(self.current.members):
            yield from self._notify(members, joiners)
            return
        if late := [each for each in members if each.asks_after is None]:
            yield from self._wait_for_late(late, leaving, wait, now_s)
            return
        if self.current is None and any(each.asks_after is None for each in self._workers.running.values()):
            return
        newcomers = max((each.newcomers for each in leaving), default=NewWorkerPolicy.WELCOME)
        is_enough = len(leaving) >= self._least()
        if newcomers is NewWorkerPolicy.NEVER or (newcomers is NewWorkerPolicy.IF_NEEDED and is_enough):
            joiners = []
        first = leaving
        if len(leaving) > 1 and joiners and self._hands_over():
            # One rank that has the state is enough, where there is not room for all.
            room = max(1, self._most() - len(joiners))
            first = leaving[:room]
        candidates = [*first, *joiners][: self._most()]
        if len(candidates) < self._least():
            yield from self._wait_for_more(wait, now_s)
        else:
            # Where these are to come later, they only have to be there.
            yield from self._publish(leaving if newcomers is NewWorkerPolicy.AFTERWARDS else candidates)
            if not self._is_over:
                # Those that could not come into this one come into the next.
                yield from self._notify(self._workers.members(), self._workers.joiners())

    def _wait_for_late(
        self, late: Sequence[PlacedWorker], leaving: Sequence[PlacedWorker], wait: _Wait | None, now_s: float
    ) -> Iterator[Action]:
        """Waits for members that have not left an ended generation, while somebody waits for them.

        They are ended --elastic-timeout after the first of those ``leaving``. New workers can only wait: without the
        late members there would be no state to join.
        """
        what: Literal["late", "state"] = "late" if leaving else "state"
        limit_s = self.policy.elastic_timeout_s if leaving else math.inf
        waiting = leaving or self._workers.waiting_joiners(self._most())
        if not waiting:
            return
        self._wait = wait if wait is not None and wait.what == what else _Wait(what, since_s=now_s)
        waited_s = now_s - self._wait.since_s
        self._wait.due_s = self._wait.since_s + limit_s
        if waited_s >= limit_s:
            self._wait = None
            yield from self._end_late(late, waiting, now_s)
        elif waited_s >= _TELL_OF_LATE_S and not self._wait.is_told:
            self._wait.is_told = True
            then = (
                f"What does not come within {limit_s:g} s (--elastic-timeout) is ended"
                if leaving
                else f"Nobody else has the state of the training, so {_names(waiting)} can only wait"
            )
            yield Say(
                f"the next generation has been waiting {waited_s:.0f} s for {_names(late)}: a long computation, or a "
                f"hang. {then}"
            )
        elif not self._wait.is_told:
            self._wait.due_s = self._wait.since_s + min(_TELL_OF_LATE_S, limit_s)

    def _end_late(
        self, late: Sequence[PlacedWorker], waiting: Sequence[PlacedWorker], now_s: float
    ) -> Iterator[Action]:
        why = (
            f"did not come to the next generation within {self.policy.elastic_timeout_s:g} s (--elastic-timeout) of "
            f"the first that did: {_names(waiting)} waited"
        )
        self._causes.append(f"{_names(late)} {why}")
        for each in late:
            each.is_being_ended = True
        yield EndWorkers(tuple(each.number for each in late), f"it {why}", is_failure=True)
        for each in late:
            yield from self._count_failure(each, f"{_names(late)} {why}", now_s)
        if not self._is_over:
            yield from self._next_generation(None, now_s)

    def _last_ends(self, members: Sequence[PlacedWorker], wait: _Wait | None, now_s: float) -> Iterator[Action]:
        """Ends the job after a rank has ended with exit code 0: well if all others do so too.

        A rank that is killed now has no part in the training any more but its last step, unless it is rank 0, which at
        its end does what is done once, such as saving the model.
        """
        living = members if self.current is not None else list(self._workers.running.values())
        asking = [each for each in living if each.asks_after is not None]
        if self._has_failed:
            yield from self._end(None)
        elif not living:
            yield from self._all_have_ended()
        elif not asking:
            return
        elif not self._causes:
            numbers = ", ".join(str(each.number) for each in asking)
            waits = f"worker {numbers} waits" if len(asking) == 1 else f"workers {numbers} wait"
            yield from self._end(f"{self._done[0]} ended with exit code 0, and {waits} for it in hvd.init()")
        elif any(each.newcomers is NewWorkerPolicy.WELCOME for each in asking):
            # They go back to a commit, to train again what needs those that are done.
            yield from self._end(None)
        elif late := [each for each in living if each.asks_after is None]:
            yield from self._wait_for_late(late, asking, wait, now_s)
        else:
            yield from self._publish(asking)

    def _all_have_ended(self) -> Iterator[Action]:
        lost = "; ".join(dict.fromkeys(self._causes))
        if lost and not self._rank0_is_done:
            yield from self._end(
                f"rank 0 was lost at its end, when {self._done[0]} was done: what rank 0 does at the end, such as "
                "saving the model, may be missing",
                is_limit=True,
            )
            return
        self._is_over = True
        if lost:
            yield Say(f"{lost}, at its end: the others are done, and nothing of the training is missing")
        yield JobDone()

    def _notify(self, members: Collection[PlacedWorker], joiners: Collection[PlacedWorker]) -> Iterator[Action]:
        added = bool(joiners) and (len(members) < self._most() or (len(members) > 1 and self._hands_over()))
        removed = self._may_remove() and any(not self._slots.is_there(each.place) for each in members)
        notify = Notify(added, removed)
        if (added or removed) and notify != self._notified:
            self._notified = notify
            yield notify

    def _publish(self, candidates: Iterable[PlacedWorker]) -> Iterator[Action]:
        limit = self.policy.reset_limit
        if limit is not None and self.current is not None and self.current.number > limit:
            yield from self._end(f"--reset-limit {limit}: the ranks have changed more often", is_limit=True)
            return
        why = "; ".join(dict.fromkeys(self._causes)) or ("the job begins" if self.current is None else "")
        self._causes, self._has_failed, self._notified = [], False, None
        yield Publish(self._workers.next_generation(candidates, why))

    def _wait_for_more(self, wait: _Wait | None, now_s: float) -> Iterator[Action]:
        """Waits until there are enough workers: twice as long if enough have been started."""
        limit_s, times = self.policy.elastic_timeout_s, "--elastic-timeout"
        if wait is None or wait.what != "more":
            wait = _Wait("more", since_s=now_s)
            yield Say(
                f"waiting {limit_s:g} s ({times}) for {self._words_of_least()}: so far {self._words_of_what_there_is()}"
            )
        if len(self._workers.started()) >= self._least():
            limit_s, times = 2 * limit_s, f"{times} {limit_s:g}, and as long again for workers that were starting"
        wait.due_s = wait.since_s + limit_s
        if now_s < wait.due_s:
            self._wait = wait
            return
        yield from self._end(
            f"waited {limit_s:g} s ({times}) for {self._words_of_least()}: only {self._words_of_what_there_is()}",
            is_limit=True,
        )

    def _words_of_what_there_is(self) -> str:
        usable = self._slots.usable()
        hosts = ", ".join(f"{label}:{slots}" for label, slots in usable.items())
        workers = self._workers.started()
        starting = sum(each.asks_after is None for each in workers)
        words = _count(len(workers), "worker")
        words += f", of which {starting} not yet in hvd.init()" if starting else ""
        words += f", and {_count(sum(usable.values()), 'slot')}"
        words += f" ({hosts})" if hosts else ""
        places = [Place(host, slot) for host, slots in usable.items() for slot in range(slots)]
        if empty := sum(not self._slots.may_fill(place) for place in places):
            words += f", of which {empty} stay empty after failures"
        barred = ", ".join(self._slots.barred())
        return words + (f"; hosts that get no workers after failures: {barred}" if barred else "")

    def _count_failure(self, worker: PlacedWorker, why: str | None, now_s: float) -> Iterator[Action]:
        """Applies the policy after a worker has failed; ``why`` is the reason if the job ends."""
        place = worker.place
        self._slots.count_failed_worker(place, now_s, was_rank=worker.since is not None)
        yield from self.policy.on_failure.after_failure(
            Responses[Action](
                end_job=lambda: self._end(why),
                # The host of a worker that fails when others are done is not needed any more.
                bar_host=lambda: () if self._done else self._bar(place.host, now_s),
                tell_of_empty_slot=lambda: self._tell_of_empty_slot(place, now_s),
            )
        )

    def _tell_of_empty_slot(self, place: Place, now_s: float) -> Iterator[Action]:
        if not self._workers.members() or not self._slots.is_there(place) or self._slots.may_fill(place):
            return
        failed = _count(self._slots.failures_in(place), "worker")
        yield Say(
            f"{place} stays empty for {self._slots.filled_again_s(place) - now_s:.0f} s: {failed} failed in it within "
            f"{self.policy.restart_window_s:g} s (--max-restarts {self.policy.max_restarts})"
        )

    def _bar(self, host: str, now_s: float) -> Iterator[Action]:
        """Excludes a host until its cooldown is over, and ends its workers."""
        self._slots.bar(host, now_s)
        others = [each for each in self._workers.on_host(host) if not each.is_being_ended]
        for each in others:
            each.is_being_ended = True
        if others:
            yield EndWorkers(tuple(each.number for each in others), f"{host} gets no more workers after a failure")

    def _end(self, why: str | None, *, is_limit: bool = False) -> Iterator[Action]:
        if not self._is_over:
            self._is_over = True
            yield EndJob(why, is_limit)

    def _least(self) -> int:
        """The number of workers that the next generation needs."""
        start = self.policy.start_np
        return self.policy.min_np if start is None or self.current is not None else start

    def _words_of_least(self) -> str:
        flag = "--min-np" if self._least() == self.policy.min_np else "-np"
        return f"at least {_count(self._least(), 'worker')} ({flag})"

    def _most(self) -> int:
        return self.policy.max_np if self.policy.max_np is not None else 1 << 30


def _names(workers: Iterable[PlacedWorker]) -> str:
    return ", ".join(map(str, workers))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
