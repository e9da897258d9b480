"""
Raises an error on every rank if one of them has failed, so that no rank hangs in a collective that follows.

    failure, layout of what is sent next, counts ── one small all-reduce ── sums of the counts, or an error on all ranks

`packing` and `optim` call it. It costs one collective if all is well. Otherwise the ranks exchange texts, and all
raise: the failed rank raises its own error, the others one that names that rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ..comm.group import Group
from ..errors import CommunicationError, MismatchError

_MOST_WORDS = 2000
# Few enough that sums of squares over any number of ranks do not overflow.
_PRINT_BITS = 24


def raise_together(
    group: Group, failure: Exception | None, what: str, *, layout: str = "", counts: Sequence[int] = ()
) -> list[int]:
    """Raises an error on every rank if one has a ``failure``. Every rank must call it; it waits for all.

    Raises this rank's ``failure``, or a CommunicationError that names the first rank with one. Raises a MismatchError
    if the ranks' ``layout`` differ, which is a text that describes what they send next. Returns the sums of all ranks'
    ``counts``, which have the same length on all ranks.
    """
    if group.size == 1:
        if failure is not None:
            raise failure
        return list(counts)
    mark = zlib.crc32(layout.encode()) >> (32 - _PRINT_BITS)
    sums_of_ranks = torch.tensor(
        [*counts, int(failure is not None), mark, mark * mark], dtype=torch.int64, device="cpu"
    )
    group.all_reduce(sums_of_ranks, f"the check before {what}").wait()
    *sums, failed, marks, squares = sums_of_ranks.tolist()
    # The variance of the marks is 0 only if all are equal.
    if failed or squares * group.size != marks * marks:
        _raise(group, failure, layout, what)
    return sums


def _raise(group: Group, failure: Exception | None, layout: str, what: str) -> None:
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"[:_MOST_WORDS]
    of_ranks = group.all_gather_json([mine, layout], f"the check before {what}")
    if failure is not None:
        raise failure
    for rank, (words, _) in enumerate(of_ranks):
        if words is not None:
            raise CommunicationError(
                f"{what} failed on {group.describe_rank(group.rank)} because of an error on "
                f"{group.describe_rank(rank)}: {words}"
            )
    other = next(rank for rank, (_, theirs) in enumerate(of_ranks) if theirs != of_ranks[0][1])
    raise MismatchError(
        f"{what}: the compression returned {of_ranks[0][1][:_MOST_WORDS]} on {group.describe_rank(0)} and "
        f"{of_ranks[other][1][:_MOST_WORDS]} on {group.describe_rank(other)}: it must return the same dtype and size "
        "on every rank"
    )
