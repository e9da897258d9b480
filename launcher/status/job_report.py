"""`JobReport`: which ranks the others probably wait for, and why; as text for people and as data for programs.

    RankStatus of all ranks ──► find_cause ──► Cause ──► text: the cause, who waits for it, equal stacks once, a table
                                                    └──► data: all of it, for JSON

The kinds of causes are tried in this order, from what is certain to what is likely: no report at all; hosts that do not
reach each other; a stopped process; one that is ending; one in an uninterruptible wait; one that cannot answer; a
program that is in no wait for others, while others wait; waits that differ, of which the rarer ones are the exception.
Where none of them is rarer, each way that ranks have taken is told. If all ranks wait in the same place, the connection
between them is the cause, or the ranks have all been asked while they were busy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from hvdlite_wire.worker_status import Frame, Source

from ..system.terminal_text import table
from ..workers.failure_message import ranges
from .rank_status import RankStatus, report_table, sorted_by_rank

STANDS_STILL_AFTER_S = 10.0
"""The time of one wait for others from which a job is said to stand still; a step seldom takes that long."""

# The kernels probe every 2 s.
_SILENT_S = 6.0
_MOST_NAMED = 8
_MOST_STACKS = 8
_MOST_FRAMES = 25
_MOST_OF_NCCL = 60
_PROCESS_OF_NCCL = re.compile(r"(?i)\bprocess ([0-9]{1,9})\b")

Pair = tuple[str, str]


# -- hosts that do not reach each other


class Said(NamedTuple):
    """What a rank says: where it is, its own addresses, and for how many seconds nothing has come from others."""

    host: str
    addresses: Collection[str]
    silent_s: Mapping[str, float]


def silent_between(ranks: Iterable[Said], least_s: float) -> dict[Pair, float]:
    """Returns for how long nothing has come to the first host of each pair from the second, if at least ``least_s``.

    Of several connections that counts over which nothing has come for longest. A host whose ranks have not said where
    they are is in no pair.
    """
    ranks = list(ranks)
    host_at = {address: rank.host for rank in ranks for address in rank.addresses}
    found: dict[Pair, float] = {}
    for rank in ranks:
        for address, since_s in rank.silent_s.items():
            other = host_at.get(address, rank.host)
            if since_s >= least_s and other != rank.host:
                found[rank.host, other] = max(since_s, found.get((rank.host, other), 0.0))
    return found


def sentence_about(silent: Mapping[Pair, float], most: int = 3) -> str:
    """Returns which hosts do not reach which, as a sentence about at most so many pairs of them."""
    words: dict[frozenset[str], str] = {}
    for (hears_nothing, other), since_s in sorted(silent.items()):
        one, two = sorted((hears_nothing, other))
        is_mutual = (other, hears_nothing) in silent
        who = f"{one} and {two} do not reach each other" if is_mutual else f"{other} does not reach {hears_nothing}"
        longest_s = max(since_s, silent.get((other, hears_nothing), 0.0))
        words[frozenset((one, two))] = f"{who}: nothing has come over the network between them for {longest_s:.0f} s"
    named = list(words.values())[:most]
    more = f"; and {len(words) - most} more pairs of hosts" if len(words) > most else ""
    return f"{'; '.join(named)}{more}. hvdlite-run reaches these hosts: see hvdlite-run --check"


# -- the cause


@dataclass(frozen=True)
class Cause:
    """``ranks`` are the cause, and ``what`` says why, as the end of a sentence about each; ``waiting`` wait for them.

    Without ``ranks`` it is not known which ranks are, or it is the network between the hosts ``cut``, and ``what`` is
    one whole sentence. ``ways``: the ranks that wait in each of several places, none of which is the exception.
    """

    ranks: tuple[RankStatus, ...]
    what: tuple[str, ...]
    waiting: tuple[RankStatus, ...] = ()
    cut: tuple[Pair, ...] = ()
    ways: tuple[tuple[RankStatus, ...], ...] = ()


def find_cause(facts: Sequence[RankStatus]) -> Cause:
    """Returns the probable cause; ``facts`` are of all ranks that run."""
    waiting = tuple(each for each in facts if each.is_waiting())
    silent = silent_between((Said(each.host, each.addresses, each.silent_s) for each in facts), _SILENT_S)
    if silent and all(each.has_come for each in facts):
        pairs = {(min(pair), max(pair)) for pair in silent}
        return Cause((), (sentence_about(silent),), waiting, tuple(sorted(pairs)))
    for is_cause, what in _CERTAIN:
        if found := tuple(filter(is_cause, facts)):
            return Cause(found, tuple(map(what, found)), tuple(each for each in waiting if each not in found))
    busy = tuple(each for each in facts if not each.is_waiting() and each.source is not Source.NONE)
    if waiting and busy:
        return Cause(busy, tuple(map(where, busy)), waiting)
    if waiting:
        return _among_waiting(waiting)
    if busy:
        return Cause((), ("no rank waits for another: all compute, or wait for something else",))
    return Cause((), ("the program says nothing of itself: it has not called hvd.init() in any worker",))


def _among_waiting(waiting: tuple[RankStatus, ...]) -> Cause:
    by_place: dict[object, list[RankStatus]] = {}
    for each in waiting:
        by_place.setdefault((each.waits[0].what if each.waits else "", each.place()), []).append(each)
    ways = sorted(map(tuple, by_place.values()), key=len, reverse=True)
    if len(ways) == 1:
        why = "the connection between them is slow or broken, or they have only just come there"
        return Cause((), (f"all ranks wait in the same place: {why}",))
    others = tuple(each for each in waiting if each not in ways[0])
    if len(ways[0]) <= len(others):
        sentence = f"the ranks wait in {len(ways)} different places: they have taken different ways"
        return Cause((), (sentence,), ways=tuple(ways))
    return Cause(others, tuple(map(where, others)), ways[0])


def where(facts: RankStatus) -> str:
    """Returns what a rank does, as the end of a sentence about it."""
    place = facts.place()
    inner = facts.main[-1] if facts.main else None
    at = "at a place that is not known" if place is None else f"at {place}"
    if facts.waits:
        return f"waits in {facts.waits[0].what}, {at}"
    return f"is {at}" if inner is None or inner == place else f"is {at}, within {inner.function} ({inner.file})"


def _is_silent_in(state: str | None) -> Callable[[RankStatus], bool]:
    """Returns what tells ranks that do not answer though they can, in this state of their process."""
    return lambda each: each.can_answer and each.source is not Source.ANSWER and state in (None, each.state)


_CERTAIN: tuple[tuple[Callable[[RankStatus], bool], Callable[[RankStatus], str]], ...] = (
    (lambda each: not each.has_come, lambda _: "has no report: its host did not answer in time"),
    (
        lambda each: each.state in ("stopped", "tracing-stop"),
        lambda each: f"is {each.state}: its process does not run (SIGSTOP, debugger)",
    ),
    (lambda each: each.state == "zombie", lambda _: "has ended, and its process has not been collected yet"),
    (
        lambda each: each.is_ending and each.state != "disk-sleep",
        lambda each: f"is ending: its part in the job is over, and its process has not ended yet. It {where(each)}",
    ),
    (
        _is_silent_in("disk-sleep"),
        lambda each: (
            f"is in an uninterruptible wait of the kernel, as for a disk or a network file system. It {where(each)}"
        ),
    ),
    (
        _is_silent_in(None),
        lambda each: (
            "does not answer: a C extension holds the interpreter's lock, or it gets no processor time. "
            f"It {where(each)}"
        ),
    ),
)


def first_difference(one: RankStatus, other: RankStatus) -> tuple[Frame, Frame] | None:
    """Returns the first lines of the user's program at which the main threads of two ranks differ; None if nowhere."""
    mine, theirs = ([frame for frame in each.main if each.is_users(frame)] for each in (one, other))
    return next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), None)


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


