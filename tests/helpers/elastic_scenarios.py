"""Scenarios that break an elastic job: made of a seed, done by `elastic_program` and `test_elastic_scenarios`.

A scenario is a number of stages, one after the other. In each something happens at a step, and the stage is over once
it has happened and there are as many ranks again as there must be in the end. Faults are done by the program itself at
a named point; events (hosts that change, are cut off or killed) are done by the test when rank 0 prints them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Where a rank may fail in a step; those of a commit only in steps that commit.
IN_A_STEP = (
    "before backward",
    "within backward",
    "before step",
    "after step",
    "commit, before saving",
    "commit, after saving",
)  # fmt: skip
# Where it may fail in the generation that follows a loss.
IN_A_RESET = (
    "asking",
    "init, before the exchange",
    "init, after the exchange",
    "reset callback",
    "sync",
    "sync, on its way",
)  # fmt: skip
ENDS = ("SIGKILL", "SIGKILL", "SIGSEGV", "raises", "exits")


@dataclass(frozen=True)
class Fault:
    """A worker ends itself, or raises, at ``place``; whatever is None does not matter.

    ``joiner``: a worker that was not there at the beginning, before it has the state. ``after``: once that fault has
    been done.
    """

    id: str
    place: str
    how: str
    rank: int | None = None
    worker: int | None = None
    joiner: bool = False
    size: int | None = None
    stage: int | None = None
    offset: int = 0
    after: str | None = None


@dataclass(frozen=True)
class Event:
    """What the test does when rank 0 is at this step: ``do`` is its method, ``hosts`` and ``host`` its arguments."""

    id: str
    stage: int
    offset: int
    do: str
    hosts: tuple[int, ...] = ()
    host: int = 0


@dataclass(frozen=True)
class Stage:
    """At least so many steps, until there are ``size`` ranks and the files ``needs``."""

    steps: int
    size: int
    needs: tuple[str, ...] = ()


@dataclass
class Scenario:
    """``hosts`` has the slots of each host; ``exit_code`` and ``says`` (in stderr) what the job's end must be."""

    seed: int
    name: str
    hosts: list[int]
    ranks: int
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    commit_every: int = 3
    stages: list[Stage] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    exit_code: int = 0
    says: str = ""
    shard: str | None = None

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        faults = [
            f"{'joiner' if each.joiner else f'rank {each.rank}' if each.worker is None else f'worker {each.worker}'}"
            f" {each.how} ({each.place})"
            for each in self.faults
        ]
        return f"{self.seed:3} {self.name}: {self.ranks} ranks; {'; '.join([*faults, *(e.do for e in self.events)])}"


