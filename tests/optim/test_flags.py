"""What ranks tell each other in a bucket's tail, with as many ranks as one likes: a tensor stands for the engine."""

from __future__ import annotations

import pytest
import torch

from hvdlite.optim.flags import TAKES_PART, Flags, Ranks, active_of, count_of, count_there
from hvdlite.optim.plan import ParamSpec, plan_buckets

LEFT_OUT, COUNTS_AS_ZERO = (1, 0), (0, 0)


def summed_tail(size: int, absent: dict[int, tuple[int, int]], wire: torch.dtype) -> tuple[Flags, torch.Tensor]:
    """The bucket after the wires of all ranks were added up in their own dtype, one after the other."""
    spec = ParamSpec("w", (3,), (1,), torch.float32, torch.device("cpu"), trainable=True)
    (plan,) = plan_buckets([spec], cap_bytes=0, count_slots=Ranks(0, size).count_slots)
    total = torch.zeros(plan.numel, dtype=wire)
    for rank in range(size):
        flags, buffer = Flags(plan, Ranks(rank, size)), torch.zeros(plan.numel)
        if rank in absent:
            flags.write_presence(buffer, absent[rank])
        else:
            flags.write_usual(buffer)
        total += buffer.to(wire)
    return flags, total.float()


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 128, 129, 300, 3000])
def test_ranks_that_take_part_are_counted_exactly_whatever_travels(size, wire):
    absent = dict.fromkeys(range(0, size, 7), LEFT_OUT) if size > 2 else {}
    flags, buffer = summed_tail(size, absent, wire)
    presence = flags.presence(buffer)
    assert active_of(presence) == size - len(absent)
    assert count_of(presence, size) == size - len(absent)
    assert count_there(presence, size).item() == size - len(absent)
    assert flags.read(buffer, alone=False) == [(True, False)]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_ranks_that_sit_out_and_count_as_zero_leave_the_average_over_all(wire):
    flags, buffer = summed_tail(3000, dict.fromkeys(range(1700), COUNTS_AS_ZERO), wire)
    presence = flags.presence(buffer)
    assert active_of(presence) == 1300
    assert count_of(presence, 3000) == count_there(presence, 3000).item() == 3000


def test_where_all_sit_out_nobody_divides_by_zero():
    flags, buffer = summed_tail(2, {0: LEFT_OUT, 1: LEFT_OUT}, torch.float16)
    presence = flags.presence(buffer)
    assert active_of(presence) == 0
    assert count_of(presence, 2) == 2
    assert count_there(presence, 2).item() == 1


def test_up_to_128_ranks_are_one_element():
    assert [Ranks(0, size).count_slots for size in (1, 128, 129, 3000)] == [1, 1, 2, 24]
    assert TAKES_PART == (0, 1)
