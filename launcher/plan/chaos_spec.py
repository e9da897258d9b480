"""The faults of ``--chaos``: the grammar of SPEC, and the faults that each worker gets.

    kill@vote:worker=1:step=7                                  one fault, at a point of a worker's step
    seed=3,every=20,faults=kill+segv,points=vote+voted,count=10   drawn from a seed, about one each 20 steps
    seed=3,every=30s,faults=kill+stop                          the same by the clock

`cli.elastic_flags` parses it, and `elastic.job_faults` carries it out. A worker finds its own faults in HVDLITE_CHAOS,
as `hvdlite_wire.job_contract` writes them: ``kill@vote:7,segv@voted:9``. Nothing here has a clock or a state: equal
seeds give equal faults.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdlite_wire.job_contract import KINDS, POINTS, WorkerFault

from ..errors import UsageError

BY_CLOCK = ("kill", "segv", "stop", "agent", "host")
"""The kinds that hvdlite-run can cause from outside of a worker."""

# Stopped and hanging workers, and lost hosts, are asked for by name. So are points that not every job passes.
_USUAL_KINDS = ("kill", "segv", "exception")
_USUAL_KINDS_BY_CLOCK = ("kill", "segv")
_USUAL_POINTS = ("begin", "backward", "synchronize", "vote", "voted", "stepped")
OF_A_HOST = ("agent", "host", "link")
"""The kinds by which a host may be lost."""

_LIKE = "one fault, such as kill@vote:worker=1:step=7, or seeded ones, such as seed=3,every=20,faults=kill+segv,count=9"
_NUMBER = re.compile(r"[0-9]{1,9}")
_EVERY = re.compile(r"([0-9]{1,9})|([0-9]{1,6}(?:\.[0-9]{1,3})?)s")


@dataclass(frozen=True)
class ChaosFault:
    """One fault of one worker: when it passes ``point`` for the first time in or after its ``step``-th step.

    A worker counts its own optimizer steps, from 0.
    """

    kind: str
    point: str
    worker: int
    step: int = 0
    is_seeded: bool = False

    def __str__(self) -> str:
        return f"{self.kind}@{self.point}:worker={self.worker}:step={self.step}"

    @property
    def of_worker(self) -> WorkerFault:
        return WorkerFault(self.kind, self.point, self.step)


@dataclass(frozen=True)
class ClockFault:
    """A fault by the clock: ``at_s`` after the first ranks are connected. ``share`` of 0 to 1 draws the worker."""

    kind: str
    at_s: float
    share: float


@dataclass(frozen=True)
class Seeded:
    """Faults drawn from a seed: about one each ``every_steps`` steps, or each ``every_s`` seconds.

    ``count`` is the most that happen, None for any number.
    """

    seed: int
    every_steps: int | None
    every_s: float | None
    kinds: tuple[str, ...]
    points: tuple[str, ...]
    count: int | None

    def fault_of(self, worker: int, ranks: int) -> ChaosFault | None:
        """Returns the fault by steps of the worker with this number, in a job that begins with ``ranks``.

        The first workers have turns, one each ``every_steps``; one that takes the place of another has the last.
        """
        if self.every_steps is None:
            return None
        is_first = worker < ranks
        # A worker that fails in hvd.init() before there are ranks ends the job.
        points = [point for point in self.points if not (is_first and point == "init")]
        if not points:
            return None
        turns = list(range(ranks))
        random.Random(f"{self.seed}").shuffle(turns)
        draw = random.Random(f"{self.seed}/{worker}")
        kind, point = draw.choice(self.kinds), draw.choice(points)
        step = (turns[worker] if is_first else ranks) * self.every_steps
        step += draw.randint(self.every_steps // 2, self.every_steps - 1)
        return ChaosFault(kind, point, worker, 0 if point == "init" else step, is_seeded=True)

    def by_clock(self, number: int) -> ClockFault:
        """Returns the ``number``-th fault by the clock, from 0."""
        assert self.every_s is not None, "the caller has asked"
        draw = random.Random(f"{self.seed}/{number}")
        return ClockFault(draw.choice(self.kinds), self.every_s * (number + draw.uniform(0.5, 1)), draw.random())


@dataclass(frozen=True)
class ChaosSpec:
    """All faults of a job. The report on them is written to ``report_file``, if that is not None."""

    faults: tuple[ChaosFault, ...] = ()
    seeded: Seeded | None = None
    report_file: str | None = None

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}.union(() if self.seeded is None else self.seeded.kinds)

    def of_worker(self, worker: int, ranks: int) -> tuple[ChaosFault, ...]:
        """Returns the faults of one worker, in a job that begins with ``ranks``."""
        drawn = None if self.seeded is None else self.seeded.fault_of(worker, ranks)
        own = tuple(fault for fault in self.faults if fault.worker == worker)
        return own if drawn is None else (*own, drawn)


def parse_chaos(texts: Sequence[str], report_file: str | None = None) -> ChaosSpec:
    """Parses the values of all ``--chaos`` flags; raises `UsageError` that names what is wrong, and what is allowed."""
    faults, seeded = [], []
    for text in texts:
        try:
            if "@" in text:
                faults.append(_fault(text))
            else:
                seeded.append(_seeded(text))
        except UsageError as error:
            raise UsageError(f"--chaos {text!r}: {error}") from None
    if len(seeded) > 1:
        raise UsageError("--chaos: seed= may be given once, since a worker gets one fault of it: join them into one")
    return ChaosSpec(tuple(faults), seeded[0] if seeded else None, report_file)


def _fault(text: str) -> ChaosFault:
    what, *items = text.split(":")
    kind, _, point = what.partition("@")
    _one_of(kind, KINDS, "a kind of fault")
    _one_of(point, POINTS, "a point")
    values = _values(items, ("worker", "step"))
    if "worker" not in values:
        raise UsageError(f"which worker? Say {what}:worker=N, or draw it: {_LIKE}")
    if point == "init" and "step" in values:
        raise UsageError("a worker has taken no step in its first hvd.init(): leave out step=")
    return ChaosFault(kind, point, _number(values, "worker"), _number(values, "step") if "step" in values else 0)


def _seeded(text: str) -> Seeded:
    values = _values(text.split(","), ("seed", "every", "faults", "points", "count"))
    if missing := {"seed", "every"} - values.keys():
        raise UsageError(f"{' and '.join(f'{name}=' for name in sorted(missing))} missing; it is {_LIKE}")
    every = _EVERY.fullmatch(values["every"])
    if every is None or not float(every[1] or every[2]):
        raise UsageError(f"every={values['every']} is neither a number of steps, such as 20, nor of seconds, as in 30s")
    count = _number(values, "count") if "count" in values else None
    if count == 0:
        raise UsageError("count=0 means no fault at all: leave --chaos out")
    kinds = _names(values, "faults", _USUAL_KINDS if every[1] else _USUAL_KINDS_BY_CLOCK, KINDS, "a kind of fault")
    points = _names(values, "points", _USUAL_POINTS, POINTS, "a point")
    if not every[1]:
        if "points" in values:
            raise UsageError(f"a fault by the clock happens at no point: leave out points=, or say every={every[2]}")
        if inside := [kind for kind in kinds if kind not in BY_CLOCK]:
            raise UsageError(
                f"{inside[0]} happens within a worker, at a point of its step: say every=N without s, or choose from "
                f"{', '.join(BY_CLOCK)}"
            )
    return Seeded(
        _number(values, "seed"),
        int(every[1]) if every[1] else None,
        None if every[1] else float(every[2]),
        kinds,
        points,
        count,
    )


def _values(items: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise UsageError(f"{item!r} is not NAME=VALUE; it is {_LIKE}")
        _one_of(name, known, "known here")
        if name in values:
            raise UsageError(f"{name}= is given twice")
        values[name] = value
    return values


def _names(
    values: dict[str, str], name: str, usual: Sequence[str], known: Collection[str], what: str
) -> tuple[str, ...]:
    if name not in values:
        return tuple(usual)
    names = tuple(dict.fromkeys(values[name].split("+")))
    for each in names:
        _one_of(each, known, what)
    return names


def _one_of(name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        raise UsageError(f"{name!r} is not {what}: choose from {', '.join(known)}")


def _number(values: dict[str, str], name: str) -> int:
    if not _NUMBER.fullmatch(values[name]):
        raise UsageError(f"{name}={values[name]} is not a whole number, such as 7")
    return int(values[name])


def require_goes_on(spec: ChaosSpec, *, start: int, least: int, shrinks: bool, hosts: int | None) -> None:
    """Raises `UsageError` for faults after which the job cannot go on.

    The job begins with ``start`` workers and needs ``least``, never replaces one if it ``shrinks``, and runs on
    ``hosts``, None if they are not known yet.
    """
    of_host = sorted(spec.kinds.intersection(OF_A_HOST))
    if of_host and hosts == 1:
        does = "cuts the network to other hosts" if of_host[0] == "link" else "ends all workers of a host"
        raise UsageError(
            f"--chaos: {of_host[0]} {does}, and the job has one host: name more with -H, or leave {of_host[0]} out"
        )
    if spec.seeded is None:
        return
    if start < 2:
        raise UsageError("--chaos: seeded faults leave one rank at least: start with -np 2 or more")
    if shrinks and (spec.seeded.count or 1) > start - least:
        raise UsageError(
            f"--chaos: with --on-failure shrink -np {start} may lose {start - least} workers until there are --min-np "
            f"{least}, and count={spec.seeded.count or 1} is more: say a smaller --min-np, or --on-failure replace"
        )
