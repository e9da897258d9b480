"""
`ShardedUpdate`: each rank updates its own part of the parameters, and has the optimizer's state of that part alone.

    averages of this rank's part ── param_groups narrowed to its pieces ── the optimizer's step
                                 ── all-gather of the parameters, bucket by bucket

A *piece* is what a rank updates of one parameter: a flat `torch.nn.Parameter` in the memory of that parameter, or the
parameter itself if it is whole. The optimizer's state has pieces as keys. The parameter groups have whole parameters
but during the step. `divided_state` makes pieces of a state, and a state of pieces.

This is the first stage of ZeRO (arXiv 1910.02054), with parts of buckets as in Megatron's distributed optimizer.
"""

from __future__ import annotations

import copy
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..buckets.bucket import Bucket
from ..buckets.flags import RankAndSize
from ..buckets.shares import Sharing
from ..comm.flat_bytes import mark_written
from ..comm.group import Group
from ..comm.hierarchy import host_groups_of
from ..errors import GradientError
from ..log import log
from ..ops.failures import raise_together
from ..outside_graphs import keep_outside_graphs
from ..steps.gradient_plan import MOST_GATHERS
from ..steps.step import Arrived, Step
from ..steps.step_world import OptimizerEngine
from .clipping import NormClipper
from .divided_state import ParameterPiece, check_whole, gather_states, joined, pieces_of, showing, slice_state
from .update import narrowed


class SharedAverages(Protocol):
    """The `Reducer`, as this update uses it."""

    @property
    def step(self) -> Step:
        """The step of the current world."""

    @property
    def engine(self) -> OptimizerEngine:
        """The optimizer's own engine in the current world."""

    @property
    def name(self) -> str:
        """The optimizer's name in messages, equal on all ranks."""