# -- the report


@dataclass(frozen=True)
class JobReport:
    """What was found out about the running ranks of a job, and which have ended. ``why`` says who asked for it."""

    number: int
    why: str
    facts: Sequence[RankStatus]
    took_s: float
    ended: Sequence[int] = ()

    def text(self) -> str:
        facts = sorted_by_rank(self.facts)
        cause = find_cause(facts)
        lines = [f"report {self.number} on {len(facts)} rank{'' if len(facts) == 1 else 's'}, {self.why}"]
        if self.ended:
            lines.append(f"  {_numbered('rank', self.ended)} {'has' if len(self.ended) == 1 else 'have'} ended")
        lines += [*_cause_lines(cause), *_stacks(facts, cause), *_nccl_lines(facts)]
        return "\n".join([*lines, *(f"  {line}" for line in table(report_table(facts)))])

    def data(self) -> dict[str, Any]:
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
                "what": list(cause.what) if facts else [],
                "waiting": [each.worker for each in cause.waiting],
                "cut": [list(pair) for pair in cause.cut],
                "ways": [[each.worker for each in way] for way in cause.ways],
            },
            "ranks": [each.report_data() for each in facts],
            "ended": list(self.ended),
        }


def _numbered(kind: str, numbers: Sequence[int]) -> str:
    return f"{kind}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _name_all(facts: Sequence[RankStatus]) -> str:
    """Returns the names of these ranks, with ranges, as in ``ranks 0-3, 5 and worker 9``."""
    ranks = sorted(each.rank for each in facts if each.rank is not None)
    others = sorted(each.worker for each in facts if each.rank is None)
    return " and ".join(_numbered(*each) for each in (("rank", ranks), ("worker", others)) if each[1])


