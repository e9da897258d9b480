"""
`SentTensors`: the tensors of values that are sent as `typed_values`, which go behind them as bytes.

    value ── ValueEncoder(sent.refer) ── JSON with references ─────┐
                    └─ sent.tensors, and what they are: metas ─────┴── room_for ── resolver ── ValueDecoder ── value

Optimizers' states are sent so, also those of checkpoints and elastic programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..outside_graphs import keep_outside_graphs
from .sendable import is_sendable, plain_tensor

# The owner of a tensor that does not belong to one parameter's state.
NOBODY = -1


class SentTensors:
    """The tensors of an encoded state, which are sent behind it. ``refer`` is an `ValueEncoder`'s."""

    def __init__(self) -> None:
        # Set by `encode_state` while it encodes.
        self.number_of: dict[int, int] = {}
        self.owner = NOBODY
        # By id: the place of a tensor, and the tensor, so that no other one gets the id.
        self._place_of: dict[int, tuple[int, Tensor]] = {}
        self.tensors: list[Tensor] = []
        self.metas: list[list[Any]] = []
        """What `room_for` needs on other ranks, as JSON: the shape, the dtype, whether it is on the CPU, the owner.

        The owner is the number of the parameter whose state it is, which determines its device on each rank.
        """

    def refer(self, tensor: Tensor) -> list[Any] | None:
        """Returns a reference to a parameter, or to a tensor that is sent."""
        number = self.number_of.get(id(tensor))
        if number is not None:
            return ["parameter", number]
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.requires_grad
        if not is_plain or not is_sendable(tensor):
            # They are pickled by their own methods.
            return None
        if id(tensor) not in self._place_of:
            self._place_of[id(tensor)] = len(self.tensors), tensor
            self.tensors.append(plain_tensor(tensor))
            self.metas.append([list(tensor.shape), str(tensor.dtype), tensor.device.type == "cpu", self.owner])
        return ["tensor", self._place_of[id(tensor)][0]]


def room_for(metas: Sequence[Any], params: Sequence[Tensor]) -> list[Tensor]:
    """Allocates memory for the tensors of `SentTensors.metas`; ``params`` are this rank's. Without any, on the CPU."""
    room = []
    for shape, dtype, is_on_cpu, owner in metas:
        device = "cpu" if is_on_cpu or not params else params[max(0, owner)].device
        room.append(torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device))
    return room


def resolver(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    """Returns what finds the tensor of a reference of `SentTensors` for a `ValueDecoder`."""

    def resolve(reference: Any) -> Tensor:
        kind, number = reference
        tensor: Tensor = (params if kind == "parameter" else tensors)[number]
        return tensor

    return resolve


keep_outside_graphs(globals())