class ShardedUpdate:
    """Updates this rank's part of the parameters of one optimizer, in all worlds."""

    arrived: Arrived | None = None

    def __init__(
        self, optimizer: torch.optim.Optimizer, reducer: SharedAverages, clipper: NormClipper | None, shard: Sharing
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._clipper = clipper
        self._shard = shard
        # The optimizer's ranks in this world, and those of them that share its work.
        self._all: Group | None = None
        self._sharing: Group | None = None
        # Of which rank the pieces are, of how many.
        self._sharers = RankAndSize()
        # The buckets that are divided, and for each of them the pieces of all ranks.
        self._buckets: list[Bucket] = []
        self._pieces: list[list[list[ParameterPiece]]] = []
        # What `consolidate` has made for the next checkpoint, until the next step: states by parameter.
        self._whole: dict[Tensor, dict[str, Any]] | None = None
        # States of parameters that have left the groups, as long as the program has these.
        self._gone = WeakTensorKeyDictionary()
        self._has_told = False
        # In this step: for each bucket, whether any rank has had a gradient of it.
        self._used: list[bool] = []
        # Whether `_take_in` has seen what was loaded last, and has left this rank's part.
        self._has_parts = False
        # Whether a checkpoint was loaded that `_take_in` has not seen yet.
        self._has_loaded = False

    @property
    def _name(self) -> str:
        return self._reducer.name

    def _own(self) -> Iterator[tuple[Bucket, ParameterPiece]]:
        """Yields this rank's pieces, with their buckets."""
        for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
            for piece in pieces[self._sharers.rank]:
                yield bucket, piece

    def _present(self) -> list[ParameterPiece]:
        """Returns this rank's pieces of parameters that are still there. New buckets are divided in the next step."""
        ids = {id(state.param) for state in self._reducer.step.plan.layout.states.values()}
        return [piece for _, piece in self._own() if id(piece.param) in ids]

    # -- who has which pieces

    def follow(self) -> None:
        """Divides the buckets that there are now. Every rank must call it between two steps; it waits for all."""
        plan = self._reducer.step.plan
        everyone = self._reducer.engine.connected().all
        if everyone is not self._all:
            self._enter(everyone, plan.sharers)
        buckets = plan.layout.buckets
        if len(buckets) != len(self._buckets) or any(a is not b for a, b in zip(buckets, self._buckets, strict=True)):
            self._divide(buckets)
        self._take_in()

    def _enter(self, everyone: Group, sharers: RankAndSize) -> None:
        """Goes on in another world, if all ranks have the same parts there."""
        state = self._optimizer.state
        has_state = self.holds_parts and any(state.get(piece.tensor) for _, piece in self._own())
        told = [has_state, self._sharers.rank, self._sharers.size, sharers.rank, sharers.size]
        of_all = everyone.all_gather_json(told, f"dividing the state of {self._name}")
        if any(has for has, *_ in of_all):
            for group_rank, (_, *earlier_and_now) in enumerate(of_all):
                if earlier_and_now[:2] != earlier_and_now[2:]:
                    raise GradientError(
                        f"the state of {self._name} is divided by shard={self._shard.scope!r} among the ranks of a "
                        f"world that has been shut down, and {everyone.describe_rank(group_rank)} had another part "
                        "there, or none: call consolidate_state_dict() on all ranks before hvd.shutdown(), save "
                        "state_dict() on one, and load it on all ranks after hvd.init()"
                    )
        else:
            self._buckets, self._pieces = [], []
        self._all, self._sharers = everyone, sharers
        self._sharing = everyone
        if sharers.size == 1:
            self._sharing = everyone.alone()
        elif sharers.size < everyone.size:
            token = everyone.all_gather_json(uuid.uuid4().hex, f"opening the hosts of {self._name}")[0]
            host_groups = host_groups_of(everyone.rank, everyone.hosts)
            assert host_groups is not None, "there are ranks of a host that share"
            within = host_groups.within
            self._sharing = everyone.part(within, token=f"{token}.sharing.{within[0]}")

    def _divide(self, buckets: Sequence[Bucket]) -> None:
        """Makes the pieces of these buckets. States of pieces that become others' move there, bucket by bucket."""
        made = [[pieces_of(bucket, rank) for rank in range(self._sharers.size)] for bucket in buckets]
        owners, earlier = _owners(made), _owners(self._pieces)
        # By the parameter itself: one that has come may have the name of one that has gone.
        known = {(id(piece.param), piece.start, piece.stop): piece for _, piece in self._own()}
        rank = self._sharers.rank
        for piece in (piece for pieces in made for piece in pieces[rank]):
            if (earlier_piece := known.pop((id(piece.param), piece.start, piece.stop), None)) is not None:
                piece.use(earlier_piece.tensor)
        for number, of_ranks in enumerate(self._pieces):
            params = {piece.name: piece.param for pieces in of_ranks for piece in pieces}
            # Those that have left the groups may come back.
            moving = {name for name, param in params.items() if owners.get(id(param)) != earlier[id(param)]}
            if moving:
                own = [piece for piece in of_ranks[rank] if piece.name in moving]
                what = f"moving the state of bucket {number} ({self._name})"
                assert self._sharing is not None, "`follow` has entered a world"
                parts = gather_states(own, self._optimizer.state, self._sharing, what, keeps=True)
                for name, of_all in parts.items():
                    param, whole = params[name], joined(name, params[name], of_all)
                    if id(param) in owners:
                        self._optimizer.state[param] = self._there(param, whole)
                    else:
                        self._gone[param] = whole
        for piece in known.values():
            if not piece.is_whole:
                self._optimizer.state.pop(piece.tensor, None)
        self._buckets, self._pieces = list(buckets), made

    def _there(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state in CPU memory where the optimizer keeps that of this parameter."""
        group = next((each for each in self._optimizer.param_groups if any(p is param for p in each["params"])), {})
        # As in torch.optim.Optimizer.load_state_dict.
        stays = () if group.get("capturable") or group.get("fused") else ("step",)
        return {
            key: value.to(param.device) if isinstance(value, Tensor) and key not in stays else value
            for key, value in state.items()
        }

    def _whole_states(self) -> list[tuple[Tensor, ParameterPiece | None]]:
        """Returns parameters of whose state this rank has all, and should have its piece's alone; and that piece."""
        state, mine = self._optimizer.state, {id(piece.param): piece for _, piece in self._own() if piece.is_whole}
        sliced = {id(piece.param): piece for _, piece in self._own() if not piece.is_whole}
        params = [each.param for bucket in self._buckets for each in bucket.states]
        # Not those of which the program has only asked for the state, which makes an empty one.
        return [(param, sliced.get(id(param))) for param in params if id(param) not in mine and state.get(param)]

    def _take_in(self) -> None:
        """Keeps a copy of this rank's part of states of whole parameters, as a checkpoint has them, and no other."""
        state = self._optimizer.state
        for bucket in self._buckets if self._gone else ():
            for each in bucket.states:
                if each.param in self._gone:
                    state[each.param] = self._there(each.param, self._gone[each.param])
                    del self._gone[each.param]
        for param, piece in self._whole_states():
            whole = state.pop(param)
            if piece is not None:
                state[piece.tensor] = slice_state(piece, whole, type(self._optimizer).__name__)
        self._has_parts = self._sharers.size > 1
        if self._has_loaded:
            self._has_loaded = False
            for key, value in state.items():
                # PyTorch's method has taken over the tensors of the checkpoint.
                state[key] = copy.deepcopy(value)

    # -- a step

    def prepare(self, params: Sequence[Tensor]) -> None:
        """Gives the pieces of ``params`` their averages, clipped, if they are to be clipped. It waits for all ranks."""
        self._whole = None
        self.follow()
        if self._sharers.size == 1:
            if self._clipper is not None:
                self._clipper.clip(params)
            return
        self._used = [bucket.collect() for bucket in self._buckets]
        for piece in (piece for of_ranks in self._pieces for pieces in of_ranks for piece in pieces):
            # An error is one of all ranks.
            piece.refresh()
        present = {id(param) for param in params}
        having = []
        for bucket, piece in self._own():
            if not piece.is_whole:
                piece.tensor.grad = None if piece.param.grad is None else piece.of(bucket.memory.gradients)
            if piece.tensor.grad is not None and id(piece.param) in present:
                having.append(piece.tensor)
        if self._clipper is not None:
            self._clip(self._clipper, having)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates this rank's part of the parameters; then all ranks gather them. It waits for all ranks."""
        loss: float | None = None
        if closure is not None:
            # It needs whole parameters, and an optimizer would call it before it looks at any.
            with torch.enable_grad():
                loss = closure()
        if self._sharers.size == 1:
            own_loss = self._optimizer.step()
            return own_loss if closure is None else loss
        tensor_of = {id(piece.param): piece.tensor for _, piece in self._own()}
        groups = self._optimizer.param_groups
        parts = [[tensor_of[id(param)] for param in group["params"] if id(param) in tensor_of] for group in groups]
        with narrowed(groups, parts), self._failing_together():
            own_loss = self._optimizer.step()
        for _, piece in self._own():
            piece.tensor.grad = None
        self._gather_parameters()
        # Of other ranks' parts they are not averages.
        self._reducer.step.plan.drop_gradients()
        return own_loss if closure is None else loss

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Makes an error of this rank's own step one of all ranks, which would wait for its parameters."""
        try:
            yield
        except Exception as error:
            assert self._all is not None, "`follow` has entered a world"
            rank = self._all.describe_rank(self._all.rank)
            self._all.revoke(f"{rank} failed to update its part of {self._name}: {type(error).__name__}: {error}")
            raise

    def _clip(self, clipper: NormClipper, tensors: Sequence[Tensor]) -> None:
        # The squares of each rank's part are summed in float64, and these over the ranks in their order.
        squares = torch.tensor([clipper.squares_of(tensors)], dtype=torch.float64, device="cpu")
        assert self._sharing is not None, "`follow` has entered a world"
        self._sharing.all_reduce(squares, f"the norm of the gradients ({self._name})").wait()
        plans = [bucket.plan for bucket in self._buckets]
        dtypes = {plan.dtype.to_real() for plan in plans}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        clipper.clip_parts(tensors, squares.sqrt()[0].to(plans[0].device, dtype))

    @torch.no_grad()
    def _gather_parameters(self) -> None:
        """Gives all ranks the parameters. Waits for them."""
        group = self._sharing
        assert group is not None, "`follow` has entered a world"
        waits, written = deque[Callable[[], None]](), list[Tensor]()
        for number, (bucket, pieces) in enumerate(zip(self._buckets, self._pieces, strict=True)):
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
                    flat, counts, others, f"the parameters of bucket {number} ({self._name})"
                )
            )
            written += [state.param for state in bucket.states]
        while waits:
            waits.popleft()()
        mark_written(written)

    # -- states

    @property
    def holds_parts(self) -> bool:
        """Whether this rank has its part of the optimizer's state alone, rather than a state that was loaded."""
        return self._has_parts and not self._whole_states()

    def state_dict(self, *, whole_for: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the optimizer's state dict; where ranks share it, without states of parameters, and this rank's.

        Raises ValueError with the name ``whole_for``, of what needs all of it, if that is not there.
        """
        optimizer = self._optimizer
        if self._whole is not None:
            with showing(optimizer, {**self._others(), **self._whole}):
                return optimizer.state_dict(), {}
        if not self.holds_parts:
            with showing(optimizer, {key: value for key, value in optimizer.state.items() if value}):
                return optimizer.state_dict(), {}
        if whole_for is not None:
            raise ValueError(
                f"{whole_for}: with shard={self._shard.scope!r} this rank has a part alone of the "
                f"state of {self._name}: call optimizer.consolidate_state_dict(to=None) on all ranks before"
            )
        parts = {
            piece.name: [piece.start, piece.stop, dict(optimizer.state[piece.tensor])]
            for piece in self._present()
            if optimizer.state.get(piece.tensor)
        }
        if parts and not self._has_told:
            self._has_told = True
            log.warning(
                "shard=%r: state_dict() has this rank's part of the state of %s, which only the same rank of as many "
                "can load: call consolidate_state_dict() on all ranks before, or use hvd.save_checkpoint",
                self._shard.scope, self._name,
            )  # fmt: skip
        with showing(optimizer, self._others()):
            state = optimizer.state_dict()
        own = {"scope": self._shard.scope, "rank": self._sharers.rank, "size": self._sharers.size, "parts": parts}
        return state, own

    def _others(self) -> dict[Any, Any]:
        """Returns what the optimizer's state has of no parameter."""
        return {key: value for key, value in self._optimizer.state.items() if not isinstance(key, Tensor)}

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Loads this rank's part of a state, or the state of an optimizer that no ranks share."""
        self._whole = None
        self._gone.clear()
        if not own:
            check_whole(self._optimizer, state, slices=self._shard.slices)
            self._optimizer.load_state_dict(state)
            self._has_loaded, self._has_parts = True, False
            return
        plan = self._reducer.step.plan
        sharers, buckets, made = plan.sharers, self._buckets, self._pieces
        mine = {piece.name: piece for piece in self._present()}
        fits = (own["scope"], own["rank"], own["size"]) == (self._shard.scope, sharers.rank, sharers.size)
        keys = {(name, start, stop) for name, (start, stop, _) in own["parts"].items()}
        if self._sharers != sharers or not keys <= {piece.key for piece in mine.values()}:
            buckets = list(plan.layout.buckets)
            made = [[pieces_of(bucket, rank) for rank in range(sharers.size)] for bucket in buckets]
            mine = {piece.name: piece for pieces in made for piece in pieces[sharers.rank]}
        if not fits or not keys <= {piece.key for piece in mine.values()}:
            raise ValueError(
                f"the checkpoint has the part of an optimizer's state of rank {own['rank']} of {own['size']} with "
                f"shard={own['scope']!r}, and this is rank {sharers.rank} of {sharers.size} with "
                f"shard={self._shard.scope!r}, or another model: load on each rank what it has saved, or call "
                "consolidate_state_dict() on all ranks before state_dict() is saved"
            )
        self._optimizer.load_state_dict(state)
        self._has_parts = True
        self._sharers, self._buckets, self._pieces = sharers, buckets, made
        for name, (_, _, part) in own["parts"].items():
            tensor = mine[name].tensor
            self._optimizer.state[tensor] = self._there(tensor, copy.deepcopy(part))

    def consolidate(self, *, keeps: bool) -> None:
        """Makes the next `state_dict` that of all ranks, where ``keeps``. Every rank must call it; it waits for all."""
        self.follow()
        group = self._sharing
        assert group is not None, "`follow` has entered a world"
        if group.size == 1:
            return
        whole: dict[Tensor, dict[str, Any]] = {}
        failure: GradientError | None = None
        for number, (bucket, pieces) in enumerate(zip(self._buckets, self._pieces, strict=True)):
            what = f"consolidating the state of bucket {number} ({self._name})"
            parts = gather_states(pieces[group.rank], self._optimizer.state, group, what, keeps=keeps)
            param_of = {state.name: state.param for state in bucket.states}
            try:
                whole.update({param_of[name]: joined(name, param_of[name], of_all) for name, of_all in parts.items()})
            except GradientError as error:
                failure = error
        assert self._all is not None, "`follow` has entered a world"
        raise_together(self._all, failure, f"consolidating the state of {self._name}")
        self._whole = whole if keeps else None


def _owners(pieces: Sequence[Sequence[Sequence[ParameterPiece]]]) -> dict[int, list[tuple[int, int, int]]]:
    """Returns which ranks have which elements of a parameter, by its `id`."""
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for of_bucket in pieces:
        for rank, of_rank in enumerate(of_bucket):
            for piece in of_rank:
                owners[id(piece.param)].append((rank, piece.start, piece.stop))
    return owners


keep_outside_graphs(globals())
