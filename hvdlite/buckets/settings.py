"""
`Settings`: the arguments by which an optimizer combines gradients. `Scaling`: the factors that turn sums into averages.

    Settings (equal on all ranks) ── Scaling, for a dtype:  gradients × before ── summed ── × over / number of ranks

`LocalSGD` and `DiLoCo` are how hosts train apart for several steps, for ``hvd.DistributedOptimizer(outer=...)``:

    steps of the wrapped optimizer, within each host ── every sync_every steps: anchor - parameters, averaged over hosts
                                                     ── the outer optimizer's step changes the anchor (`outer_step`)

`optimizer` creates the settings; steps, exchanges and `sparse_gather` read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.approximations import Encoding, LowRank, TopK
from ..compression.casts import (
    AnyCompression,
    CastCompression,
    Compression,
    NoCompression,
    ResolvedCompression,
    check_compression,
    is_narrow,
)
from ..compression.codecs import Codec, check_blocks, words_of_wires
from ..compression.kernels import divide, divide_by, scale_by
from ..ops.reduction import Reduction
from ..values import MOST, real_number, shown, whole_number
from .exchange import Exchange
from .flags import ParticipantCount
from .shares import Sharing


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors of an average: each term is multiplied by ``before``, and the sum by ``over`` / number of ranks.

    The number of ranks is that of all, or of those that take part. ``over`` None: the result is a sum. ``over`` 1: the
    sum is only divided, so the average of equal gradients is exactly that gradient.
    """

    before: float = 1.0
    over: float | None = None

    def finish(self, total: Tensor, count: ParticipantCount) -> None:
        """Turns a flat tensor of sums into averages over ``count`` ranks, in place. It does not wait for a GPU."""
        if self.over is None:
            return
        if not count.is_on_host:
            if self.over == 1.0:
                divide_by(total, count.there().to(total.dtype))
            else:
                scale_by(total, (self.over / count.there()).to(total.dtype))
        elif self.over == 1.0:
            divide(total, int(count))
        elif self.over != int(count):
            total.mul_(self.over / int(count))

    def factor(self, count: ParticipantCount) -> float | None:
        """Returns what to multiply sums by for the very bits of `finish`, or None if only dividing makes these."""
        if self.over is None:
            return 1.0
        if self.over != 1.0:
            return self.over / int(count)
        divisor = int(count)
        # The inverse of a power of two is exact.
        return 1.0 / divisor if divisor & (divisor - 1) == 0 else None


# How outer gradients are sent.
OuterForm: TypeAlias = NoCompression | CastCompression | Codec | TopK