class _Making:
    """A scenario that is being made: each method adds a stage in which something happens."""

    def __init__(self, seed: int, name: str, dice: random.Random, hosts: Sequence[int]) -> None:
        self.dice = dice
        self.scenario = Scenario(seed, name, list(hosts), sum(hosts))
        self.scenario.commit_every = dice.randrange(1, 5)
        if dice.random() < 0.5:
            self.scenario.env["HVDLITE_FUSION_THRESHOLD"] = "0"  # a bucket for each gradient
        self.now = list(hosts)  # the slots of each host that are used
        self.comes_back = False  # whether a lost host gets workers again

    @property
    def size(self) -> int:
        return sum(self.now)

    def fault(self, place: str, how: str | None = None, **where: object) -> Fault:
        number = str(len(self.scenario.faults))
        fault = Fault(number, place, how or self.dice.choice(ENDS), **where)  # type: ignore[arg-type]
        self.scenario.faults.append(fault)
        return fault

    def event(self, do: str, **arguments: object) -> Event:
        event = Event(
            str(len(self.scenario.events)), len(self.scenario.stages), self.dice.randrange(1, 6), do, **arguments
        )  # type: ignore[arg-type]
        self.scenario.events.append(event)
        return event

    def stage(self, *happens: Fault | Event) -> None:
        needs = tuple(f"{'fired' if isinstance(each, Fault) else 'done'}.{each.id}" for each in happens)
        self.scenario.stages.append(Stage(self.dice.randrange(7, 15), self.size, needs))

    def loss(self, place: str | None = None, how: str | None = None, **where: object) -> Fault:
        """A rank that is lost in this stage."""
        where = {"rank": self.dice.randrange(self.size), "size": self.size, **where}
        return self.fault(
            place or self.dice.choice(IN_A_STEP), how, **where,
            stage=len(self.scenario.stages), offset=self.dice.randrange(6),
        )  # fmt: skip

    # ------------------------------------------------------------- what happens

    def one_is_lost(self) -> None:
        self.stage(self.loss())

    def two_are_lost_at_once(self) -> None:
        one, other = self.dice.sample(range(self.size), 2)
        first = self.loss(rank=one)
        second = dataclasses.replace(
            first, id=str(len(self.scenario.faults)), rank=other, place=self.dice.choice(IN_A_STEP)
        )
        self.scenario.faults.append(second)
        self.stage(first, second)

    def another_is_lost_in_the_reset(self) -> None:
        first = self.loss()
        place = self.dice.choice(IN_A_RESET)
        assert first.rank is not None
        # A rank of the generation that is lost, where it asks for the next; otherwise of the next.
        others = (
            [rank for rank in range(self.size) if rank != first.rank] if place == "asking" else range(self.size - 1)
        )
        self.stage(first, self.fault(place, rank=self.dice.choice(others), after=first.id))

    def a_joiner_is_lost(self) -> None:
        first = self.loss()
        # Callbacks are for those that have been ranks before.
        place = self.dice.choice(("start", *(place for place in IN_A_RESET if place != "reset callback")))
        self.stage(first, self.fault(place, joiner=True, after=first.id))

    def a_rank_raises_an_internal_error(self) -> None:
        self.stage(self.loss(self.dice.choice(("before backward", "before step", "after step")), "internal error"))

    def slots_change(self) -> None:
        choices = [slots for slots in (1, 2, 3, 4) if abs(slots - self.now[0]) == 1]
        self._hosts_become([self.dice.choice(choices)])

    def slots_go_and_come_again(self) -> None:
        before = list(self.now)
        self._hosts_become([before[0] - 1 if before[0] > 1 else 2])
        self._hosts_become(before)

    def slots_go_with_a_loss(self) -> None:
        self.now = [self.now[0] - 1]
        happens = self.event("hosts_become", hosts=tuple(self.now))
        # Rank 0 comes to this step, whether or not it is that of the beginning.
        lost = self.loss(self.dice.choice(IN_A_STEP[:4]), rank=0, size=None)
        self.stage(happens, lost)

    def discovery_flaps(self) -> None:
        less = max(1, self.now[0] - 1)
        self.stage(self.event("discovery_flaps", hosts=(less if less != self.now[0] else 2,)), self.loss())

    def discovery_fails(self) -> None:
        self.stage(self.event("discovery_fails"), self.loss())

    def _hosts_become(self, hosts: Sequence[int]) -> None:
        self.now = list(hosts)
        self.stage(self.event("hosts_become", hosts=tuple(self.now)))

    # several hosts

    def a_host_goes_and_comes_again(self) -> None:
        before, gone = list(self.now), self.dice.choice(self._others())
        self._hosts_become([0 if host == gone else slots for host, slots in enumerate(before)])
        self._hosts_become(before)

    def a_host_is_lost(self, do: str) -> None:
        gone = self.dice.choice(self._others())
        if not self.comes_back:
            self.now[gone] = 0
        self.stage(self.event(do, host=gone))

    def link_is_cut(self) -> None:
        self.a_host_is_lost("link_is_cut_for_a_while" if self.comes_back else "link_is_cut")

    def processes_of_a_host_are_killed(self) -> None:
        self.a_host_is_lost("kill_all_on_a_host")

    def an_agent_is_killed(self) -> None:
        self.a_host_is_lost("kill_an_agent")

    def an_ssh_client_is_killed(self) -> None:
        self.a_host_is_lost("kill_an_ssh_client")

    def a_host_loses_power(self) -> None:
        gone = self.dice.choice(self._others())
        self.now[gone] = 0
        self.stage(self.event("power_off", host=gone))

    def _others(self) -> list[int]:
        """The hosts that may be lost: one is left."""
        there = [host for host, slots in enumerate(self.now) if slots]
        return there if len(there) > 1 else []


