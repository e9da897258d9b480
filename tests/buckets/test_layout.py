"""The memory of buckets goes on to the next world, and with it the gradients that are there."""

from __future__ import annotations

import torch

from hvdlite.buckets.bucket import BucketOptions, plain_memory
from hvdlite.buckets.flags import RankAndSize, Weights
from hvdlite.buckets.layout import Layout
from hvdlite.buckets.shares import Planner


def layout_of(params, ranks):
    options = BucketOptions(ranks, lambda dtype: 1.0, densify=False, memory=plain_memory)
    layout = Layout(options, Planner(1 << 20, False, ranks.count_slots), None, Weights(ranks))
    layout.add(params, [], params)
    layout.expect()
    return layout


def test_gradients_stay_those_of_the_parameters_where_the_next_layout_takes_the_memory_over():
    params = {name: torch.nn.Parameter(torch.zeros(3)) for name in ("a", "b")}
    first = layout_of(params, RankAndSize(0, 3))
    for number, param in enumerate(params.values()):
        param.grad = torch.full((3,), number + 1.0)
        first.states[id(param)].home.take(first.states[id(param)], True)
    second = layout_of(params, RankAndSize(0, 2))
    second.take_over(first.buffers(), lambda _: True)
    assert [param.grad.tolist() for param in params.values()] == [[1.0] * 3, [2.0] * 3]
    # As after zero_grad(set_to_none=False): autograd adds in place, to one gradient after the other.
    for param in params.values():
        param.grad.zero_()
    for number, param in enumerate(params.values()):
        param.grad.add_(number + 3.0)
        second.states[id(param)].home.take(second.states[id(param)], True)
    (bucket,) = second.buckets
    assert bucket.can_leave
    bucket.require_same()
    assert bucket.flat.data_ptr() == first.buckets[0].flat.data_ptr()
    assert [param.grad.tolist() for param in params.values()] == [[3.0] * 3, [4.0] * 3]
