"""
`StatePattern`: the state that `torch.distributed.checkpoint` has an optimizer make, so that it can load into it.

For this it sets all gradients to zeros and takes a step, of an optimizer that has no state yet. With PyTorch's own
optimizers that step counts, as in pytorch#164929, and here all ranks would have to take it together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ..outside_graphs import keep_outside_graphs

DCP = "torch.distributed.checkpoint.state_dict"
_DCP_STEP = "_init_optim_state"
_MOST_WRAPPERS = 5


class StatePattern:
    """Makes that state on this rank alone, and drops it if nothing is loaded into it."""

    def __init__(self, optimizer: torch.optim.Optimizer, complete: Callable[[], None]) -> None:
        """``complete`` gives the state what it has besides in later steps."""
        self._optimizer = optimizer
        self._complete = complete
        self._is_there = False

    def is_asked_for(self) -> bool:
        """Whether a step is that of `torch.distributed.checkpoint`. To be called in ``step`` itself."""
        if self._optimizer.state:
            return False
        frame = sys._getframe(1)
        for _ in range(_MOST_WRAPPERS):
            if frame.f_code.co_name == _DCP_STEP and frame.f_globals.get("__name__") == DCP:
                return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False

    def make(self) -> None:
        """Makes the state by a step with the gradients of zeros that are there. Waits for no rank."""
        self._optimizer.step()
        self._complete()
        self._is_there = True

    def drop(self) -> None:
        """Drops it, before a step of training or when the program itself looks at the state."""
        if self._is_there:
            self._is_there = False
            self._optimizer.state.clear()

    def replace(self) -> None:
        """Notes that a state is loaded in its place."""
        self._is_there = False


keep_outside_graphs(globals())
