"""The flags at the end of each bucket, for any number of ranks: a tensor stands for the engine."""

from __future__ import annotations

import pytest
import torch

from hvdlite.buckets.flags import (
    DROPS,
    TAKES_PART,
    Flags,
    ParticipantCount,
    Presence,
    RankAndSize,
    is_dropped_by_some,
    presence_of,
)
from hvdlite.buckets.plan import ParamSpec, plan_buckets

LEFT_OUT = Presence(left_out=True, takes_part=False, drops=False)
COUNTS_AS_ZERO = Presence(left_out=False, takes_part=False, drops=False)


def summed_tail(
    size: int, absent: dict[int, Presence], wire: torch.dtype
) -> tuple[Flags, torch.Tensor, ParticipantCount]:
    """Returns a bucket's tail after the wires of all ranks were summed in their own dtype, one after the other."""
    spec = ParamSpec("w", (3,), (1,), torch.float32, torch.device("cpu"), trainable=True)
    (plan,) = plan_buckets([spec], cap_bytes=0, count_slots=RankAndSize(0, size).count_slots)
    tail_numel = plan.numel - plan.grad_numel
    total = torch.zeros(tail_numel, dtype=wire)
    for rank in range(size):
        flags, tail = Flags(plan, RankAndSize(rank, size)), torch.zeros(tail_numel)
        if rank in absent:
            flags.write(tail, absent[rank], [False], [False], [True])
        else:
            flags.write_usual(tail)
        total += tail.to(wire)
    back = total.float()
    return flags, back, ParticipantCount(presence_of(plan, back), size)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 128, 129, 300, 3000])
def test_ranks_that_take_part_are_counted_exactly_whatever_travels(size, wire):
    absent = dict.fromkeys(range(0, size, 7), LEFT_OUT) if size > 2 else {}
    flags, tail, count = summed_tail(size, absent, wire)
    assert count.active == int(count) == count.there().item() == size - len(absent)
    assert flags.read(tail, alone=False) == [(True, False, True)]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_ranks_that_sit_out_and_count_as_zero_leave_the_average_over_all(wire):
    _, _, count = summed_tail(3000, dict.fromkeys(range(1700), COUNTS_AS_ZERO), wire)
    assert count.active == 1300
    assert int(count) == count.there().item() == 3000


def test_where_all_sit_out_nobody_divides_by_zero():
    _, _, count = summed_tail(2, {0: LEFT_OUT, 1: LEFT_OUT}, torch.float16)
    assert count.active == 0
    assert int(count) == 2
    assert count.there().item() == 1


def test_up_to_128_ranks_are_one_element():
    assert [RankAndSize(0, size).count_slots for size in (1, 128, 129, 3000)] == [1, 1, 2, 24]
    assert TAKES_PART == (0, 1, 0)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("drop", "sit_out", "some"),
    [(0, 0, False), (3000, 0, False), (2900, 100, False), (1, 0, True), (2999, 0, True), (1500, 1499, True)],
)
def test_all_learn_that_some_of_those_that_take_part_drop_the_averages_however_many_they_are(drop, sit_out, some, wire):
    absent = dict.fromkeys(range(drop), DROPS) | dict.fromkeys(range(drop, drop + sit_out), LEFT_OUT)
    flags, tail, _ = summed_tail(3000, absent, wire)
    assert is_dropped_by_some(flags._plan, tail) == some
