"""How far a step is: its phases, and the backward passes that belong to it."""

from __future__ import annotations

import pytest

import hvdlite as hvd
from hvdlite.steps.step_world import StepPhase, StepState


def state_in(phase: StepPhase, *backwards: int) -> StepState:
    state = StepState(1)
    state.phase = phase
    state.backwards.update(backwards)
    return state


@pytest.mark.parametrize(
    ("phase", "after"), [(StepPhase.COLLECTING, StepPhase.IDLE), (StepPhase.SPOILT, StepPhase.DROPPED)]
)
def test_a_spoilt_step_stays_unusable_when_it_has_ended(phase, after):
    state = state_in(phase, 7)
    state.end()
    assert (state.phase, state.backwards) == (after, {7})


@pytest.mark.parametrize("phase", StepPhase)
def test_the_optimizers_own_step_begins_the_next_one(phase):
    state = state_in(phase, 7)
    state.stepped()
    assert state.phase is (phase if state.is_in_step else StepPhase.IDLE)
    assert not state.backwards


@pytest.mark.parametrize("phase", StepPhase)
def test_only_averages_that_the_program_has_not_used_are_forgotten(phase):
    state = state_in(phase, 7)
    state.forget_averages()
    if phase in (StepPhase.AVERAGED, StepPhase.DISCARDED):
        assert (state.phase, state.backwards) == (StepPhase.IDLE, set())
    else:
        assert (state.phase, state.backwards) == (phase, {7})


@pytest.mark.parametrize("phase", StepPhase)
def test_gradients_of_a_spoilt_step_are_an_error_for_the_optimizer(phase):
    state = state_in(phase)
    if phase in (StepPhase.SPOILT, StepPhase.DROPPED):
        with pytest.raises(hvd.GradientError, match=r"more than backward_passes_per_step times"):
            state.require_sound()
    else:
        state.require_sound()


def test_passes_are_counted_again_after_an_error_among_those_that_are_not():
    state = StepState(1)
    with state.accumulating():
        with pytest.raises(ArithmeticError), state.accumulating():
            raise ArithmeticError
        assert state.is_accumulating
    assert not state.is_accumulating