class OuterRule(NamedTuple):
    """The checked numbers of `LocalSGD` or `DiLoCo`, and ``words``, its ``repr``."""

    sync_every: int
    lr: float
    momentum: float
    fragments: int
    delay: int
    mix: float
    compression: OuterForm
    words: str

    def fragment_due(self, step: int) -> int | None:
        """Returns the fragment that has its turn after this step, counted from 1, if one has."""
        place = (step - 1) % self.sync_every + 1
        turns = [(number + 1) * self.sync_every // self.fragments for number in range(self.fragments)]
        return turns.index(place) if place in turns else None


@dataclass(frozen=True)
class LocalSGD:
    """Averages the parameters of all hosts each ``sync_every`` steps, and sends no gradients between hosts.

    See arXiv 1805.09767. Averaging more seldom sends less, and costs more of the loss; 2 to 16 steps are usual. Raises
    ValueError if ``sync_every`` is below 1.
    """

    sync_every: int

    def __post_init__(self) -> None:
        _check_whole(self.sync_every, "LocalSGD: sync_every", 1)

    def rule(self) -> OuterRule:
        """Returns the numbers: an outer step of plain SGD whose learning rate is 1 sets the anchor to the average."""
        return OuterRule(self.sync_every, 1.0, 0.0, 1, 0, 0.0, Compression.none, repr(self))


@dataclass(frozen=True)
class DiLoCo:
    """Lets hosts train apart, and every ``sync_every`` steps averages how far they have come (arXiv 2311.08105).

    A host's outer gradient is the anchor, the parameters that all hosts shared last, minus its own parameters. Its
    average over the hosts is the gradient for an outer step of Nesterov's SGD on the anchor, with ``lr`` and
    ``momentum``::

        velocity = momentum * velocity + average
        anchor   = anchor - lr * (average + momentum * velocity)

    The rest is from Streaming DiLoCo (arXiv 2501.18512). ``fragments`` splits the parameters: fragment i has every
    ``fragments``-th bucket from the i-th on, and fragments take turns, ``sync_every / fragments`` steps apart. So the
    bytes at a time are fewer, and as many in all. ``delay`` is the number of steps from the taking of a fragment's
    outer gradients to its outer step, in which they are averaged while training goes on. Then parameters become::

        parameters = mix * parameters + (1 - mix) * anchor

    With ``mix=0`` what was learnt during the delay is dropped, and with 1 the parameters stay the host's own. The
    default is 0 without a delay, and 0.5 with one, as in the paper.

    ``compression`` is the format in which outer gradients are sent: none, fp16, bf16, topk, or a `Codec` such as int4.
    What a codec's rounding takes, or topk leaves out, is added to the next outer gradient, which takes the memory of
    the parameters once more. SparseLoCo (arXiv 2508.15706) is ``momentum=0`` with
    ``topk(density=0.03, error_decay=0.95)``: the decay of what was left out takes the place of the momentum.

    Raises ValueError for numbers outside their range: ``sync_every`` and ``fragments`` are at least 1, ``fragments``
    at most ``sync_every``, ``delay`` at least 0 and below ``sync_every``, ``lr`` positive, ``momentum`` from 0 to below
    1, and ``mix`` from 0 to 1.
    """

    sync_every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float | None = None
    compression: AnyCompression = Compression.none

    def __post_init__(self) -> None:
        every = _check_whole(self.sync_every, "DiLoCo: sync_every", 1)
        if _check_whole(self.fragments, "DiLoCo: fragments", 1) > every:
            raise ValueError(
                f"DiLoCo: fragments={self.fragments} is above sync_every={every}: each fragment needs a step of its "
                "own, so use fewer fragments"
            )
        if _check_whole(self.delay, "DiLoCo: delay", 0) >= every:
            raise ValueError(
                f"DiLoCo: delay={self.delay} is not below sync_every={every}: a fragment must arrive before its next "
                "turn, so use a shorter delay"
            )
        _check_real(self.lr, "DiLoCo: lr", lambda number: 0 < number < math.inf, "a positive number, such as 0.7")
        _check_real(self.momentum, "DiLoCo: momentum", lambda number: 0 <= number < 1, "from 0 to below 1")
        if self.mix is not None:
            _check_real(self.mix, "DiLoCo: mix", lambda number: 0 <= number <= 1, "from 0 to 1")
        _resolved(self.compression)

    def rule(self) -> OuterRule:
        mix = self.mix
        if mix is None:
            mix = 0.5 if self.delay else 0.0
        compression = _resolved(self.compression)
        return OuterRule(
            self.sync_every, self.lr, self.momentum, self.fragments, self.delay, mix, compression, repr(self)
        )


AnyOuter: TypeAlias = LocalSGD | DiLoCo
"""What ``outer=`` takes."""


def compared_words(outer: AnyOuter | None) -> str:
    """Returns the words by which ranks compare ``outer=``: its repr, and what that leaves out of its compression."""
    words = repr(outer)
    if isinstance(outer, DiLoCo):
        return words.replace(repr(outer.compression), words_of_wires(outer.compression))
    return words


def _resolved(compression: object) -> OuterForm:
    if isinstance(compression, Codec):
        check_blocks(compression)
    if isinstance(compression, (Codec, TopK)):
        return compression
    if not isinstance(compression, LowRank):
        known = check_compression(compression)
        if isinstance(known, NoCompression | CastCompression):
            return known
    raise ValueError(
        f"DiLoCo: compression={shown(compression)} is no format of outer gradients: use hvd.Compression.none, .fp16, "
        ".bf16, .int8, .int4 or .topk(), or an hvd.Codec of your own"
    )


def _check_whole(value: object, what: str, least: int) -> int:
    number = whole_number(value)
    if number is None or not least <= number <= MOST:
        raise ValueError(f"{what}={shown(value)} is not a whole number of at least {least}, and {MOST} at most")
    return number


def _check_real(value: object, what: str, fits: Callable[[float], bool], words: str) -> None:
    number = real_number(value)
    if number is None or not fits(number):
        raise ValueError(f"{what}={shown(value)} is not {words}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments by which gradients are combined, equal on every rank."""

    compression: ResolvedCompression
    op: ReduceOp
    gradient_predivide_factor: float
    cap_bytes: int
    sparse_as_dense: bool
    step_on_arrival: bool = False
    # The user's factory of exchanges, if there is one.
    exchange: Callable[[], Exchange] | None = None
    # What is sent between hosts, if it is not the gradients, cast or not. Then there is no other compression.
    codec: Encoding | None = None
    # The global norm to which gradients are clipped, or None.
    max_norm: float | None = None
    # How hosts train apart, if they do.
    outer: AnyOuter | None = None
    # How ranks share the optimizer's work, if they do.
    shard: Sharing | None = None

    def compared(self, exchange: Exchange) -> dict[str, str]:
        """Returns the words of each argument that ranks compare. ``exchange`` was made by these settings."""
        return {
            "compression": words_of_wires(self.codec or self.compression),
            "exchange": repr(None if self.exchange is None else exchange),
            "op": self.op.name,
            "gradient_predivide_factor": repr(self.gradient_predivide_factor),
            "the bucket cap in bytes": repr(self.cap_bytes),
            "sparse_as_dense": repr(self.sparse_as_dense),
            "step_on_arrival": repr(self.step_on_arrival),
            "max_norm": repr(self.max_norm),
            "outer": compared_words(self.outer),
            "shard": "None" if self.shard is None else self.shard.describe(),
        }

    def of_wires(self) -> Reduction:
        """Returns the reduction to apply to the wires of a user's own compression."""
        predivide = self.gradient_predivide_factor if self.op is Average else 1.0
        return Reduction(self.op, 1.0 / predivide, predivide)

    def leaves_gradients(self, size: int) -> bool:
        """Whether gradients stay where autograd has put them, as on one rank without compression or exchange."""
        is_plain = self.compression is Compression.none and self.codec is None and self.exchange is None
        return size == 1 and is_plain and not (self.shard is not None and self.shard.master)

    def for_nonmember(self) -> Settings:
        """Returns the settings of a rank outside the process set, whose gradients stay bit-identical."""
        return replace(self, compression=Compression.none, op=Sum, exchange=None, codec=None, outer=None, shard=None)

    def scaling(self, dtype: torch.dtype, size: int) -> Scaling:
        """Returns the scaling of gradients of this dtype, before and after their sum over ``size`` ranks."""
        return self.scaling_of_wire(self.compression.wire_dtype(dtype.to_real()), size)

    def scaling_of_wire(self, dtype: torch.dtype, size: int) -> Scaling:
        """Returns the same for gradients that are sent in this dtype."""
        if self.op is not Average or size == 1:
            return Scaling()
        predivide = self.gradient_predivide_factor
        if predivide == 1.0 and is_narrow(dtype):
            # Scaled before the sum, so that the sum does not overflow unless its terms do.
            return Scaling(1.0 / size, float(size))
        return Scaling(1.0 / predivide, predivide)
