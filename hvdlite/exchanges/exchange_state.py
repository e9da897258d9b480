"""
`exchange_of` makes an optimizer's exchange, by its settings. `ExchangeState` keeps the exchange's residuals right where
GradScaler changes the scale of losses, and has them in checkpoints.

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
from ..buckets.flags import FIRST_REFERENCE
from ..buckets.plan import BucketPlan
from ..buckets.settings import Settings
from ..comm.reduce_op import Adasum
from ..compression.approximations import LowRank
from ..compression.custom import CustomCompression
from .builtin_exchanges import AdasumExchange, AllReduce, CompressedAllReduce, ReduceToParts, SingleRank
from .host_sums import HostSumExchange
from .low_rank_exchange import LowRankExchange


def exchange_of(settings: Settings, size: int, sharers: int = 1) -> Exchange:  # noqa: PLR0911 - one for each kind
    """Creates an optimizer's exchange over ``size`` ranks. Raises TypeError if a user's factory returns no Exchange.

    ``sharers`` is how many of the ranks share the optimizer's work, each with an own part.
    """
    if settings.exchange is not None:
        exchange = settings.exchange()
        if not isinstance(exchange, Exchange):
            raise TypeError(f"exchange={settings.exchange!r} made {exchange!r}, which is not an hvd.Exchange")
        return exchange
    if settings.op is Adasum:
        return AdasumExchange(settings)
    if isinstance(settings.compression, CustomCompression):
        return CompressedAllReduce(settings)
    if settings.leaves_gradients(size):
        return SingleRank()
    if settings.codec is None:
        # Where fewer ranks share it, as those of each host do, every host needs all averages.
        return ReduceToParts(settings) if sharers == size > 1 else AllReduce(settings)
    if isinstance(settings.codec, LowRank):
        return LowRankExchange(settings, settings.codec)
    return HostSumExchange(settings, settings.codec)


class ExchangeState:
    """The state of one optimizer's exchange. Without a GradScaler the scale of what it has is unknown."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.scale: float | None = None
        """The scale of the losses that `state_dict` has something of. None if no GradScaler has been seen."""
        self._scaler: GradScaler | None = None
        self.reference = FIRST_REFERENCE
        """What the weights of losses were divided by (see `Weights`) of which the exchange keeps something."""
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
        """Begins a step whose losses are multiplied by ``n``, None without weights, and divided by ``reference``."""
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
        """Returns the state for a checkpoint, without parameters that are ``gone`` from the optimizer."""
        state = self._consolidated
        if not state:
            self._rescale()
            state = self._exchange.state_dict()
        return self._exchange.without(state, gone) if gone else state

    def load(self, state: Mapping[str, Any], scale: float | None, reference: float, numels: Mapping[str, int]) -> None:
        """Loads what `state_dict` returned, or an empty dict, with its ``scale`` and ``reference``."""
        self._exchange.check_state(state, numels)
        self._consolidated = {}
        self._exchange.load_state_dict(state)
        self.scale = scale
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
        """Remembers the GradScaler in whose ``step`` the frame is, if what the exchange keeps depends on its scale."""
        at: FrameType | None = frame if self._depends_on_scale else None
        while at is not None:
            found = at.f_locals.get("self")
            if isinstance(found, GradScaler):
                if found is not self._scaler:
                    # The backward pass before this step has used its scale.
                    self._scaler, self.scale = found, found.get_scale()
                return
            at = at.f_back

    @property
    def _depends_on_scale(self) -> bool:
        return type(self._exchange).rescale is not Exchange.rescale

    def _rescale(self) -> None:
        """Gives what the exchange keeps the scale that the next gradients have."""
        if self._scaler is None or not self._depends_on_scale:
            return
        now, before = self._scaler.get_scale(), self.scale
        # Gradients of a step without such a scale are of no use, and neither would be the factor.
        if now > 0 and math.isfinite(now):
            self.scale = now
            if before is not None and now != before:
                self._exchange.rescale(now / before)
