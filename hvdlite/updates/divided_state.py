"""
`DividedState`: the state of an optimizer of which each rank has that of its own pieces alone.

    the buckets that there are now ── follow ── Ownership of pieces; states move to their new owners
    a checkpoint ── load_state_dict ── follow: this rank's part is kept
                 ── consolidate: bucket by bucket, into CPU memory ── state_dict
"""

from __future__ import annotations

import copy
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..buckets.bucket import Bucket
from ..buckets.exchange import Links
from ..buckets.flags import RankAndSize
from ..buckets.shares import Sharing, master_dtype
from ..comm.group import Group
from ..comm.hierarchy import host_groups_of
from ..errors import GradientError
from ..log import log
from ..ops.base import raise_together
from ..outside_graphs import keep_outside_graphs
from ..steps.gradient_plan import GradientPlan
from .pieces import (
    MASTER,
    ParameterPiece,
    check_whole,
    gather_states,
    joined,
    pieces_of_rank,
    showing,
    slice_state,
    without_idle_master,
)
from .update import Averages


class Ownership:
    """Which rank updates which pieces of some buckets. By default there are none: nothing has been divided yet."""

    def __init__(
        self, buckets: Sequence[Bucket] = (), sharers: RankAndSize | None = None, *, masters: bool = False
    ) -> None:
        self.buckets = list(buckets)
        self.sharers = RankAndSize() if sharers is None else sharers
        """This rank among those that share the work, and how many there are."""
        self.pieces = [
            [
                pieces_of_rank(bucket, rank, masters=masters and rank == self.sharers.rank)
                for rank in range(self.sharers.size)
            ]
            for bucket in buckets
        ]
        """By bucket and rank."""
        self.own = [piece for of_ranks in self.pieces for piece in of_ranks[self.sharers.rank]]
        """This rank's pieces of all buckets."""
        self.is_trivial = self.sharers.size == 1 and all(piece.is_parameter for piece in self.own)
        """Whether the optimizer updates all parameters themselves, as without ``shard``."""

    def owners(self) -> dict[int, list[tuple[int, int, int]]]:
        """Returns which ranks have which elements of a parameter, by its `id`."""
        owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for of_bucket in self.pieces:
            for rank, of_rank in enumerate(of_bucket):
                for piece in of_rank:
                    owners[id(piece.param)].append((rank, piece.start, piece.stop))
        return owners