Happening = Callable[[_Making], None]

_ON_ANY: Sequence[Happening] = (
    _Making.one_is_lost,
    _Making.two_are_lost_at_once,
    _Making.another_is_lost_in_the_reset,
    _Making.a_joiner_is_lost,
    _Making.a_rank_raises_an_internal_error,
)
_ON_ONE_HOST: Sequence[Happening] = (
    *_ON_ANY,
    _Making.slots_change,
    _Making.slots_go_and_come_again,
    _Making.slots_go_with_a_loss,
    _Making.discovery_flaps,
    _Making.discovery_fails,
)
_ON_SEVERAL: Sequence[Happening] = (
    _Making.link_is_cut,
    _Making.processes_of_a_host_are_killed,
    _Making.a_host_loses_power,
    _Making.a_host_goes_and_comes_again,
    _Making.an_agent_is_killed,
    _Making.an_ssh_client_is_killed,
    _Making.one_is_lost,
    _Making.another_is_lost_in_the_reset,
    _Making.a_joiner_is_lost,
)
_LEAST_RANKS = {
    _Making.two_are_lost_at_once: 3,
    _Making.another_is_lost_in_the_reset: 3,
    _Making.slots_go_with_a_loss: 3,
    _Making.one_is_lost: 2,
    _Making.a_joiner_is_lost: 2,
    _Making.a_rank_raises_an_internal_error: 2,
    _Making.discovery_flaps: 3,  # one goes with the slot, and one is lost
    _Making.discovery_fails: 2,
}
ONE_HOST_KINDS = len(_ON_ONE_HOST) + 4
SEVERAL_HOSTS_KINDS = len(_ON_SEVERAL) + 1


def on_one_host(seed: int) -> Scenario:
    """A scenario of one host; as many seeds as `ONE_HOST_KINDS` in a row have every kind."""
    dice = random.Random(f"one host {seed}")
    kind = seed % ONE_HOST_KINDS
    if kind < len(_ON_ONE_HOST):
        return _replaced(seed, dice, _ON_ONE_HOST[kind])
    return (_shrinks, _all_are_lost, _reset_limit, _has_a_spare)[kind - len(_ON_ONE_HOST)](seed, dice)


def on_several_hosts(seed: int) -> Scenario:
    """A scenario of two or three hosts; as many seeds as `SEVERAL_HOSTS_KINDS` in a row have every kind."""
    dice = random.Random(f"several hosts {seed}")
    kind = seed % SEVERAL_HOSTS_KINDS
    hosts = dice.choice(([1, 1], [2, 1], [1, 2], [1, 1, 1], [2, 1, 1], [2, 2]))
    if kind == len(_ON_SEVERAL):
        return _blacklists(seed, dice, hosts)
    first = _ON_SEVERAL[kind]
    if sum(hosts) < _LEAST_RANKS.get(first, 1):
        hosts = [2, 1]
    making = _Making(seed, f"{_name(first)} of {len(hosts)} hosts", dice, hosts)
    making.comes_back = dice.random() < 0.5
    making.scenario.flags = ["--min-np", "1", "--max-restarts", "30"]
    if making.comes_back:
        making.scenario.flags += ["--blacklist-cooldown-range", "1", "2"]
    _add(making, [first, *dice.choices(_ON_SEVERAL, k=dice.randrange(2))])
    return making.scenario


