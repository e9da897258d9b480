"""
`ShardedUpdate`: each rank updates its own part of the parameters, and has the optimizer's state of that part alone.

    averages of this rank's part ── param_groups narrowed to its pieces ── the optimizer's step
                                 ── all-gather of the parameters, bucket by bucket

`DividedState` knows the pieces. The parameter groups have whole parameters but during the step.

This is the first stage of ZeRO (arXiv 1910.02054), with parts of buckets as in Megatron's distributed optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from ..buckets.shares import master_dtype
from ..comm.flat_bytes import mark_written
from ..outside_graphs import keep_outside_graphs
from ..steps.gradient_plan import MOST_GATHERS
from ..steps.step import Arrived
from .divided_state import DividedState
from .update import Averages, NormClipper, narrowed


class ShardedUpdate:
    """Updates this rank's part of the parameters of one optimizer, in all worlds."""

    arrived: Arrived | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        averages: Averages,
        states: DividedState,
        clipper: NormClipper | None,
    ) -> None:
        self._states = states
        self._optimizer = optimizer
        self._averages = averages
        self._clipper = clipper
        # In this step: for each bucket, whether any rank has had a gradient of it.
        self._used: list[bool] = []

    def prepare(self, params: Sequence[Tensor]) -> None:
        """Gives the pieces of ``params`` their averages, clipped, if they are to be clipped. It waits for all ranks."""
        self._states.follow()
        ownership = self._states.ownership
        if ownership.is_trivial:
            if self._clipper is not None:
                self._clipper.clip(params)
            return
        self._used = [bucket.collect() for bucket in ownership.buckets]
        for piece in (piece for of_ranks in ownership.pieces for of_rank in of_ranks for piece in of_rank):
            # An error is one of all ranks.
            piece.refresh()
        present = {id(param) for param in params}
        having = []
        for bucket, pieces in zip(ownership.buckets, ownership.pieces, strict=True):
            for piece in pieces[ownership.sharers.rank]:
                piece.take_average(bucket.memory.gradients)
                if piece.tensor.grad is not None and id(piece.param) in present:
                    having.append(piece.tensor)
        if self._clipper is not None:
            self._clip(self._clipper, having)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates this rank's part of the parameters; then all ranks gather them. It waits for all ranks."""
        if closure is not None:
            # It needs whole parameters, and an optimizer would call it before it looks at any.
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        if self._states.ownership.is_trivial:
            return self._optimizer.step()
        tensor_of = {id(piece.param): piece.tensor for piece in self._states.ownership.own}
        groups = self._optimizer.param_groups
        parts = [[tensor_of[id(param)] for param in group["params"] if id(param) in tensor_of] for group in groups]
        with narrowed(groups, parts), self._failing_together():
            own_loss = self._optimizer.step()
        for piece in self._states.ownership.own:
            piece.tensor.grad = None
            piece.write()
        self._gather_parameters()
        # Of other ranks' parts they are not averages.
        self._averages.step.plan.drop_gradients()
        return own_loss

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Makes an error of this rank's own step one of all ranks, which would wait for its parameters."""
        try:
            yield
        except Exception as error:
            everyone = self._states.all
            rank = everyone.describe_rank(everyone.rank)
            everyone.revoke(
                f"{rank} failed to update its part of {self._averages.name}: {type(error).__name__}: {error}"
            )
            raise

    def _clip(self, clipper: NormClipper, tensors: Sequence[Tensor]) -> None:
        # The squares of each rank's part are summed in float64, and these over the ranks in their order.
        squares = torch.tensor([clipper.squares_of(tensors)], dtype=torch.float64, device="cpu")
        self._states.sharing.all_reduce(squares, f"the norm of the gradients ({self._averages.name})").wait()
        plans = [bucket.plan for bucket in self._states.ownership.buckets]
        dtypes = {(master_dtype(plan.dtype) if self._states.shard.master else plan.dtype).to_real() for plan in plans}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        clipper.clip_parts(tensors, squares.sqrt()[0].to(plans[0].device if plans else "cpu", dtype))

    @torch.no_grad()
    def _gather_parameters(self) -> None:
        """Gives all ranks the parameters. Waits for them."""
        group, ownership = self._states.sharing, self._states.ownership
        if group.size == 1:
            mark_written([piece.param for piece in ownership.own])
            return
        waits, written = deque[Callable[[], None]](), list[Tensor]()
        for number, (bucket, pieces) in enumerate(zip(ownership.buckets, ownership.pieces, strict=True)):
            if not self._used[number]:
                continue
            if len(waits) == MOST_GATHERS:
                waits.popleft()()
            # The gradients have been used, and their memory may be the engine's own, which others can read.
            flat = bucket.memory.gradients
            others = []
            for rank, of_rank in enumerate(pieces):
                for piece in of_rank:
                    if rank == group.rank:
                        piece.of(flat).copy_(piece.values)
                    elif piece.values.numel():
                        others.append((piece.place, piece.values))
            counts = [stop - start for start, stop in pairwise(bucket.plan.bounds)]
            waits.append(
                group.begin_all_gather_of_parts(
                    flat, counts, others, f"the parameters of bucket {number} ({self._averages.name})"
                )
            )
            written += [state.param for state in bucket.states]
        while waits:
            waits.popleft()()
        mark_written(written)


keep_outside_graphs(globals())
