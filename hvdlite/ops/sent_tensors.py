"""
`SentTensors`: the tensors of values that are sent as `typed_values`, which go behind them as bytes.

    value ── ValueEncoder(sent.refer) ── JSON with references ─────┐
                    └─ sent.tensors, and what they are: packed ────┴── room_for ── resolver ── ValueDecoder ── value

Optimizers' states are sent so, also those of checkpoints and elastic programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..outside_graphs import keep_outside_graphs
from .sendable import is_sendable, plain_tensor

# The owner of a tensor that does not belong to one parameter's state.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class _Meta:
    """The description of a tensor, by which a rank allocates memory to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    # The number of the parameter whose state it is, which determines its device on each rank.
    owner: int

    def pack(self) -> list[Any]:
        """Returns it as JSON values; see `unpack`."""
        return [list(self.shape), str(self.dtype), self.on_cpu, self.owner]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> _Meta:
        shape, dtype, on_cpu, owner = packed
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), on_cpu, owner)

    def empty(self, params: Sequence[Tensor]) -> Tensor:
        """Allocates the tensor, on the device of its parameter on this rank, or on the CPU."""
        device = "cpu" if self.on_cpu or not params else params[max(0, self.owner)].device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class SentTensors:
    """The tensors of an encoded state, which are sent behind it. ``refer`` is an `ValueEncoder`'s."""

    def __init__(self) -> None:
        # Set by `encode_state` while it encodes.
        self.number_of: dict[int, int] = {}
        self.owner = NOBODY
        self._place_of: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self._metas: list[_Meta] = []

    def refer(self, tensor: Tensor) -> list[Any] | None:
        """Returns a reference to a parameter, or to a tensor that is sent."""
        number = self.number_of.get(id(tensor))
        if number is not None:
            return ["parameter", number]
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.requires_grad
        if not is_plain or not is_sendable(tensor):
            # They are pickled by their own methods.
            return None
        place = self._place_of.get(id(tensor))
        if place is None:
            place = self._place_of[id(tensor)] = len(self.tensors)
            self.tensors.append(plain_tensor(tensor))
            self._metas.append(_Meta(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu", self.owner))
        return ["tensor", place]

    def packed(self) -> list[Any]:
        """Returns what `room_for` needs on other ranks, as JSON values."""
        return [meta.pack() for meta in self._metas]


def room_for(metas: Sequence[Any], params: Sequence[Tensor]) -> list[Tensor]:
    """Allocates memory for the tensors that `SentTensors.packed` describes; ``params`` are this rank's."""
    return [_Meta.unpack(each).empty(params) for each in metas]


def resolver(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    """Returns what finds the tensor of a reference of `SentTensors` for a `ValueDecoder`."""

    def resolve(reference: Any) -> Tensor:
        kind, number = reference
        tensor: Tensor = (params if kind == "parameter" else tensors)[number]
        return tensor

    return resolve


keep_outside_graphs(globals())
