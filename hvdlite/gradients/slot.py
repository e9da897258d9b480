"""
One parameter's place among the gradients, and how far it is in this step.

Where the gradient itself is kept is its *home*: a `bucket`, the `staying` of a rank that is alone, or, of a sparse one,
`sparse`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .plan import Slice


class Home(Protocol):
    """Where a gradient is kept between backward and step."""

    def take(self, slot: Slot, /, last_pass: bool) -> bool:
        """Keep what has just been added to ``param.grad``, which is complete if it was the last pass.

        Whether that was the last gradient that a bucket waited for.
        """
        ...


class Slot:
    """One parameter's place in a bucket, and how far it is in this step."""

    __slots__ = ("arrived", "fresh", "home", "name", "param", "passes", "piece", "scaled", "sparse", "view")

    def __init__(self, home: Home, piece: Slice, param: Tensor) -> None:
        self.home = home
        self.piece = piece
        self.name = piece.spec.name
        self.param = param
        # What `param.grad` is to be: the gradient's place in the flat buffer, once the bucket has taken memory.
        self.view: Tensor | None = None
        self.passes = 0
        self.arrived = False
        self.sparse = False
        # Whether the view holds the gradient times the bucket's scale already.
        self.scaled = False
        # Whether no pass has added to the gradient since it was made.
        self.fresh = False
