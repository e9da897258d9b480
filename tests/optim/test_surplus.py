"""Which complete gradients of a step another optimizer's backward pass has left, and what is done with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hvdlite as hvd
from hvdlite.calls.generation import ReducerRegistry
from hvdlite.optim.surplus import PendingKind, SurplusGradients
from hvdlite.steps.step_world import StepPhase, StepState


def surplus_of(gradients: str, *, backwards: tuple[int, ...], used: tuple[int, ...] = (1, 2)) -> SurplusGradients:
    """A step with parameters of which some are complete, and ``k``ept or ``d``ropped by the program.

    Other optimizers have ``used`` these backward passes.
    """
    state = StepState(1)
    state.backwards.update(backwards)
    state.phase = StepPhase.COLLECTING if backwards else StepPhase.IDLE
    states = {}
    for number, what in enumerate(gradients):
        held = torch.zeros(1)
        grad = held if what == "k" else None
        param = SimpleNamespace(grad=grad)
        states[id(param)] = SimpleNamespace(name=f"w{number}", param=param, held=held, ready=True)
    layout = SimpleNamespace(states=states, ready=lambda: list(states.values()))
    spoilt: list[int] = []
    step: Any = SimpleNamespace(
        plan=SimpleNamespace(layout=layout), is_replaced=False, spoil=lambda: spoilt.append(1), spoilt=spoilt
    )
    registry = ReducerRegistry()
    registry.stepped_backwards.extend(used)
    world: Any = SimpleNamespace(
        state=state,
        reducers=registry,
        trace=SimpleNamespace(optimizer="optimizer 1"),
        engine=SimpleNamespace(is_world_closed=False),
    )
    return SurplusGradients(step, world)


@pytest.mark.parametrize(
    ("gradients", "backwards", "found"),
    [
        ("", (), PendingKind.NOTHING),
        ("kk", (1,), PendingKind.SURPLUS),
        ("kk", (1, 2), PendingKind.SURPLUS),
        ("dd", (1,), PendingKind.DROPPED),
        ("kd", (1,), PendingKind.PARTLY_DROPPED),
    ],
)
def test_gradients_are_surplus_if_other_optimizers_have_used_all_passes_of_the_step(gradients, backwards, found):
    assert surplus_of(gradients, backwards=backwards).pending("zero_grad()", "call step()") is found


@pytest.mark.parametrize("backwards", [(3,), (1, 3)])
def test_gradients_with_a_pass_that_no_optimizer_has_used_must_not_be_lost(backwards):
    with pytest.raises(hvd.GradientError, match=r"zero_grad\(\) while .* \(the first: 'w0'\): call step\(\)"):
        surplus_of("kk", backwards=backwards).pending("zero_grad()", "call step()")


@pytest.mark.parametrize(("gradients", "are_dropped"), [("kk", False), ("dd", True)])
def test_a_new_pass_drops_surplus_gradients_that_the_program_has_dropped(gradients, are_dropped):
    param: Any = torch.zeros(1)
    assert surplus_of(gradients, backwards=(1,)).are_dropped_before(param) is are_dropped


def test_a_new_pass_after_some_were_dropped_spoils_the_step():
    surplus = surplus_of("dk", backwards=(1,))
    with pytest.raises(hvd.GradientError, match=r"optimizer 1 were dropped or replaced, .* \(the first: 'w1'\)"):
        surplus.are_dropped_before(torch.zeros(1))
    assert surplus._step.spoilt


def test_passes_that_this_optimizer_has_used_are_surplus_to_others_once():
    surplus = surplus_of("kk", backwards=(2, 3))
    for _ in range(2):
        surplus.note_used_passes()
    assert list(surplus._registry.stepped_backwards) == [1, 2, 3]
