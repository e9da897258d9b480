"""
Combines the changes that each rank's optimizer step has made, in place of gradients (Adasum's delta optimizer).

    parameters ── copied ── the optimizer's own step, with this rank's gradients ── difference: the delta
               ── exchange, one bucket after the other ── added to the copies ── parameters

The `Reducer` calls `StepDeltas`. Deltas have buckets like those of gradients. A bucket for which no rank has a gradient
is not exchanged. Deltas are dense even if gradients are sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, Gradients, Links
from ..buckets.flags import ParticipantCount
from ..buckets.parameter_check import ParameterCheck
from ..buckets.plan import BucketPlan
from ..buckets.step_trace import StepTrace
from ..comm.flat_bytes import flat_of, pieces_of


class StepDeltas:
    """The deltas of one optimizer. If parameters are equal on all ranks before the first step, they stay equal."""

    def __init__(
        self, exchange: Exchange, trace: StepTrace, check: ParameterCheck, connect: Callable[[], Links], size: int
    ) -> None:
        """``connect`` returns the links to the other ranks. ``check`` runs before each step. ``size`` counts ranks."""
        self._exchange = exchange
        self._trace = trace
        self._check = check
        self._connect = connect
        self._size = size
        self._buckets: list[_Bucket] = []

    def add(self, plans: Sequence[BucketPlan], params: Mapping[str, Tensor]) -> None:
        """Adds parameters, behind the existing ones."""
        self._buckets += [_Bucket(plan, [params[piece.spec.name] for piece in plan.slices]) for plan in plans]

    def clear(self) -> None:
        """Lets go of all parameters."""
        self._buckets.clear()

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Divides the gradients by GradScaler's scale, and returns True if all ranks may step.

        If some rank has found a gradient that is not finite, returns False on every rank. Every rank must call it
        before its step, with None if there is no GradScaler. It waits for all ranks.
        """
        _, overflows = self._count([1, 0 if found_inf is None else int(found_inf.item() > 0)])
        if overflows:
            return False
        if grad_scale is not None:
            inverse = 1.0 / float(grad_scale)
            for bucket in self._buckets:
                for param in bucket.params:
                    if param.grad is not None:
                        param.grad.mul_(inverse)
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which each rank steps with its own gradients. At its end, combines the deltas of all ranks."""
        if self._size == 1:
            yield
            return
        self._compare(takes_part=True)
        for bucket in self._buckets:
            bucket.remember()
        yield
        self._combine()

    def sit_out(self) -> bool:
        """Takes part in one step of the other ranks with deltas of zero. Returns False if all ranks sat out.

        If the other ranks step, this rank's gradients are set to None, and its parameters change like theirs.
        """
        active, overflows = self._count([0, 0])
        if active and not overflows:
            self._compare(takes_part=False)
            for bucket in self._buckets:
                for param in bucket.params:
                    param.grad = None
            self._combine()
        return active > 0

    def _compare(self, *, takes_part: bool) -> None:
        group = self._connect().all
        self._check.begin(takes_part=takes_part)
        self._check.send(group)
        self._check.finish(group)

    def _combine(self) -> None:
        """Exchanges the deltas, and sets the parameters to their copies plus the result."""
        links = self._connect()
        with self._trace.synchronizing():
            needed = self._count([bucket.has_gradients for bucket in self._buckets])
            for number, (bucket, count) in enumerate(zip(self._buckets, needed, strict=True)):
                if count:
                    with self._trace.combining(number, f"the {self._exchange.word} of the {bucket.what}"):
                        bucket.combine(self._exchange, links, self._trace.name_of(number))
                bucket.forget()

    def _count(self, own: Sequence[int]) -> list[int]:
        """Returns the element-wise sums over all ranks. Waits for them."""
        counts = torch.tensor(own, dtype=torch.int32, device="cpu")
        if self._size > 1:
            links = self._connect()
            links.all.all_reduce(counts, f"an {self._exchange.word} step of {self._trace.optimizer}").wait()
        return [int(count) for count in counts.tolist()]


class _Bucket:
    """Parameters of one dtype and device whose deltas are sent together."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor]) -> None:
        self.params = params
        self.what = plan.describe().replace("gradients of", "deltas of", 1)
        self._plan = plan
        self._before: Tensor | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient, so that this rank's step may have changed it."""
        return any(param.grad is not None for param in self.params)

    def remember(self) -> None:
        """Copies the parameters, if a step may change them."""
        if any(param.requires_grad or param.grad is not None for param in self.params):
            self._before = flat_of(self.params)

    def forget(self) -> None:
        """Frees the copies."""
        self._before = None

    @torch.no_grad()
    def combine(self, exchange: Exchange, links: Links, name: str) -> None:
        """Exchanges the bucket's deltas, and updates its parameters. ``name`` is the bucket's name in messages."""
        before = flat_of(self.params) if self._before is None else self._before
        delta = flat_of(self.params).sub_(before)
        deltas = Gradients(
            self._plan, delta, lambda: self._pieces(delta), what=f"{self.what} ({name})", ranks=links.all.size
        )
        begun = exchange.begin(deltas, links)
        begun.wait()
        begun.finish(ParticipantCount.of_all(links.all.size))
        for param, piece in zip(self.params, self._pieces(before.add_(delta)), strict=True):
            param.copy_(piece)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        pieces = pieces_of(flat, [param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]