def _replaced(seed: int, dice: random.Random, first: Happening) -> Scenario:
    least = _LEAST_RANKS.get(first, 2)
    making = _Making(seed, _name(first), dice, [dice.choice([each for each in (2, 2, 3, 3, 4) if each >= least])])
    happens = [first, *dice.choices(_ON_ONE_HOST, k=dice.randrange(2))]
    changes = {_Making.slots_change, _Making.slots_go_and_come_again, _Making.slots_go_with_a_loss}
    waits = not changes.intersection(happens) and _Making.discovery_flaps not in happens and dice.random() < 0.25
    # Sometimes the job waits for each replacement.
    making.scenario.flags = ["--min-np", str(making.size if waits else 1), "--max-restarts", "30"]
    _add(making, happens)
    return making.scenario


def _add(making: _Making, happens: Sequence[Happening]) -> None:
    for each in happens:
        hosts_left = len([slots for slots in making.now if slots])
        needs_hosts = each in _ON_SEVERAL[:6] and hosts_left < 2
        if making.size >= _LEAST_RANKS.get(each, 1) and not needs_hosts:
            each(making)
    making.stage()


def _shrinks(seed: int, dice: random.Random) -> Scenario:
    """Nobody takes the place of a lost rank."""
    making = _Making(seed, "shrinks", dice, [dice.choice((3, 4))])
    making.scenario.flags = ["--min-np", "1", "--on-failure", "shrink"]
    for _ in range(dice.randrange(1, making.size)):
        lost = making.loss()
        making.now[0] -= 1
        making.stage(lost)
    making.stage()
    return making.scenario


def _all_are_lost(seed: int, dice: random.Random) -> Scenario:
    making = _Making(seed, "all are lost", dice, [dice.choice((2, 3))])
    making.scenario.flags = ["--min-np", "1", "--on-failure", "shrink"]
    place = dice.choice(IN_A_STEP)
    lost = [making.loss(place, "SIGKILL", rank=None, worker=worker, size=None) for worker in range(making.size)]
    making.stage(*lost)
    making.scenario.exit_code = 137
    making.scenario.says = "killed by SIGKILL"
    return making.scenario


def _reset_limit(seed: int, dice: random.Random) -> Scenario:
    """Two losses are two resets at least; more where a replacement comes later."""
    making = _Making(seed, "reset limit", dice, [dice.choice((2, 3))])
    making.scenario.flags = ["--min-np", "1", "--reset-limit", "1"]
    making.one_is_lost()
    making.one_is_lost()
    making.scenario.exit_code = 1
    making.scenario.says = "--reset-limit 1: the ranks have changed more often"
    return making.scenario


def _has_a_spare(seed: int, dice: random.Random) -> Scenario:
    making = _Making(seed, "has a spare", dice, [dice.choice((2, 3))])
    making.scenario.hosts = [making.size + 1]
    making.scenario.flags = ["--min-np", "1", "--max-np", str(making.size), "--spares", "1", "--max-restarts", "30"]
    _add(making, dice.choices((_Making.one_is_lost, _Making.a_rank_raises_an_internal_error), k=2))
    return making.scenario


def _blacklists(seed: int, dice: random.Random, hosts: Sequence[int]) -> Scenario:
    """A failure ends all workers of its host, which come again after its cooldown."""
    making = _Making(seed, f"blacklists one of {len(hosts)} hosts", dice, hosts)
    cooldown = ["--blacklist-cooldown-range", "1", "2"]
    making.scenario.flags = ["--min-np", "1", "--on-failure", "blacklist", *cooldown, "--max-restarts", "30"]
    for _ in range(dice.randrange(1, 3)):
        making.one_is_lost()
    making.stage()
    return making.scenario


def _name(happening: Happening) -> str:
    return happening.__name__.replace("_", " ")
