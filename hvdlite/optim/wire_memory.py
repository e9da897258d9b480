"""
Memory for wires, used again by one bucket after the other: the engine's own, where it has some.

`wire` decides what is written there, and `in_flight` how many wires there are at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group


class Wire(NamedTuple):
    """What travels, and the memory that it lies in, if that is to be used again."""

    tensor: Tensor
    memory: Tensor | None


class Wires:
    """The memory that no wire uses at present."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, group: Group, numel: int, dtype: torch.dtype, device: torch.device) -> Wire:
        """A flat tensor of any contents, to travel among a group's ranks."""
        if device.type != "cpu":
            # PyTorch keeps such memory itself, and knows which stream still reads it.
            return Wire(torch.empty(numel, dtype=dtype, device=device), None)
        nbytes = numel * dtype.itemsize
        memory = next((each for each in self._free if each.numel() >= nbytes), None)
        # What is too small for this bucket would lie there for nothing: some bucket is always the largest.
        self._free = [] if memory is None else [each for each in self._free if each is not memory]
        if memory is None:
            memory = group.zeros(nbytes, torch.uint8, device)
        return Wire(memory[:nbytes].view(dtype), memory)

    def give_back(self, wire: Wire) -> None:
        """It has travelled, and been read."""
        if wire.memory is not None:
            self._free.append(wire.memory)
