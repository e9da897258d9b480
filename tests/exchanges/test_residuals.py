"""What a rank could not send is in the units of the step that adds it, whatever factor its gradients had before."""

from __future__ import annotations

import pytest
import torch

from hvdlite.buckets.plan import ParamSpec, plan_buckets
from hvdlite.exchanges.residuals import OWN, Residuals


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_residual_of_gradients_with_another_factor_gets_that_of_the_next_ones(is_loaded):
    (plan,) = plan_buckets([ParamSpec.of("w", torch.zeros(4))], cap_bytes=1 << 20)
    values, residuals = torch.zeros(plan.grad_numel), Residuals()
    residuals.take(OWN, plan, 0, values, scale=0.5, ranks=1)[:4] = torch.arange(4.0)
    if is_loaded:
        saved, residuals = residuals.state_dict(), Residuals()
        residuals.load_state_dict(saved)
    assert residuals.take(OWN, plan, 0, values, scale=0.5, ranks=1)[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert residuals.take(OWN, plan, 0, values, scale=2.0, ranks=1)[:4].tolist() == [0.0, 4.0, 8.0, 12.0]
