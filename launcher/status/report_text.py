"""The report as text for people and as data for programs.

JobReport ──► text: the cause, who waits for it, equal stacks once, a line for each group that waits, a table of ranks
       └─► data: all of it, for JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hvdlite_wire.worker_status import Frame, Source

from ..system.terminal_text import table
from ..workers.failure_message import ranges
from .causes import Cause, find_cause, first_difference, where
from .rank_status import RankStatus, sorted_by_rank

STANDS_STILL_AFTER_S = 10.0
"""The time of one wait for others from which a job is said to stand still; a step seldom takes that long."""

_MOST_NAMED = 8
_MOST_STACKS = 8
_MOST_FRAMES = 25


@dataclass(frozen=True)
class JobReport:
    """What was found out about the running ranks of a job, and which have ended. ``why`` says who asked for it."""

    number: int
    why: str
    facts: Sequence[RankStatus]
    took_s: float
    ended: Sequence[int] = ()

    def text(self) -> str:
        """Returns it as lines for a terminal or a file."""
        facts = sorted_by_rank(self.facts)
        cause = find_cause(facts)
        count = "1 rank" if len(facts) == 1 else f"{len(facts)} ranks"
        lines = [
            f"report {self.number} on {count}, {self.why}",
            *_ended_lines(self.ended),
            *_cause_lines(cause),
            *_stacks(facts, cause),
            *(f"  {line}" for line in table([_HEAD, *map(_row, facts)])),
        ]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        facts = sorted_by_rank(self.facts)
        cause = find_cause(facts)
        return {
            "report": self.number,
            "why": self.why,
            "verdict": verdict(facts).value,
            "took_s": round(self.took_s, 3),
            "cause": {
                "workers": [each.worker for each in cause.ranks],
                "ranks": [each.rank for each in cause.ranks],
                "what": [cause.what(each) for each in cause.ranks] or [cause.what(facts[0])] if facts else [],
                "waiting": [each.worker for each in cause.waiting],
                "cut": [list(pair) for pair in cause.cut],
                "ways": [[each.worker for each in way] for way in cause.ways],
            },
            "ranks": [each.report_data() for each in facts],
            "ended": list(self.ended),
        }


class Verdict(Enum):
    """Whether a job goes on, as `--diagnose` says it."""

    GOES_ON = "goes on"
    STANDS_STILL = "stands still"
    NOT_KNOWN = "not known"


def verdict(facts: Sequence[RankStatus]) -> Verdict:
    """Judges a job: it stands still if a rank cannot run, or has waited for others for `STANDS_STILL_AFTER_S`."""
    waited_s = max((wait.waited_s for each in facts for wait in each.waits), default=0.0)
    if waited_s >= STANDS_STILL_AFTER_S or any(not each.can_run() for each in facts):
        return Verdict.STANDS_STILL
    # Until a rank has called hvd.init(), nothing is known of what it waits for.
    if not any(each.source is Source.ANSWER for each in facts):
        return Verdict.NOT_KNOWN
    # Nor is it known for how long ranks wait in torch.distributed's own functions and in DDP.
    if any(each.is_waiting() for each in facts) and not any(each.waits or each.optimizers for each in facts):
        return Verdict.NOT_KNOWN
    return Verdict.GOES_ON


def name_all(facts: Sequence[RankStatus]) -> str:
    """Returns the names of these ranks, with ranges, as in ``ranks 0-3, 5 and worker 9``."""
    ranks = sorted(each.rank for each in facts if each.rank is not None)
    others = sorted(each.worker for each in facts if each.rank is None)
    named = [
        f"{kind}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
        for kind, numbers in (("rank", ranks), ("worker", others))
        if numbers
    ]
    return " and ".join(named)


def _ended_lines(ranks: Sequence[int]) -> list[str]:
    if not ranks:
        return []
    return [f"  rank {ranks[0]} has ended" if len(ranks) == 1 else f"  ranks {ranges(ranks)} have ended"]


def _cause_lines(cause: Cause) -> list[str]:
    if cause.cut:
        lines = [f"  cause: {cause.what(_NOBODY)}"]
    elif not cause.ranks:
        return [f"  cause: not certain; {cause.what(_NOBODY)}", *_ways_lines(cause)]
    else:
        lines = _ranks_lines(cause)
    if cause.waiting:
        longest = max(
            (wait for each in cause.waiting for wait in each.waits), key=lambda each: each.waited_s, default=None
        )
        verb = "waits" if len(cause.waiting) == 1 else "wait"
        places = _places(cause.waiting)
        waited = "" if longest is None else f", for {longest.waited_s:.0f} s, in {longest.what}"
        if len(places) == 1:
            waited += f", at {places.pop()}"
        lines.append(f"  {name_all(cause.waiting)} {verb} for others{waited}")
        if cause.ranks:
            lines += _difference_lines(cause.ranks[0], cause.waiting[0])
    return lines


def _places(facts: Sequence[RankStatus]) -> set[Frame]:
    return {place for each in facts if (place := each.place()) is not None}


def _ways_lines(cause: Cause) -> list[str]:
    """What each group of ranks waits for, where none of the groups is the exception."""
    lines = [f"    {name_all(way)}, each of which {where(way[0])}" for way in cause.ways[:_MOST_NAMED]]
    if len(cause.ways) > _MOST_NAMED:
        lines.append(f"    and {name_all([each for way in cause.ways[_MOST_NAMED:] for each in way])} elsewhere")
    return lines + (_difference_lines(cause.ways[0][0], cause.ways[1][0]) if cause.ways else [])


def _difference_lines(one: RankStatus, other: RankStatus) -> list[str]:
    differ = first_difference(one, other)
    return [] if differ is None else [f"  first difference: {one.name} at {differ[0]}, {other.name} at {differ[1]}"]


def _ranks_lines(cause: Cause) -> list[str]:
    lines = [
        f"  cause: {each.name} (worker {each.worker} on {each.host}, pid {each.pid}) {cause.what(each)}"
        for each in cause.ranks[:_MOST_NAMED]
    ]
    if len(cause.ranks) > _MOST_NAMED:
        lines.append(f"  and {len(cause.ranks) - _MOST_NAMED} more: {name_all(cause.ranks[_MOST_NAMED:])}")
    return lines


def _stacks(facts: Sequence[RankStatus], cause: Cause) -> list[str]:
    """The main threads' stacks, equal ones once; those of the cause first, with all of its threads.

    Ranks that wait for others are a line.
    """
    groups: dict[tuple[object, ...], list[RankStatus]] = {}
    for each in sorted(facts, key=lambda each: each not in cause.ranks):
        if each.main:
            # Within the same line of the program, ranks that wait differ by chance in how deep in a library they are.
            own = tuple(frame for frame in each.main if each.is_users(frame))
            groups.setdefault((own or each.main, each.is_waiting(), each.source), []).append(each)
    told = [*(each for way in cause.ways for each in way), *(cause.waiting if len(_places(cause.waiting)) == 1 else ())]
    lines: list[str] = []
    for those in list(groups.values())[:_MOST_STACKS]:
        if those[0].is_waiting() and those[0] not in cause.ranks:
            # What they wait for, and where, says it all. The frames are in the data.
            if those[0] not in told:
                lines.append(f"  {name_all(those)}, {'each of which' if len(those) > 1 else 'which'} {where(those[0])}")
            continue
        frames = those[0].main
        how = " (written on a signal, since it did not answer)" if those[0].is_silent else ""
        lines += [f"  main thread of {name_all(those)}{how}:", *_frame_lines(frames, those[0])]
        if those[0] in cause.ranks[:1]:
            for thread in those[0].threads:
                if not thread.is_main and not thread.name.startswith("hvdlite"):
                    lines += [f"  thread {thread.name!r} of {those[0].name}:", *_frame_lines(thread.frames, those[0])]
    if len(groups) > _MOST_STACKS:
        lines.append(f"  and {len(groups) - _MOST_STACKS} more stacks: see --report-dir")
    return lines


def _frame_lines(frames: Sequence[Frame], facts: RankStatus) -> list[str]:
    frames = [frame for frame in frames if not frame.file.startswith("<frozen importlib")]
    left_out = len(frames) - _MOST_FRAMES
    more = [f"    ... {left_out} frames left out"] if left_out > 0 else []
    shown = frames[max(0, left_out) :]
    return [*more, *(f"    {'>' if facts.is_users(frame) else ' '} {frame}" for frame in shown)]


_HEAD = ("rank", "worker", "host", "pid", "state", "cpu s", "MiB", "step", "buckets", "waits for")


def _row(facts: RankStatus) -> tuple[str, ...]:
    own = next((each for each in facts.processes if each.pid == facts.pid), None)
    optimizer = facts.optimizers[0] if facts.optimizers else None
    buckets = "–" if optimizer is None else f"{optimizer.sent} of {optimizer.buckets}"
    waits = facts.waits[0].what if facts.waits else "–"
    if optimizer is not None and optimizer.missing and not facts.waits:
        waits = f"no gradient yet: {', '.join(optimizer.missing)}"
    return (
        "–" if facts.rank is None else str(facts.rank),
        str(facts.worker),
        facts.host,
        str(facts.pid),
        facts.state or "–",
        "–" if own is None else f"{own.cpu_s:.1f}",
        "–" if own is None else f"{own.memory / 2**20:.0f}",
        "–" if optimizer is None else str(optimizer.step),
        buckets,
        waits,
    )


_NOBODY = RankStatus(worker=-1)
