"""Plays scripts of events to an elastic job: no processes, no agents, no time."""

from __future__ import annotations

import json
from queue import Empty

from hvdlite_launcher.elastic.elastic_hosts import ElasticHosts
from hvdlite_launcher.elastic.elastic_job import ElasticJob
from hvdlite_launcher.elastic.job_faults import JobFaults
from hvdlite_launcher.elastic.membership import Membership
from hvdlite_launcher.job.supervisor import Supervisor
from hvdlite_launcher.plan.chaos_spec import parse_chaos
from hvdlite_launcher.plan.job_spec import Policy
from hvdlite_launcher.protocol.messages import Answered, Hello, HostsFound, InitDone, InitStarted
from hvdlite_launcher.status.reports import Reports
from hvdlite_launcher.store.server import Store
from hvdlite_launcher.workers.ending import Ending, Roster
from hvdlite_wire.store_requests import ANSWERS, assignment_key

START_TIMEOUT_S = 60.0
TIME_PASSES = object()  # nothing happens until the loop does not want to wait longer


class ScriptIsOverError(Exception):
    pass


class Unseen:
    """Agents and a screen that do nothing."""

    begin = set_rank = finish = say = connect_later = leave = start_worker = staticmethod(lambda *_: None)


class Played(Unseen):
    """A run of the supervisor over a script.

    In the script, a function stands for what it looks at or does at that point, and a number of seconds for these.
    ``chaos`` has faults that are caused on purpose.
    """

    def __init__(self, *script, hang_timeout_s: float = 0, chaos=(), **policy) -> None:
        self.now_s = 0.0
        self.connected: list[str] = []
        self.left: list[str] = []
        self.killed: list[str] = []
        self.started: dict[int, str] = {}
        self.variables: dict[int, dict] = {}
        self.signals: list = []
        self.said: list[str] = []
        self.ranks: dict[int, int | None] = {}
        self.finished: list[int] = []
        self.shown: list[bytes] = []
        self.observed: list[object] = []
        self.store = Store()
        self._script = list(script)
        self.ending = Ending(
            Roster(), signal_workers=self.signal, say=self.say, log=lambda _: None, grace=30, clock=lambda: self.now_s
        )
        membership = Membership(Policy(**{"min_np": 1, **policy}))
        self.faults = JobFaults(parse_chaos(chaos), membership, self.ending, store=self.store, hosts=self)
        self.job = ElasticJob(
            membership,
            ElasticHosts(self, start_timeout_s=START_TIMEOUT_S, say=self.say),
            self.ending,
            store=self.store,
            screen=self,
            hang_timeout_s=hang_timeout_s,
            post=lambda lost: self._script.insert(0, lost),
            chaos_of=self.faults.variable_of if chaos else lambda _: "",
        )
        reports = Reports(self.ending, lambda _: None, directory=None)
        observers = (self.faults, self) if chaos else (self,)
        supervisor = Supervisor(
            self.job, self.ending, reports, send_input=None, stdin=None, screen=self, observers=observers
        )
        self.outcome = None
        try:
            self.outcome = supervisor.run(self)
        except ScriptIsOverError:
            return
        assert not self._script, f"the loop ended before {self._script}"

    # the queue of events

    def get(self, timeout):
        while self._script:
            event = self._script.pop(0)
            if event is TIME_PASSES:
                assert timeout is not None, "the loop would wait for ever"
                self.now_s = round(self.now_s + timeout, 6)
                raise Empty
            if isinstance(event, float):
                self.now_s += event
            elif not callable(event):
                return event
            elif (made := event(self)) is not None:
                return made
        raise ScriptIsOverError

    # an observer

    def on_event(self, event):
        self.observed.append(event)

    def time_left_s(self):
        return None

    def time_passes(self):
        assert self.faults.given, "it has nothing to do in time"

    # the agents

    def connect_later(self, label, slots):
        self.connected.append(label)

    def label_here(self):
        return "a"

    def leave(self, label):
        self.left.append(label)

    def kill_agent(self, label):
        self.killed.append(label)

    def start_worker(self, label, worker, variables, hellos):
        assert label in hellos
        self.started[worker] = label
        self.variables[worker] = variables

    def signal(self, numbers, signum):
        self.signals.append((self.now_s, sorted(numbers), signum))

    # the screen

    def show(self, output):
        self.shown.append(output.data)

    def set_rank(self, worker, rank):
        self.ranks[worker] = rank

    def finish(self, worker):
        self.finished.append(worker)

    def say(self, text):
        self.said.append(text)

    # what a worker reads

    def answer(self, worker, after):
        value = self.store.get(assignment_key(worker, after))
        return None if value is None else ANSWERS.decode(value)

    def news(self, generation, number=0):
        value = self.store.get(b"world%d/hosts/%d" % (generation, number))
        return None if value is None else json.loads(value)


def answers(host, machine=None, slots=None):
    return Answered(host, Hello("1", slots, None, 1, machine or f"machine of {host}"))


def asks(*workers, after=0):
    return [InitStarted(worker, after) for worker in workers]


def begins(**hosts):
    """The hosts are found and answer, and as many workers as they have slots ask for the first generation."""
    size = sum(hosts.values())
    return [HostsFound(hosts), *map(answers, hosts), *asks(*range(size)), *(InitDone(n, 0) for n in range(size))]
