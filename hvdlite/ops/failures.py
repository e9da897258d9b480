"""
Raises an error on every rank where one of them has failed, so that none waits for it in a collective that follows.

    failure, layout of what is sent next, counts ── one small all-reduce ── sums of the counts, or an error everywhere

It costs one collective where all is well. Where it is not, the ranks exchange texts, and all raise: the rank that
failed its own error, the others one that names that rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ..comm.group import Group
from ..errors import CommunicationError, MismatchError

_MOST_WORDS = 2000
# Few enough for the square to be summed over any number of ranks.
_PRINT_BITS = 24


def raise_together(
    group: Group, failure: Exception | None, what: str, *, layout: str = "", counts: Sequence[int] = ()
) -> list[int]:
    """Raise an error on every rank if one has a ``failure``. Every rank must call it; it waits for all.

    Raises this rank's ``failure``; a CommunicationError that names the first rank with one; and a MismatchError where
    ranks have different ``layout``: a text that describes what they send next. Returns the sums of all ranks'
    ``counts``, of which each rank has as many.
    """
    if group.size == 1:
        if failure is not None:
            raise failure
        return list(counts)
    mark = zlib.crc32(layout.encode()) >> (32 - _PRINT_BITS)
    told = torch.tensor([*counts, int(failure is not None), mark, mark * mark], dtype=torch.int64)
    group.all_reduce(told, f"the check before {what}").wait()
    *sums, failed, marks, squares = told.tolist()
    # No other numbers than equal ones have a variance of 0.
    if failed or squares * group.size != marks * marks:
        _raise(group, failure, layout, what)
    return sums


def _raise(group: Group, failure: Exception | None, layout: str, what: str) -> None:
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"[:_MOST_WORDS]
    told = group.all_gather_json([mine, layout], f"the check before {what}")
    if failure is not None:
        raise failure
    for rank, (words, _) in enumerate(told):
        if words is not None:
            raise CommunicationError(
                f"{what} failed on {group.describe_rank(group.rank)} because of an error on "
                f"{group.describe_rank(rank)}: {words}"
            )
    other = next(rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1])
    raise MismatchError(
        f"{what}: compressed on {group.describe_rank(0)} it is {told[0][1][:_MOST_WORDS]}, and on "
        f"{group.describe_rank(other)} {told[other][1][:_MOST_WORDS]}: a compression must give wires of the same dtype "
        "and size on every rank"
    )
