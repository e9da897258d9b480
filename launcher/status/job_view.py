"""`JobView`: what there is to see of a job at one moment, as the live view, another process and plain lines show it.

JobFacts ──► JobView ──► live_view, on the launcher's terminal
                     ├─► JSON ──► JobView, of hvdlite-run --watch PID
                     └─► plain_line, where nothing can be drawn in place
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any

from hvdlite_wire.worker_status import Source, Wait

from ..system.terminal_text import command_in_one_line
from .job_facts import JobFacts
from .progress import HostProgress
from .rank_status import RankStatus, in_short

LATE = 0.1
"""From this `RankStatus.cost` on, a rank is said to hold up the others."""
WAITS_S = 2.0
"""A rank that has waited for so long is said to wait: shorter waits are part of any step."""


@dataclass(frozen=True)
class JobView:
    """``ranks`` are the workers that run. ``generation`` is None in a job whose ranks stay the same.

    ``hosts`` has the load of each host on which they run.
    """

    age_s: float
    command: str
    generation: int | None
    faults: int
    ranks: Sequence[RankStatus]
    hosts: Mapping[str, HostProgress]

    @classmethod
    def of(cls, facts: JobFacts, command: Sequence[str]) -> JobView:
        ranks = facts.progress.of_running()
        hosts = {each.host: facts.progress.of_host(each.host) for each in ranks}
        generation = None if facts.table is None else facts.generation
        return cls(facts.age_s, command_in_one_line(command), generation, facts.faults, ranks, hosts)

    def data(self) -> dict[str, Any]:
        return asdict(
            self,
            dict_factory=lambda pairs: {key: each.value if isinstance(each, Enum) else each for key, each in pairs},
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> JobView:
        """Returns what `data` was made of; raises KeyError, TypeError or ValueError for anything else."""
        generation = None if data["generation"] is None else int(data["generation"])
        ranks = [_made_rank(each) for each in data["ranks"]]
        hosts = {str(host): _made(HostProgress, each) for host, each in data["hosts"].items()}
        return cls(float(data["age_s"]), str(data["command"]), generation, int(data["faults"]), ranks, hosts)

    @property
    def step(self) -> int | None:
        """The steps of the rank that has taken the most; None if none has an optimizer."""
        return max((each.step for each in self.ranks if each.step is not None), default=None)

    @property
    def rate(self) -> float | None:
        """The steps per second of the rank in the middle."""
        rates = sorted(each.rate for each in self.ranks if each.rate is not None)
        return rates[len(rates) // 2] if rates else None

    @property
    def sample_rate(self) -> float | None:
        """The samples per second of all ranks together; None unless each tells of its own."""
        rates = [each.sample_rate for each in self.ranks if each.sample_rate is not None]
        return sum(rates) if rates and len(rates) == len(self.ranks) else None

    def summary(self) -> list[str]:
        """Returns in words how far the job is, the most important first."""
        kind = "worker" if any(each.rank is None for each in self.ranks) else "rank"
        words = [f"{count_of(len(self.ranks), kind)} on {count_of(len(self.hosts), 'host')}"]
        if self.step is not None:
            words.append(f"step {self.step}")
        if self.rate is not None:
            words.append(f"{in_short(self.rate)} steps/s")
        if self.sample_rate is not None:
            words.append(f"{in_short(self.sample_rate)} samples/s")
        if self.generation:
            words.append(f"generation {self.generation}")
        if self.faults:
            words.append(count_of(self.faults, "fault"))
        return words

    def plain_line(self) -> str:
        """Returns all in one line, with the rank that is worst off."""
        line = f"{age(self.age_s)}: {', '.join(self.summary())}"
        worst = max(self.ranks, key=severity, default=None)
        if worst is not None and (trouble := trouble_of(worst)):
            line += f"; {worst.name} on {worst.host} {trouble}"
        return line


def _made(kind: type[Any], data: Mapping[str, Any]) -> Any:
    # Another version may know more.
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in data.items() if name in known})


def _made_rank(data: Mapping[str, Any]) -> RankStatus:
    made: RankStatus = _made(RankStatus, data)
    return replace(made, waits=tuple(_made(Wait, each) for each in data["waits"]), source=Source(data["source"]))


def severity(rank: RankStatus) -> tuple[bool, float, float]:
    """Returns what is larger for a rank that a person wants to see sooner."""
    return rank.is_silent, rank.cost or 0.0, rank.waited_s if rank.waited_s >= WAITS_S else 0.0


def trouble_of(rank: RankStatus) -> str:
    """Returns in words what is wrong with a rank, or what it waits for; "" if nothing is."""
    if rank.is_ending:
        return "is ending"
    if rank.is_silent:
        return "silent: stopped, or an extension holds its interpreter's lock"
    if rank.cost is not None and rank.cost >= LATE:
        return f"late{rank.slow_phase and f' in {rank.slow_phase}'}: costs {rank.cost:.0%} of each step"
    if rank.waited_s >= WAITS_S:
        return f"waits {rank.waited_s:.0f} s for {rank.waits_for}"
    return ""


def count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
