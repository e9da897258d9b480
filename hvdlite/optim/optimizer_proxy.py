"""
Wraps an optimizer and passes everything through to it: state, parameter groups, state dicts.

What `DistributedOptimizer` adds to that is in `optimizer`.
"""

from __future__ import annotations

from typing import Any

import torch


class OptimizerProxy(torch.optim.Optimizer):
    """Is an optimizer for LR schedulers, GradScaler and the like; its state is the wrapped one's.

    A subclass adds ``step``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not Optimizer.__init__, which would make groups, state and hooks of its own.
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
        """The wrapped optimizer's, so that checkpoints do not depend on the wrapping."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's. Load on every rank, or on one and `broadcast_optimizer_state`."""
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # What the wrapped optimizer's class adds: a subclass's own methods and settings.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
