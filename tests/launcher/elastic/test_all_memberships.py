"""All orders of events over two hosts with two slots, up to some number of states: what `Membership` never does."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hvdlite_launcher.elastic.elastic_workers import Place
from hvdlite_launcher.elastic.membership import (
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
from hvdlite_launcher.plan.job_spec import ON_FAILURE, Policy
from long_run import IS_LONG

# Of the one with no slots only a wrong name is listed; of the last, nothing.
HOSTS = ({"a": 2, "b": 2}, {"a": 2}, {"b": 2}, {"b": 2, "a": 1}, {"typo": 0}, {})
STARTING, RUNNING, WAITING, DISMISSED, ENDING = "starting", "running", "waiting", "dismissed", "ending"


@dataclass
class Worker:
    place: Place
    does: str = STARTING
    generation: int = 0  # the last one that it has read a seat in


@dataclass
class World:
    """A membership, and the workers that it has had started, as they see it."""

    policy: Policy
    membership: Membership
    now_s: float = 0.0
    hosts: dict[str, int] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    notified: tuple[bool, bool] = (False, False)
    is_over: bool = False

    def events(self):
        """Returns all that may happen next, as names of methods and arguments."""
        yield from (("found", hosts) for hosts in HOSTS if hosts != self.hosts)
        if self.membership.deadline_s() is not None:
            yield "time", None
        for host in {worker.place.host for worker in self.workers.values()}:
            yield "lost", host
        for number, worker in self.workers.items():
            yield "fail", number
            if worker.does == WAITING and number not in self.members and not worker.generation:
                yield "take_back", number
            if worker.does != WAITING:
                yield "ask", number
                yield "finish", number

    def after(self, what, argument):
        """Returns the world after an event, in which nothing that must not be is."""
        world = copy.deepcopy(self)
        world._do(getattr(world, "_" + what)(argument))
        world._check()
        return world

    def _found(self, hosts):
        self.hosts = hosts
        return self.membership.hosts_found(hosts, self.now_s, are_wanted=bool(hosts))

    def _time(self, _):
        deadline_s = self.membership.deadline_s()
        assert deadline_s > self.now_s, "it would be due again and again"
        self.now_s = deadline_s
        return self.membership.time_passes(self.now_s)

    def _lost(self, host):
        self.workers = {number: worker for number, worker in self.workers.items() if worker.place.host != host}
        return self.membership.host_lost(host, f"lost {host}", self.now_s)

    def _fail(self, number):
        del self.workers[number]
        return self.membership.ended(number, f"worker {number} failed", self.now_s)

    def _finish(self, number):
        was_told = self.workers.pop(number).does == ENDING
        return self.membership.ended(number, "it was ended" if was_told else None, self.now_s)

    def _ask(self, number):
        worker = self.workers[number]
        if worker.does != ENDING:
            worker.does = WAITING
        return self.membership.asks(number, worker.generation, self.now_s)

    def _take_back(self, number):
        self.workers[number].does = STARTING
        return self.membership.takes_back(number, self.now_s)

    # ------------------------------------------------------------- what it does

    def _do(self, actions):
        for action in actions:
            assert not self.is_over
            match action:
                case StartWorker(number, place):
                    assert number not in self.workers
                    assert place not in [worker.place for worker in self.workers.values()], "a slot has two workers"
                    assert place.slot < self.hosts.get(place.host, 0)
                    assert self.membership.barred_until_s(place.host) <= self.now_s
                    self.workers[number] = Worker(place)
                    most = math.inf if self.policy.max_np is None else self.policy.max_np + self.policy.spares
                    usable = [worker for worker in self.workers.values() if self.is_usable(worker.place.host)]
                    assert len(usable) <= most
                case Publish(generation):
                    self._publish(generation)
                case Notify(added, removed):
                    assert self.members
                    assert all(self.workers[each].does == RUNNING for each in self.members)
                    self.notified = (self.notified[0] or added, self.notified[1] or removed)
                case Dismiss(number, _):
                    worker = self.workers[number]
                    assert worker.does in (WAITING, ENDING), "it has not asked"
                    worker.does = DISMISSED if worker.does == WAITING else ENDING
                case EndWorkers(numbers, _, is_failure):
                    is_awaited = any(self.workers[number].does == WAITING for number in self.members_left())
                    assert is_awaited or not is_failure, "nobody waits for them that has the state"
                    for number in numbers:
                        assert self.workers[number].does != ENDING
                        self.workers[number].does = ENDING
                case EndJob() | JobDone():
                    self.is_over = True
                case Say():
                    pass

    def members_left(self):
        return self.workers.keys() & set(self.members)

    def is_usable(self, host):
        return self.hosts.get(host, 0) > 0 and self.membership.barred_until_s(host) <= self.now_s

    def _publish(self, generation):
        numbers = tuple(member.worker for member in generation.members)
        least = self.policy.min_np if self.members or self.policy.start_np is None else self.policy.start_np
        assert least <= len(numbers) <= (self.policy.max_np or 99)
        assert len(set(numbers)) == len(numbers)
        # The last generation is over: of its members, each that lives has asked, or will be in none any more.
        for number in self.members:
            assert number not in self.workers or self.workers[number].does in (WAITING, DISMISSED, ENDING)
        old = [number for number in self.members if number in numbers]
        assert list(numbers[: len(old)]) == old, "survivors keep their order, and come first"
        assert not self.members or old, "somebody has the state"
        assert list(numbers[len(old) :]) == sorted(set(numbers) - set(old))
        sinces = [member.since for member in generation.members]
        assert sinces == sorted(sinces), "rank 0 is the oldest"
        for member in generation.members:
            worker = self.workers[member.worker]
            assert worker.does == WAITING
            assert worker.place == member.place
            worker.does, worker.generation = RUNNING, generation.number
        self.members, self.notified = numbers, (False, False)

    def _check(self):
        """Nothing waits for ever, and nobody is forgotten."""
        if self.is_over:
            assert self.membership.deadline_s() is None
            return
        deadline_s = self.membership.deadline_s()
        assert deadline_s is None or deadline_s >= self.now_s
        assert self.workers or deadline_s is not None, "nobody is left, and nothing will happen"
        if not self.members:
            if all(worker.does == WAITING for worker in self.workers.values()):
                assert deadline_s is not None
            return
        is_whole = all(number in self.workers and self.workers[number].does == RUNNING for number in self.members)
        waiting = [number for number, worker in self.workers.items() if worker.does == WAITING]
        if not is_whole and any(number in self.members for number in waiting):
            assert deadline_s is not None, "survivors wait for those that may never come"
        for number in waiting:
            assert number in self.membership._workers.running
            place = self.workers[number].place
            is_there = place.slot < self.hosts.get(place.host, 0)
            if is_whole and is_there and len(self.members) < (self.policy.max_np or 99):
                assert self.notified[0], "a joiner waits, and nobody knows"
        if is_whole:
            self._check_removals(waiting)

    def _check_removals(self, waiting):
        there = {number for number, worker in self.workers.items() if self.is_there(worker.place)}
        stay, joiners = there.intersection(self.members), there.intersection(waiting)
        if len(stay) == len(self.members):
            return
        most = self.policy.max_np or 99
        if not self.hosts or (stay and len(stay) + len(joiners) >= self.policy.min_np):
            assert self.notified[1], "a host was removed, and nobody knows"
        elif not stay and len(joiners) >= self.policy.min_np and most > 1:
            assert self.notified[0], "others could take the training over, and nobody knows"
        elif len(joiners) == 0:
            assert not self.notified[1], "too few would be left"

    def is_there(self, place):
        return place.slot < self.hosts.get(place.host, 0)

    # ---------------------------------------------------------- equal to others

    def key(self):
        """Equal for two worlds that differ in the time, and in the numbers of workers and generations, alone."""
        order = {number: place for place, number in enumerate(sorted(self.workers))}
        numbers = {**dict.fromkeys(self.members, -1), **order}
        first = min((worker.generation for worker in self.workers.values() if worker.generation), default=0)
        return (
            tuple(sorted(self.hosts.items())),
            tuple(
                (order[number], worker.place, worker.does, worker.generation and worker.generation - first)
                for number, worker in sorted(self.workers.items())
            ),
            tuple(numbers[number] for number in self.members),
            self.notified,
            self._key_of(self.membership, numbers),
        )

    def _key_of(self, membership, numbers):
        hosts = [
            (
                label,
                host.slots,
                min(host.failures, 2),
                host.barred_until_s - self.now_s,
                tuple(
                    (slot, tuple(at - self.now_s for at in times)) for slot, times in sorted(host.failed_at_s.items())
                ),
            )
            for label, host in membership._slots._hosts.items()
        ]
        workers = [
            (numbers[each.number], each.since is None, each.asks_after is None, each.why_dismissed, each.is_being_ended)
            for each in membership._workers.running.values()
        ]
        wait = membership._wait
        return (
            tuple(hosts),
            tuple(workers),
            bool(membership._causes),
            bool(membership._done),
            membership._notified,
            membership._has_hosts,
            None if wait is None else (wait.what, wait.since_s - self.now_s, wait.is_told),
        )


def explore(policy, most_states):
    """Returns how many worlds were seen; each event is tried in each of them, the nearest to the beginning first."""
    world = World(policy, Membership(policy))
    seen, next_ones = {world.key()}, deque([(world, ())])
    while next_ones and len(seen) < most_states:
        world, path = next_ones.popleft()
        for event in list(world.events()):
            try:
                then = world.after(*event)
            except AssertionError as error:
                raise AssertionError(f"{error} after {[*path, event]}") from error
            if then.is_over or (key := then.key()) in seen:
                continue
            seen.add(key)
            next_ones.append((then, (*path, event)))
    return len(seen)


POLICIES = {
    "replace": Policy(1),
    "replace, at least two": Policy(2, max_np=3, max_restarts=1),
    "spare": Policy(1, max_np=2, spares=1, max_restarts=0),
    "begin with three": Policy(1, start_np=3, elastic_timeout_s=50),
    "shrink": Policy(1, on_failure=ON_FAILURE["shrink"]),
    "blacklist": Policy(1, on_failure=ON_FAILURE["blacklist"], cooldown_s=(5, 20)),
    "blacklist for ever": Policy(2, on_failure=ON_FAILURE["blacklist"]),
    "stop": Policy(1, max_np=3, on_failure=ON_FAILURE["stop"]),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_order_of_events_leads_to_a_wrong_generation_a_forgotten_worker_or_a_wait_for_ever(policy):
    most_states = 20_000 if IS_LONG else 300
    assert explore(policy, most_states) >= most_states
