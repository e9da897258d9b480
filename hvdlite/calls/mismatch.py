"""
Words the errors about ranks that disagree: which rank did what, in Horovod's words where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MOST_NAMED, list_names
from .operation import ALLREDUCE, REDUCESCATTER, Kind

Hosts = Sequence[str] | Mapping[int, str]
"""The host of each rank, by its global number."""


# The usual cause when ranks call different functions.
CAUSES = (
    "Most often a collective is called under `if hvd.rank() == 0:`, "
    "or ranks have different numbers of batches (see hvd.join())"
)
_SMALLER_BATCH = (
    "Most often the last batch is smaller on some ranks: train with DataLoader(drop_last=True); for a metric, sum it "
    "up on each rank first, and combine the sums with op=hvd.Sum"
)


def first_difference(values: Sequence[Mapping[str, Any]]) -> str | None:
    """The first key, in the ranks' own order, whose values differ between the ranks; None if none do."""
    keys = dict.fromkeys(key for same in values for key in same)
    # By repr, since nan is not equal to itself.
    return next((key for key in keys if len({repr(same.get(key)) for same in values}) > 1), None)


def words_of_difference(kind: Kind, what: str, asked: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> str:
    """The message for an operation that ranks have requested with different values."""
    key = first_difference(list(asked.values()))
    assert key is not None, "called only where they differ"
    if key == "tensors":
        return _words_of_tensors(what, {rank: same[key] for rank, same in sorted(asked.items())}, hosts)
    values = {rank: _words(same.get(key)) for rank, same in sorted(asked.items())}
    one, another = list(dict.fromkeys(values.values()))[:2]
    if kind.is_compared:
        # These kinds give all ranks the same start; Horovod has no words for them.
        places = {value: next(rank for rank in values if values[rank] == value) for value in (one, another)}
        where = " and ".join(f"{value} on {name_ranks([rank], hosts)}" for value, rank in places.items())
        return f"{what}: {key} is {where}: every rank must pass the same value"
    operation = kind.name.upper()
    counts = {rank: len(same[key]) for rank, same in asked.items() if kind.is_grouped and key in same}
    if len(set(counts.values())) > 1:
        numbers = {rank: f"{count} tensors" for rank, count in sorted(counts.items())}
        return f"Mismatched numbers of tensors in {operation}. ({what}: {by_value(numbers, hosts)})"
    first = {
        "dtype": f"Mismatched data types: One rank had type {one}, but another rank had type {another}.",
        "shape": f"Mismatched {operation} tensor shapes: One rank sent a tensor of shape {one}, but another rank sent "
        f"a tensor of shape {another}.",
        "device": f"Mismatched {operation} CPU/GPU device selection: One rank has its tensor on {one}, but another "
        f"rank on {another}.",
        "op": f"Mismatched reduction operation: One rank asked for {one}, but another rank for {another}.",
        "root_rank": f"Mismatched {operation} root ranks: One rank named rank {one}, but another rank {another}.",
        **dict.fromkeys(
            ("prescale_factor", "postscale_factor"),
            f"Mismatched prescale and/or postscale factors: One rank had {key}={one}, but another rank {another}.",
        ),
    }.get(key, f"Mismatched {key.replace('_', ' ')}: One rank had {one}, but another rank had {another}.")
    cause = _cause(kind, what, key)
    return f"{kind.error_prefix}{first} ({what}: {by_value(values, hosts)}){cause and f' {cause}'}"


def _cause(kind: Kind, what: str, key: str) -> str:
    """The most common cause of such a difference; empty where there is none."""
    if what == kind.name and key in ("dtype", "shape", "op", "root_rank"):
        # Calls without a name pair up by order, so a rank may be one call ahead of another.
        return CAUSES
    return _SMALLER_BATCH if key == "shape" and kind.single in (ALLREDUCE, REDUCESCATTER) else ""


def words_of_callers(what: str, names: Mapping[int, str], hosts: Hosts) -> str:
    """The message for several threads, by rank, that call something that pairs up by order."""
    quoted = {rank: f"thread {name!r}" for rank, name in sorted(names.items())}
    return (
        f"Mismatched threads: {what} was called by different threads on different ranks, and by several on some. Calls "
        "without a name pair up by their order, and several threads have no order: pass a name, equal on all ranks and "
        f"different in each thread, or call it in one thread. ({what}: {by_value(quoted, hosts)})"
    )


def _words_of_tensors(what: str, asked: Mapping[int, Sequence[Sequence[Any]]], hosts: Hosts) -> str:
    """Describes the first tensor that differs, on the lowest rank and the first rank that differs from it."""
    (lowest, first), *others = asked.items()
    ours = name_ranks([lowest], hosts)
    for rank, other in others:
        theirs = name_ranks([rank], hosts)
        here = {entry[0]: entry[1:] for entry in first}
        there = {entry[0]: entry[1:] for entry in other}
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                return (
                    f"{what}: {name!r} is {_words_of_tensor(here.get(name))} on {ours} and "
                    f"{_words_of_tensor(there.get(name))} on {theirs}: every rank must build the same model; check the "
                    "arguments that determine its sizes"
                )
        if [entry[0] for entry in first] != [entry[0] for entry in other]:
            return f"{what}: {ours} and {theirs} pass the same tensors in different orders: use one order"
    raise AssertionError("called only where they differ")


def _words_of_tensor(entry: Sequence[Any] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1]} on {entry[2]}"


def name_ranks(ranks: Sequence[int], hosts: Hosts) -> str:
    """Names ranks with their hosts: ``rank 0 (node1)``, or for many ``ranks 0 (node1), 1 (node1) and 14 more``."""
    shown = [f"{rank} ({hosts[rank]})" for rank in ranks[:MOST_NAMED]]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_names(shown, len(ranks))}"


def by_value(values: Mapping[int, str], hosts: Hosts) -> str:
    """Lists values, each after the ranks that have it: ``rank 0 (node1): a; ranks 1 (node1), 2 (node2): b``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{name_ranks(members, hosts)}: {value}" for value, members in ranks.items())


def _words(value: Any) -> str:
    return "nothing" if value is None else str(value)
