"""An elastic job of a thousand generations, with its store and the agents' copies: nothing in them piles up."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import pytest
from elastic_script import Unseen
from hvdlite_launcher.elastic.elastic_hosts import ElasticHosts
from hvdlite_launcher.elastic.elastic_job import ElasticJob
from hvdlite_launcher.elastic.membership import Membership
from hvdlite_launcher.plan.job_spec import ON_FAILURE, Policy
from hvdlite_launcher.protocol.messages import Answered, Exited, Hello, HostsFound, InitDone, InitStarted
from hvdlite_launcher.store.relay import Cache
from hvdlite_launcher.store.server import Store
from hvdlite_launcher.workers.ending import Ending, Roster
from hvdlite_wire.store_requests import (
    ANSWERS,
    DONE,
    FAILED,
    Dismissal,
    RankAssignment,
    StoreRequest,
    assignment_key,
    pack,
    unpack,
)
from reachable import reachable

SETTLED, GENERATIONS = 400, 1000  # small numbers are objects that Python makes once, so larger ones are compared
HOSTS = ("a", "b")


class Running:
    """A worker process on one of two hosts: what it asks of its agent, and what it is answered."""

    def __init__(self, job: Simulated, number: int, host: str) -> None:
        self.job, self.number, self.host = job, number, host
        self.after, self.waits = 0, ""
        self.answer: RankAssignment | Dismissal | None = None

    def ask(self) -> None:
        self.job.elastic.on_init(InitStarted(self.number, self.after))
        self.job.request(self.host, StoreRequest.GET, [assignment_key(self.number, self.after)], self._answered)

    def _answered(self, code: int, payload: bytes) -> None:
        assert code == DONE, payload
        self.answer = ANSWERS.decode(unpack(payload)[0])
        self.job.answered.append(self)

    def meet(self) -> None:
        self.after, world = self.answer.generation, b"world%d/" % self.answer.generation
        self.job.request(self.host, StoreRequest.SET, [world + b"%d" % self.number, b"here"], lambda *_: None)
        self.job.request(self.host, StoreRequest.CHECK, [world + b"0"], lambda *_: None)
        self.waits = "wait"
        key = b"hosts/0" if self.answer.rank == 0 else b"end/0"
        self.job.request(self.host, StoreRequest.GET, [world + key], self._heard)
        self.job.elastic.on_init(InitDone(self.number, self.after))

    def _heard(self, code: int, payload: bytes) -> None:
        self.waits = "revoked" if code == FAILED else "told"


class Simulated(Unseen):
    """Launcher, agents and workers of an elastic job in one thread, without processes and time."""

    def __init__(self, **policy) -> None:
        self.now_s = 0.0
        self.store, self.roster = Store(), Roster()
        self.caches: dict[str, Cache] = {}
        self.workers: dict[int, Running] = {}
        self.answered: list[Running] = []
        self._calls: list[Callable[[], None]] = []
        for host in HOSTS:
            agent = Agent(self)
            agent.cache = self.caches[host] = Cache(
                lambda message, agent=agent: self._to_store(agent, message), range(1 << 30)
            )
        self.ending = Ending(
            self.roster, signal_workers=self._signal, say=_nothing, log=_nothing, grace=1, clock=lambda: self.now_s
        )
        self.elastic = ElasticJob(
            Membership(Policy(**policy)),
            ElasticHosts(self, start_timeout_s=60, say=_nothing),
            self.ending,
            store=self.store,
            screen=self,
            hang_timeout_s=0,
            post=_nothing,
        )

    # what the launcher uses

    def connect_later(self, label, slots):
        self.later(self.elastic.on_hosts, Answered(label, Hello("", slots, None, 0, label)))

    def start_worker(self, label, worker, variables, hellos):
        self.workers[worker] = Running(self, worker, label)
        self._calls.append(self.workers[worker].ask)

    def _signal(self, numbers, signum):
        for number in numbers:
            self.end(number, -signum)

    # what happens

    def later(self, handle, event) -> None:
        self._calls.append(lambda: handle(event))

    def request(self, host, operation, parts, reply) -> None:
        self.caches[host].request(operation, pack(parts), reply)

    def _to_store(self, agent, message) -> None:
        self._calls.append(lambda: self.store.receive(agent, message))

    def end(self, number: int, returncode: int) -> None:
        worker = self.workers.pop(number)
        worker.waits = "ended"
        self.ending.running.discard(number)
        self.later(self.elastic.on_exit, Exited(number, returncode))

    def settle(self) -> None:
        """Delivers messages and has the workers react, until nobody has anything to do."""
        while self._calls or self.answered or self._leaving():
            while self._calls:
                self._calls.pop(0)()
            answered, self.answered = self.answered, []
            for each in answered:
                if isinstance(each.answer, Dismissal):
                    self.end(each.number, 0)
                else:
                    each.meet()
            for each in self._leaving():
                each.waits = ""
                each.ask()
            assert self.ending.outcome is None, self.ending.outcome

    def _leaving(self) -> list[Running]:
        """All leave once one was told that hosts have changed; each leaves whose generation is revoked."""
        told = any(each.waits == "told" for each in self.workers.values())
        return [
            each
            for each in self.workers.values()
            if each.waits in (("revoked", "told", "wait") if told else ("revoked",))
        ]

    @property
    def generation(self) -> int:
        current = self.elastic._membership.current
        return 0 if current is None else current.number

    def held(self) -> Counter[str]:
        return reachable(self.elastic, self.store, self.caches, self.roster, self.ending)


class Agent:
    def __init__(self, job: Simulated) -> None:
        self.job = job
        self.cache: Cache

    def send(self, message) -> None:
        self.job._calls.append(lambda: self.cache.receive(message))


def _nothing(*_) -> None:
    pass


def lose(job: Simulated, turn: int) -> None:
    """Kills a rank, each in turn, and then the one that has taken its place."""
    members = sorted(job.workers)
    job.end(members[turn % len(members)], -signal.SIGKILL)


def change_hosts(job: Simulated, turn: int) -> None:
    job.elastic.on_hosts(HostsFound({"a": 2, "b": 1} if turn % 2 else {"a": 2}))


def change_slots(job: Simulated, turn: int) -> None:
    job.elastic.on_hosts(HostsFound({"a": 2, "b": 1 + turn % 2}))


@pytest.mark.parametrize("turn", [lose, change_hosts, change_slots])
def test_a_job_of_a_thousand_generations_holds_what_it_held_after_a_hundred(turn):
    job = Simulated(min_np=1, on_failure=ON_FAILURE["replace"])
    job.elastic.on_hosts(HostsFound({"a": 2, "b": 1}))
    job.settle()
    assert job.generation == 1
    held = []
    for number in range(2 * GENERATIONS):
        turn(job, number)
        job.settle()
        # The same point of two turns, and longer after the last failure than any of them counts.
        job.now_s += 400
        if job.generation >= (SETTLED, GENERATIONS)[len(held)] and number % 6 == 5:
            held.append(job.held())
            if len(held) == 2:
                break
    assert len(held) == 2, job.generation
    assert {kind: (held[0][kind], count) for kind, count in held[1].items() if count > held[0][kind]} == {}
