"""`find_cause`: which ranks the others probably wait for, and why, from what is known of each rank.

    RankStatus of all ranks ──► find_cause ──► Cause: ranks, what is with them; and those that wait for them

The kinds are tried in this order, from what is certain to what is likely: no report at all; hosts that do not reach
each other; a stopped process; one that is ending; one in an uninterruptible wait; one that cannot answer; a program
that is in no wait for others, while others wait; waits that differ, of which the rarer ones are the exception. Where
none of them is rarer, each way that ranks have taken is told. If all ranks wait in the same place, the connection
between them is the cause, or the ranks have all been asked while they were busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite_wire.worker_status import Frame, Source

from .rank_status import RankStatus

Pair = tuple[str, str]

# The kernels probe every 2 s.
_SILENT_S = 6.0
_STOPPED = ("stopped", "tracing-stop")


@dataclass(frozen=True)
class Cause:
    """``ranks`` are the cause, and ``what`` says why, as the end of a sentence about each; ``waiting`` wait for them.

    Without ``ranks`` it is not known which ranks are, or it is the network between the hosts ``cut``, and ``what`` is a
    whole sentence. ``ways``: the ranks that wait in each of several places, none of which is the exception.
    """

    ranks: tuple[RankStatus, ...]
    what: Callable[[RankStatus], str]
    waiting: tuple[RankStatus, ...] = ()
    cut: tuple[Pair, ...] = ()
    ways: tuple[tuple[RankStatus, ...], ...] = ()


def find_cause(facts: Sequence[RankStatus]) -> Cause:
    """Returns the probable cause; ``facts`` are of all ranks that run."""
    waiting = tuple(each for each in facts if each.is_waiting())
    silent = silent_between((Said(each.host, each.addresses, each.silent_s) for each in facts), _SILENT_S)
    if silent and all(each.has_come for each in facts):
        sentence = sentence_about(silent)
        return Cause((), lambda _: sentence, waiting, tuple(sorted({(min(pair), max(pair)) for pair in silent})))
    for is_cause, what in _CERTAIN:
        if found := tuple(filter(is_cause, facts)):
            return Cause(found, what, tuple(each for each in waiting if each not in found))
    busy = tuple(each for each in facts if not each.is_waiting() and each.source is not Source.NONE)
    if waiting and busy:
        return Cause(busy, where, waiting)
    if busy:
        return _unknown("no rank waits for another: all compute, or wait for something else")
    return _among_waiting(waiting)


def _among_waiting(waiting: tuple[RankStatus, ...]) -> Cause:
    """Returns the cause if all ranks that say anything wait for others."""
    if not waiting:
        return _unknown("the program says nothing of itself: it has not called hvd.init() in any worker")
    by_place: dict[object, list[RankStatus]] = {}
    for each in waiting:
        by_place.setdefault((each.waits[0].what if each.waits else "", each.place()), []).append(each)
    ways = sorted(map(tuple, by_place.values()), key=len, reverse=True)
    if len(ways) == 1:
        return _unknown(
            "all ranks wait in the same place: the connection between them is slow or broken, or they have only just "
            "come there"
        )
    others = tuple(each for each in waiting if each not in ways[0])
    if len(ways[0]) <= len(others):
        sentence = f"the ranks wait in {len(ways)} different places: they have taken different ways"
        return Cause((), lambda _: sentence, ways=tuple(ways))
    return Cause(others, where, ways[0])


def _unknown(sentence: str) -> Cause:
    return Cause((), lambda _: sentence)


def where(facts: RankStatus) -> str:
    """Returns what a rank does, as the end of a sentence about it."""
    place = facts.place()
    inner = facts.main[-1] if facts.main else None
    at = "at a place that is not known" if place is None else f"at {place}"
    if facts.waits:
        return f"waits in {facts.waits[0].what}, {at}"
    return f"is {at}" if inner is None or inner == place else f"is {at}, within {inner.function} ({inner.file})"


def _does_not_answer(facts: RankStatus) -> str:
    return (
        f"does not answer: a C extension holds the interpreter's lock, or it gets no processor time. It {where(facts)}"
    )


_CERTAIN: tuple[tuple[Callable[[RankStatus], bool], Callable[[RankStatus], str]], ...] = (
    (lambda each: not each.has_come, lambda _: "has no report: its host did not answer in time"),
    (
        lambda each: each.state in _STOPPED,
        lambda each: f"is {each.state}: its process does not run (SIGSTOP, debugger)",
    ),
    (lambda each: each.state == "zombie", lambda _: "has ended, and its process has not been collected yet"),
    (
        lambda each: each.is_ending and each.state != "disk-sleep",
        lambda each: f"is ending: its part in the job is over, and its process has not ended yet. It {where(each)}",
    ),
    (
        lambda each: each.can_answer and each.source is not Source.ANSWER and each.state == "disk-sleep",
        lambda each: (
            f"is in an uninterruptible wait of the kernel, as for a disk or a network file system. It {where(each)}"
        ),
    ),
    (lambda each: each.can_answer and each.source is not Source.ANSWER, _does_not_answer),
)


def first_difference(one: RankStatus, other: RankStatus) -> tuple[Frame, Frame] | None:
    """Returns the first lines of the user's program at which the main threads of two ranks differ; None if nowhere."""
    mine = [frame for frame in one.main if one.is_users(frame)]
    theirs = [frame for frame in other.main if other.is_users(frame)]
    return next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), None)


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