class DividedState:
    """This rank's part of the state of one optimizer, in all worlds."""

    all: Group
    """The optimizer's ranks in this world, once `follow` was called."""
    sharing: Group
    """Those of them that share the optimizer's work."""

    def __init__(self, optimizer: torch.optim.Optimizer, averages: Averages, shard: Sharing) -> None:
        self.ownership = Ownership()
        """Who has which pieces, as of the last `follow`."""
        self._optimizer = optimizer
        self._averages = averages
        self.shard = shard
        self._links: Links | None = None
        # What `consolidate` has made for the next checkpoint, until the next step: states by parameter.
        self._whole: dict[Tensor, dict[str, Any]] | None = None
        # States of parameters that have left the groups, as long as the program has these.
        self._gone = WeakTensorKeyDictionary()
        # Whether a checkpoint was loaded, of which `_take_in` has not kept this rank's part yet.
        self._has_loaded = False
        self._has_told = False

    @property
    def _name(self) -> str:
        return self._averages.name

    def _present(self) -> set[int]:
        """Returns the `id` of each parameter that is in the groups. Buckets follow these only in the next step."""
        return {id(param) for group in self._optimizer.param_groups for param in group["params"]}

    # -- in the world and the buckets that there are now

    def follow(self) -> None:
        """Divides the buckets that there are now. Every rank must call it between two steps; it waits for all."""
        self._whole = None
        plan, links = self._averages.step.plan, self._averages.engine.connected()
        if links is not self._links:
            self._enter(links.all, plan.sharers)
            self._links = links
        if self.ownership.sharers != plan.sharers or self.ownership.buckets != plan.layout.buckets:
            self._move(self._owned(plan))
        self._take_in()

    def _owned(self, plan: GradientPlan) -> Ownership:
        return Ownership(plan.layout.buckets, plan.sharers, masters=self.shard.master)

    def _enter(self, everyone: Group, sharers: RankAndSize) -> None:
        """Goes on in another world, if all ranks have the same parts there."""
        state, earlier = self._optimizer.state, self.ownership.sharers
        has_state = self.holds_parts and any(piece.state_of(state) for piece in self.ownership.own)
        told = [has_state, earlier.rank, earlier.size, sharers.rank, sharers.size]
        of_all = everyone.all_gather_json(told, f"dividing the state of {self._name}")
        if any(has for has, *_ in of_all):
            for group_rank, (_, *earlier_and_now) in enumerate(of_all):
                if earlier_and_now[:2] != earlier_and_now[2:]:
                    raise GradientError(
                        f"the state of {self._name} is divided by shard={self.shard.scope!r} among the ranks of a "
                        f"world that has been shut down, and {everyone.describe_rank(group_rank)} had another part "
                        "there, or none: call consolidate_state_dict() on all ranks before hvd.shutdown(), save "
                        "state_dict() on one, and load it on all ranks after hvd.init()"
                    )
        else:
            states = self._by_parameter()
            state.clear()
            state.update(states)
            self.ownership = Ownership()
        self.all = self.sharing = everyone
        if sharers.size == 1:
            self.sharing = everyone.alone()
        elif sharers.size < everyone.size:
            token = everyone.all_gather_json(uuid.uuid4().hex, f"opening the hosts of {self._name}")[0]
            host_groups = host_groups_of(everyone.rank, everyone.hosts)
            assert host_groups is not None, "there are ranks of a host that share"
            within = host_groups.within
            self.sharing = everyone.part(within, token=f"{token}.sharing.{within[0]}")

    def _move(self, ownership: Ownership) -> None:
        """Goes on with this one. States of pieces that become others' move there, bucket by bucket."""
        owners, earlier = ownership.owners(), self.ownership.owners()
        # By the parameter itself: one that has come may have the name of one that has gone.
        known = {(id(piece.param), piece.start, piece.stop): piece for piece in self.ownership.own}
        for piece in ownership.own:
            if (earlier_piece := known.pop((id(piece.param), piece.start, piece.stop), None)) is not None:
                piece.use(earlier_piece.tensor)
        for number, of_ranks in enumerate(self.ownership.pieces):
            params = {piece.name: piece.param for pieces in of_ranks for piece in pieces}
            # Those that have left the groups may come back.
            moving = {name for name, param in params.items() if owners.get(id(param)) != earlier[id(param)]}
            if moving:
                own = [piece for piece in of_ranks[ownership.sharers.rank] if piece.name in moving]
                what = f"moving the state of bucket {number} ({self._name})"
                parts = gather_states(own, self._optimizer.state, self.sharing, what, keeps=True)
                for name, of_all in parts.items():
                    param, whole = params[name], joined(name, params[name], of_all)
                    if whole and id(param) in owners:
                        self._optimizer.state[param] = self._there(param, whole)
                    elif whole:
                        self._gone[param] = whole
        for piece in known.values():
            if not piece.is_parameter:
                self._optimizer.state.pop(piece.tensor, None)
        self.ownership = ownership

    def _there(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state from CPU memory with its tensors on the devices where the optimizer keeps them."""
        group = next((each for each in self._optimizer.param_groups if any(p is param for p in each["params"])), {})
        # As in torch.optim.Optimizer.load_state_dict.
        stays = () if group.get("capturable") or group.get("fused") else ("step",)
        return {
            key: value.to(param.device) if isinstance(value, Tensor) and key not in stays else value
            for key, value in state.items()
        }

    def _params(self) -> list[Tensor]:
        return [each.param for bucket in self.ownership.buckets for each in bucket.states]

    def _whole_states(self) -> list[tuple[Tensor, ParameterPiece | None]]:
        """Returns the parameters whose whole state this rank has and should not have, each with its piece, if any."""
        piece_of = {id(piece.param): piece for piece in self.ownership.own}
        # Not those of which the program has only asked for the state, which makes an empty one.
        having = [(param, piece_of.get(id(param))) for param in self._params() if self._optimizer.state.get(param)]
        return [(param, piece) for param, piece in having if piece is None or not piece.is_parameter]

    def _take_in(self) -> None:
        """Replaces the states of whole parameters, as a checkpoint has them, by copies of this rank's part."""
        state = self._optimizer.state
        for param in self._params() if self._gone else ():
            if param in self._gone:
                state[param] = self._there(param, self._gone[param])
                del self._gone[param]
        for param, piece in self._whole_states():
            whole = state.pop(param)
            if piece is not None:
                state[piece.tensor] = piece.take_over(slice_state(piece, whole, type(self._optimizer).__name__))
        if self._has_loaded:
            self._has_loaded = False
            for key, value in state.items():
                # PyTorch's method has taken over the tensors of the checkpoint.
                state[key] = copy.deepcopy(value)

    # -- checkpoints

    @property
    def holds_parts(self) -> bool:
        """Whether this rank has its part of the optimizer's state alone, rather than a state that was loaded."""
        return self.ownership.sharers.size > 1 and not self._has_loaded and not self._whole_states()

    def state_dict(self, *, whole_for: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the optimizer's state dict; where ranks share it, without states of parameters, and this rank's.

        Raises ValueError with the name ``whole_for``, of what needs all of it, if that is not there.
        """
        optimizer, present = self._optimizer, self._present()
        if self._whole is not None:
            whole = {param: state for param, state in self._whole.items() if id(param) in present}
            with showing(optimizer, {**self._others(), **whole}):
                return optimizer.state_dict(), {}
        if not self.holds_parts:
            with showing(optimizer, self._by_parameter()):
                return optimizer.state_dict(), {}
        if whole_for is not None:
            raise ValueError(
                f"{whole_for}: with shard={self.shard.scope!r} this rank has a part alone of the "
                f"state of {self._name}: call optimizer.consolidate_state_dict(to=None) on all ranks before"
            )
        parts = {
            piece.name: [piece.start, piece.stop, state]
            for piece in self.ownership.own
            if id(piece.param) in present and (state := piece.state_of(optimizer.state))
        }
        if parts and not self._has_told:
            self._has_told = True
            log.warning(
                "shard=%r: state_dict() has this rank's part of the state of %s, which only the same rank of as many "
                "can load: call consolidate_state_dict() on all ranks before, or use hvd.save_checkpoint",
                self.shard.scope, self._name,
            )  # fmt: skip
        with showing(optimizer, self._others()):
            state = optimizer.state_dict()
        sharers = self.ownership.sharers
        return state, {"scope": self.shard.scope, "rank": sharers.rank, "size": sharers.size, "parts": parts}

    def _others(self) -> dict[Any, Any]:
        """Returns the entries of the optimizer's state whose keys are not parameters."""
        return {key: value for key, value in self._optimizer.state.items() if not isinstance(key, Tensor)}

    def complete_pattern(self) -> None:
        """Has the state that the optimizer's first step has made, on each rank alone, be as that of later steps."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for param in params if self.shard.master else ():
            if param.requires_grad and master_dtype(param.dtype) != param.dtype:
                state = self._optimizer.state[param]
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dtype == param.dtype:
                        state[key] = value.float()
                state[MASTER] = param.detach().float()

    def _by_parameter(self) -> dict[Any, Any]:
        """Returns the state of an optimizer of which this rank has all, with parameters as keys."""
        states = {key: value for key, value in self._optimizer.state.items() if value}
        for piece in () if self._has_loaded or self._whole_states() else self.ownership.own:
            if not piece.is_parameter:
                state = without_idle_master(piece.param, piece.state_of(states))
                states.pop(piece.tensor, None)
                if state:
                    states[piece.param] = state
        return states

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Loads this rank's part of a state, or the state of an optimizer that no ranks share."""
        self._whole = None
        self._gone.clear()
        if not own:
            check_whole(self._optimizer, state, slices=self.shard.slices)
            self._optimizer.load_state_dict(state)
            if self.shard.master:
                # PyTorch's method has made the parameters' dtype of it.
                params = [param for group in self._optimizer.param_groups for param in group["params"]]
                numbers = [number for group in state["param_groups"] for number in group["params"]]
                for number, param in zip(numbers, params, strict=True):
                    if number in state["state"]:
                        self._optimizer.state[param] = self._there(param, dict(state["state"][number]))
            self._has_loaded = True
            return
        plan, ownership, parts = self._averages.step.plan, self.ownership, own["parts"].items()
        sharers, keys = plan.sharers, {(name, start, stop) for name, (start, stop, _) in parts}
        present = self._present()
        piece_of = {(each.name, each.start, each.stop): each for each in ownership.own if id(each.param) in present}
        if ownership.sharers != sharers or not keys <= piece_of.keys():
            ownership = self._owned(plan)
            piece_of = {(piece.name, piece.start, piece.stop): piece for piece in ownership.own}
        fits = (own["scope"], own["rank"], own["size"]) == (self.shard.scope, sharers.rank, sharers.size)
        if not fits or not keys <= piece_of.keys():
            raise ValueError(
                f"the checkpoint has the part of an optimizer's state of rank {own['rank']} of {own['size']} with "
                f"shard={own['scope']!r}, and this is rank {sharers.rank} of {sharers.size} with "
                f"shard={self.shard.scope!r}, or another model: load on each rank what it has saved, or call "
                "consolidate_state_dict() on all ranks before state_dict() is saved"
            )
        self._optimizer.load_state_dict(state)
        self.ownership, self._has_loaded = ownership, False
        for name, (start, stop, part) in parts:
            piece = piece_of[name, start, stop]
            self._optimizer.state[piece.tensor] = piece.take_over(self._there(piece.param, copy.deepcopy(part)))

    def consolidate(self, *, keeps: bool) -> None:
        """Makes the next `state_dict` that of all ranks, where ``keeps``. Every rank must call it; it waits for all."""
        self.follow()
        if self.sharing.size == 1:
            return
        whole: dict[Tensor, dict[str, Any]] = {}
        failure: Exception | None = None
        for number, (bucket, pieces) in enumerate(zip(self.ownership.buckets, self.ownership.pieces, strict=True)):
            what = f"consolidating the state of bucket {number} ({self._name})"
            own = pieces[self.ownership.sharers.rank]
            param_of = {each.name: each.param for each in bucket.states}
            try:
                parts = gather_states(own, self._optimizer.state, self.sharing, what, keeps=keeps)
                for name, of_all in parts.items():
                    if state := joined(name, param_of[name], of_all):
                        whole[param_of[name]] = state
            except Exception as error:  # noqa: BLE001 - one of this host, or of what keeps the state: others wait
                failure = failure or error
        raise_together(self.all, failure, f"consolidating the state of {self._name}")
        self._whole = whole if keeps else None


keep_outside_graphs(globals())
