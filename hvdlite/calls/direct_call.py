"""
`DirectCall`: a call that waits for its result, with so few data that they go with the vote on it.

    DirectCall ── Controller.call_directly ── all ranks of the host vote for it ── result(all ranks' data)
                                          └─ no vote, or no go ── operation(), submitted as any other

`ops.direct` makes them, and `control.requests` runs them on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..shm.vote_data import VoteData
from .operation import Kind, Operation, describe


@dataclass(frozen=True, slots=True, eq=False)
class DirectCall:
    """One rank's call among all ranks.

    ``agreed`` is all that must be equal on all ranks, but the user's ``name``; equal bytes mean that rank 0 would let
    the operations begin. ``tensor`` has this rank's data, contiguous on the CPU; None if there are none. ``result``
    makes the result from the data of all ranks. ``operation`` makes the same call as an operation, with the same
    result. A result is never None. ``is_inference`` is whether the caller is in `torch.inference_mode`.
    """

    kind: Kind
    name: str | None
    agreed: bytes
    tensor: Tensor | None
    result: Callable[[VoteData], Any]
    operation: Callable[[], Operation]
    is_inference: bool

    def result_elsewhere(self, data: VoteData) -> Any:
        """Makes the result on another thread than the caller's, which may be making it, too."""
        with torch.inference_mode(self.is_inference), torch.no_grad():
            return self.result(data.copy())

    def describe(self) -> str:
        """The call's description in messages, such as ``allreduce of 'loss'``."""
        return describe(self.kind, self.name)
