"""Gradients that are kept until a step has ended: what a bucket makes of them changes nothing."""

from __future__ import annotations

import pytest
import torch

from hvdlite.buckets.flags import RankAndSize
from hvdlite.buckets.gradient_state import GradientState
from hvdlite.buckets.layout import Layout
from hvdlite.buckets.plan import ParamSpec, plan_buckets
from hvdlite.buckets.shares import Planner
from hvdlite.buckets.weights import Weights
from hvdlite.steps.kept_gradients import KeptGradients


class Home:
    """Notes what it is given, and has a view take the place of the gradient, as a bucket does."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def take(self, state, last_pass):
        self.taken.append(state.name)
        state.ready = last_pass
        state.view = torch.zeros(3)
        state.view.copy_(state.param.grad)
        state.param.grad = state.view
        return False


@pytest.fixture
def states():
    params = {name: torch.nn.Parameter(torch.zeros(3)) for name in ("a", "b")}
    specs = [ParamSpec.of(name, param) for name, param in params.items()]
    plans = plan_buckets(specs, cap_bytes=1 << 20, groups=[], aligned=False, count_slots=1)
    home = Home()
    return {
        id(param): GradientState(home, piece, param)
        for plan in plans
        for piece in plan.slices
        for param in [params[piece.spec.name]]
    }


def arrive(kept, state, value):
    state.param.grad = torch.full((3,), value)
    state.passes += 1
    kept.keep(state)
    state.home.take(state, True)


def test_all_gradients_come_back_as_they_were_and_unused_parameters_have_none_again(states):
    kept = KeptGradients()
    used, unused = states.values()
    arrive(kept, used, 2.0)
    kept.keep_rest(states)
    # The averages of all ranks.
    used.param.grad.fill_(7.0)
    unused.param.grad = torch.full((3,), 7.0)
    used.ready = False
    used.passes = 0
    kept.begin()
    kept.put_back(states.values())
    assert used.param.grad.tolist() == [2.0] * 3
    assert used.ready
    assert used.passes == 1
    assert unused.param.grad is None
    assert used.home.taken == [used.name] * 2


def test_a_gradient_that_autograd_adds_to_in_the_bucket_is_copied(states):
    kept = KeptGradients()
    state = next(iter(states.values()))
    arrive(kept, state, 2.0)
    state.view.add_(1.0)
    kept.keep(state)
    state.view.fill_(7.0)
    kept.keep_rest(states)
    kept.put_back([state])
    assert state.param.grad.tolist() == [3.0] * 3


def test_an_incomplete_gradient_comes_back_and_is_not_taken(states):
    kept = KeptGradients()
    state = next(iter(states.values()))
    state.param.grad = torch.full((3,), 4.0)
    state.passes = 1
    kept.keep_rest(states)
    state.param.grad = None
    kept.put_back([state])
    assert state.param.grad.tolist() == [4.0] * 3
    assert state.home.taken == []


def test_a_step_that_was_given_up_leaves_nothing_to_the_next(states):
    kept = KeptGradients()
    state = next(iter(states.values()))
    arrive(kept, state, 2.0)
    kept.begin()
    state.param.grad, state.ready = None, False
    kept.keep_rest(states)
    kept.put_back(states.values())
    assert state.param.grad is None
    kept.forget()
    assert not kept._gradients
    assert not kept._states


def layout_of(params, ranks):
    layout = Layout(
        ranks=ranks,
        planner=Planner(1 << 20, False, ranks.count_slots),
        scale_of=lambda dtype: 1.0,
        densify=False,
        memory=lambda numel, dtype, device: torch.zeros(numel, dtype=dtype, device=device),
        staying=None,
        weights=Weights(ranks),
    )
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
