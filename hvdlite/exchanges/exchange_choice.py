"""`exchange_of` makes the exchange of an optimizer, by its settings. `step_choice` and `autotune` call it."""

from __future__ import annotations

from ..buckets.exchange import Exchange
from ..buckets.settings import Settings
from ..comm.reduce_op import Adasum
from ..compression.custom import CustomCompression
from ..compression.low_rank import LowRank
from .builtin_exchanges import AllReduce, CompressedAllReduce, ReduceToParts, SingleRank, StepAdasum
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
        return StepAdasum(settings)
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
