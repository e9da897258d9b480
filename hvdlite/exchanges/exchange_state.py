"""
`ExchangeState`: what an optimizer's exchange keeps of gradients, in checkpoints and while the scale of losses changes.

    scaler.step(optimizer) ── asks the optimizer for an attribute: see_scaler ── next step: begin_step: Exchange.rescale
    optimizer.weighted ── losses are divided by a reference, another in each step ───┘
    consolidate ── the state of all ranks ── state_dict, until the next step

Gradients are sent during backward, before GradScaler has anything to do with the optimizer. So the scaler is remembered
from the step before. It is found on the stack of its `step`, since it passes itself to no optimizer. The `Reducer` has
one of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import Any

from torch.amp import GradScaler

from ..buckets.exchange import Exchange, Links
from ..buckets.plan import BucketPlan
from ..buckets.weights import FIRST_REFERENCE


class ExchangeState:
    """The state of one optimizer's exchange. Without a GradScaler the scale of what it has is unknown."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loss_scale = _LossScale()
        self.reference = FIRST_REFERENCE
        """What the weights of losses were divided by (see `weights`) of which the exchange keeps something."""
        # Whether these losses had no weights: their gradients are as large as those of weight 1.
        self._is_unweighted = True
        # What `consolidate` has made for this rank's next checkpoint, until the next step.
        self._consolidated: dict[str, Any] = {}

    def move_to(self, exchange: Exchange) -> None:
        """Gives the exchange of a new world the state of the one before, if it is of the same type."""
        state = self._exchange.state_dict()
        if state and type(exchange) is type(self._exchange):
            exchange.load_state_dict(state)
        self._exchange = exchange

    def begin_step(self, reference: float, n: int | None) -> None:
        """Begins a step, before its first bucket, whose losses are multiplied by ``n`` and divided by ``reference``.

        ``n`` is None where losses have no weights. It waits for a GPU if there is a GradScaler, as its own step does.
        """
        self._consolidated = {}
        self._rescale()
        factor = self.reference / reference
        if self._is_unweighted:
            # After the first weighted step the reference is its mean n: such weights are near 1. A rank without samples
            # does not know the others' n, and must not count more than any of them: it may keep a part of their sum.
            factor = 1.0 if n is None else max(n, 1) / reference
            self._is_unweighted = n is None and reference == FIRST_REFERENCE
        if factor != 1.0 and self._depends_on_scale:
            self._exchange.rescale(factor)
        self.reference = reference

    def state_dict(self, gone: Collection[str] = ()) -> dict[str, Any]:
        """Returns the state for a checkpoint: this rank's, or after `consolidate` that of all ranks.

        It has nothing of parameters that are ``gone`` from the optimizer: it will be loaded where they never were.
        """
        state = self._consolidated
        if not state:
            self._rescale()
            state = self._exchange.state_dict()
        return self._exchange.without(state, gone) if gone else state

    @property
    def scale(self) -> float | None:
        """The scale of the losses that `state_dict` has something of. None if no GradScaler has been seen."""
        return self._loss_scale.of_kept

    def load(self, state: Mapping[str, Any], scale: float | None, reference: float, numels: Mapping[str, int]) -> None:
        """Loads what `state_dict` returned, or an empty dict.

        ``scale`` and ``reference`` are its own, and ``numels`` the number of reals in each parameter's gradient.
        """
        self._exchange.check_state(state, numels)
        self._consolidated = {}
        self._exchange.load_state_dict(state)
        self._loss_scale.of_kept = scale
        self.reference, self._is_unweighted = reference, reference == FIRST_REFERENCE

    def consolidate(self, plans: Sequence[BucketPlan], links: Links, *, keeps: bool) -> None:
        """Makes `state_dict` that of all ranks until the next step, where it ``keeps`` it. It waits for all ranks."""
        self._rescale()
        state = self._exchange.consolidate(plans, links)
        self._consolidated = state if keeps else {}

    def forget(self, names: Collection[str]) -> None:
        """Drops what the exchange keeps for these parameters, which the optimizer no longer has."""
        self._consolidated = {}
        state = self._exchange.state_dict()
        left = self._exchange.without(state, names)
        if left is not state:
            self._exchange.load_state_dict(left)

    def see_scaler(self, frame: FrameType) -> None:
        """Remembers the GradScaler in whose ``step`` the frame is, if what the exchange keeps depends on its scale.

        It waits for a GPU if the scaler is a new one.
        """
        if self._depends_on_scale:
            self._loss_scale.look_for_scaler(frame)

    @property
    def _depends_on_scale(self) -> bool:
        return type(self._exchange).rescale is not Exchange.rescale

    def _rescale(self) -> None:
        """Gives what the exchange keeps the scale that the next gradients have."""
        if self._depends_on_scale and (factor := self._loss_scale.change()) != 1.0:
            self._exchange.rescale(factor)


class _LossScale:
    """The factor of GradScaler's losses, and by how much it has changed since the exchange kept gradients of them."""

    def __init__(self) -> None:
        self.of_kept: float | None = None
        """The scale of what the exchange keeps. None: unknown."""
        self._scaler: GradScaler | None = None

    def look_for_scaler(self, frame: FrameType | None) -> None:
        """Remembers the GradScaler of whose ``step`` this is the frame, or a frame that it has called."""
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, GradScaler):
                if found is not self._scaler:
                    # The backward pass before this step has used its scale.
                    self._scaler, self.of_kept = found, found.get_scale()
                return
            frame = frame.f_back

    def change(self) -> float:
        """Returns the factor by which the scale has changed since the last call."""
        if self._scaler is None:
            return 1.0
        now, before = self._scaler.get_scale(), self.of_kept
        if not (now > 0 and math.isfinite(now)):
            # Gradients of such a step are of no use, and neither would be the factor.
            return 1.0
        self.of_kept = now
        return 1.0 if before is None else now / before
