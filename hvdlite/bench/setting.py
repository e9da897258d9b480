"""
Where something was measured: how many ranks on how many hosts, and what carried their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from .quantities import show_ranks


@dataclass(frozen=True, slots=True)
class Setting:
    """Reads as ``4 ranks on 2 hosts, over gloo``; one rank has no ``wire``."""

    ranks: int = 1
    hosts: int = 1
    wire: str = ""

    def __str__(self) -> str:
        if self.ranks == 1:
            return show_ranks(1)
        return f"{show_ranks(self.ranks)} on {self.hosts} host{'s'[: self.hosts - 1]}, over {self.wire}"
