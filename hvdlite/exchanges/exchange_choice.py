"""`exchange_of` makes the exchange of an optimizer, by its settings. `step_choice` and `autotune` call it."""

from __future__ import annotations

from ..buckets.exchange import Exchange
from ..buckets.settings import Settings
from ..comm.reduce_op import Adasum
from ..compression.low_rank import LowRank
from .builtin_exchanges import AllReduce, CompressedAllReduce, SingleRank, StepAdasum
from .host_sums import HostSumExchange
from .low_rank_exchange import LowRankExchange


def exchange_of(settings: Settings, size: int) -> Exchange:  # noqa: PLR0911 - one for each kind
    """Creates an optimizer's exchange over ``size`` ranks. Raises TypeError if a user's factory returns no Exchange."""
    if settings.exchange is not None:
        exchange = settings.exchange()
        if not isinstance(exchange, Exchange):
            raise TypeError(f"exchange={settings.exchange!r} made {exchange!r}, which is not an hvd.Exchange")
        return exchange
    if settings.op is Adasum:
        return StepAdasum(settings)
    if settings.packs:
        return CompressedAllReduce(settings)
    if settings.leaves_gradients(size):
        return SingleRank()
    if settings.codec is None:
        return AllReduce(settings)
    if isinstance(settings.codec, LowRank):
        return LowRankExchange(settings, settings.codec)
    return HostSumExchange(settings, settings.codec)
