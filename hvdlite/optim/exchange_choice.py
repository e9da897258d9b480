"""`exchange_of` makes the exchange of an optimizer, by its settings. `reducer` and `autotune` call it."""

from __future__ import annotations

from ..comm.reduce_op import Adasum
from .builtin_exchanges import AllReduce, CompressedAllReduce, SingleRank, StepAdasum
from .encoded import EncodedExchange
from .exchange import Exchange
from .settings import Settings


def exchange_of(settings: Settings, size: int) -> Exchange:
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
    if settings.codec is not None:
        return EncodedExchange(settings, settings.codec)
    return AllReduce(settings)