def _cause_lines(cause: Cause) -> list[str]:
    if not cause.ranks and not cause.cut:
        return [f"  cause: not certain; {cause.what[0]}", *_ways_lines(cause)]
    lines = [f"  cause: {cause.what[0]}"]
    if cause.ranks:
        lines = [
            f"  cause: {each.name} (worker {each.worker} on {each.host}, pid {each.pid}) {what}"
            for each, what in zip(cause.ranks[:_MOST_NAMED], cause.what, strict=False)
        ]
        if more := cause.ranks[_MOST_NAMED:]:
            lines.append(f"  and {len(more)} more: {_name_all(more)}")
    if cause.waiting:
        waits = [wait for each in cause.waiting for wait in each.waits]
        longest = max(waits, key=lambda each: each.waited_s, default=None)
        waited = "" if longest is None else f", for {longest.waited_s:.0f} s, in {longest.what}"
        if len(places := _places(cause.waiting)) == 1:
            waited += f", at {places.pop()}"
        verb = "waits" if len(cause.waiting) == 1 else "wait"
        lines.append(f"  {_name_all(cause.waiting)} {verb} for others{waited}")
        if cause.ranks:
            lines += _difference_lines(cause.ranks[0], cause.waiting[0])
    return lines


def _places(facts: Sequence[RankStatus]) -> set[Frame]:
    return {place for each in facts if (place := each.place()) is not None}


def _ways_lines(cause: Cause) -> list[str]:
    """What each group of ranks waits for, where none of the groups is the exception."""
    if not cause.ways:
        return []
    lines = [f"    {_name_all(way)}, each of which {where(way[0])}" for way in cause.ways[:_MOST_NAMED]]
    if len(cause.ways) > _MOST_NAMED:
        lines.append(f"    and {_name_all([each for way in cause.ways[_MOST_NAMED:] for each in way])} elsewhere")
    return lines + _difference_lines(cause.ways[0][0], cause.ways[1][0])


def _difference_lines(one: RankStatus, other: RankStatus) -> list[str]:
    differ = first_difference(one, other)
    return [] if differ is None else [f"  first difference: {one.name} at {differ[0]}, {other.name} at {differ[1]}"]


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
        first = those[0]
        if first.is_waiting() and first not in cause.ranks:
            # What they wait for, and where, says it all. The frames are in the data.
            if first not in told:
                lines.append(f"  {_name_all(those)}, {'each of which' if len(those) > 1 else 'which'} {where(first)}")
            continue
        how = " (written on a signal, since it did not answer)" if first.is_silent else ""
        lines += [f"  main thread of {_name_all(those)}{how}:", *_frame_lines(first.main, first)]
        if first in cause.ranks[:1]:
            for thread in first.threads:
                if not thread.is_main and not thread.name.startswith("hvdlite"):
                    lines += [f"  thread {thread.name!r} of {first.name}:", *_frame_lines(thread.frames, first)]
    if len(groups) > _MOST_STACKS:
        lines.append(f"  and {len(groups) - _MOST_STACKS} more stacks: see --report-dir")
    return lines


def _nccl_lines(facts: Sequence[RankStatus]) -> list[str]:
    """What NCCL says of the job, with ranks beside the processes that it names: of the first host that has told it."""
    teller = next((each for each in facts if each.nccl), None)
    if teller is None:
        return []
    pids = Counter(each.pid for each in facts)
    name_of = {each.pid: f" ({each.name})" for each in facts if pids[each.pid] == 1}
    lines = [
        "    " + _PROCESS_OF_NCCL.sub(lambda found: found[0] + name_of.get(int(found[1]), ""), line)
        for line in teller.nccl[:_MOST_OF_NCCL]
    ]
    if len(teller.nccl) > _MOST_OF_NCCL:
        lines.append(f"    and {len(teller.nccl) - _MOST_OF_NCCL} more lines: see --report-dir")
    return [f"  NCCL says, as asked on {teller.host}:", *lines]


def _frame_lines(frames: Sequence[Frame], facts: RankStatus) -> list[str]:
    frames = [frame for frame in frames if not frame.file.startswith("<frozen importlib")]
    left_out = max(0, len(frames) - _MOST_FRAMES)
    lines = [f"    ... {left_out} frames left out"] if left_out else []
    return [*lines, *(f"    {'>' if facts.is_users(frame) else ' '} {frame}" for frame in frames[left_out:])]
