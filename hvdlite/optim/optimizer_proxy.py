"""
`OptimizerProxy`: wraps an optimizer, and forwards everything to it: state, parameter groups, state dicts.

Its subclass `averaging_optimizer.AveragingOptimizer` adds the averaging.
"""

from __future__ import annotations

from typing import Any

import torch

from ..outside_graphs import keep_outside_graphs


class OptimizerProxy(torch.optim.Optimizer):
    """An optimizer, for LR schedulers, GradScaler and the like, that shares the wrapped one's state.

    A subclass adds ``step``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Does not call Optimizer.__init__, which would create separate groups, state and hooks.
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._optimizer.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict, so that checkpoints do not depend on the wrapping."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state; on every rank, or on one and then `broadcast_optimizer_state`."""
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Attributes that the wrapped optimizer's own class adds.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


keep_outside_graphs(globals())
