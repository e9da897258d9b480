"""
`OptimizerProxy`: wraps an optimizer, and forwards everything to it. It has Horovod's names besides.
`FollowedGroups`: the named parameters that are averaged, which follow the wrapped optimizer's groups.

    optimizer._parameter_names, ._handles, .op, ... ── computed from the reducer at each access, so never out of date
    optimizer.param_groups ── follow (in step) ── averaged from then on ── let_go (after it) ── what has left is not

Programs change the groups themselves, as in densification, and every rank must make the same changes. The subclass
`averaging_optimizer.AveragingOptimizer` averages.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..buckets.plan import can_have_gradient
from ..buckets.settings import Settings
from ..comm.reduce_op import ReduceOp
from ..compression.casts import AnyCompression
from ..errors import GradientError
from ..outside_graphs import keep_outside_graphs
from ..runtime.process_set import ProcessSet
from ..updates.divided_state import DividedState
from ..updates.sharded_update import ShardedUpdate
from ..updates.update import WholeUpdate
from .arguments import check_positive_int, check_trained, names_of_new
from .reducer import Reducer


class FollowedGroups:
    """The parameters of one optimizer that a `Reducer` averages, by name, and the names that share a bucket."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        named: Sequence[tuple[str, Tensor]],
        shared: Sequence[Sequence[str]],
    ) -> None:
        """Has the reducer average these parameters."""
        self._optimizer = optimizer
        self._reducer = reducer
        self.named = list(named)
        self.shared = shared
        reducer.add_params(named, shared)
        # The parameters of each group, as they were last followed.
        self._followed = self._members()

    def _members(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self._optimizer.param_groups]

    def _is_followed(self, members: list[list[Tensor]]) -> bool:
        return list(map(len, members)) == list(map(len, self._followed)) and all(
            map(is_, chain.from_iterable(members), chain.from_iterable(self._followed))
        )

    def follow(self) -> None:
        """Averages what has come to the groups. Raises GradientError if another optimizer averages it in this step.

        Call it only where all ranks come, and never where a step begins: a rank without a backward pass begins it in
        ``step()``, and would find in one change, and send in one bucket, what another has found in two.
        """
        if self._is_followed(self._members()):
            return
        new = check_trained(names_of_new(self._optimizer, self.named))
        if new:
            self._reducer.require_own_gradients(new)
            self.named = [*self.named, *new]
            self._reducer.add_params(new, are_new=True)

    def let_go(self) -> None:
        """Averages what has come to the groups, and lets go of what has left them; only between two steps.

        Ranks begin a step at different points, and all must make the same changes in the same step.
        """
        members = self._members()
        if self._is_followed(members):
            return
        self.follow()
        if gone := self.gone():
            self._reducer.drop_params(gone)
            self.named, self.shared = self._without(gone)
        self._followed = members

    def _without(self, gone: Container[str]) -> tuple[list[tuple[str, Tensor]], list[list[str]]]:
        named = [(name, param) for name, param in self.named if name not in gone]
        return named, [[name for name in names if name not in gone] for names in self.shared]

    def for_copy(self) -> tuple[list[tuple[str, Tensor]], list[list[str]]]:
        """Returns the named parameters of a copy, which has what is in the groups, and names that share a bucket."""
        named, shared = self._without(self.gone())
        return [*named, *check_trained(names_of_new(self._optimizer, self.named))], shared

    def gone(self) -> set[str]:
        """Returns the names of averaged parameters that are no longer in the groups, until the end of the step."""
        present = {id(param) for param in chain.from_iterable(self._members())}
        return {name for name, param in self.named if id(param) not in present}

    def present(self) -> list[Tensor]:
        """Returns the averaged parameters that are in the groups."""
        gone = self.gone()
        return [param for name, param in self.named if name not in gone]


class OptimizerProxy(torch.optim.Optimizer):
    """An optimizer, for LR schedulers, GradScaler and the like, that shares the wrapped one's state."""

    shard: str | None = None
    """Whose ranks share the optimizer's state: those of the ``"world"``, or of each ``"host"``; None: nobody's."""

    # The subclasses set these.
    _reducer: Reducer
    _update: WholeUpdate | ShardedUpdate
    _states: WholeUpdate | DividedState
    _groups: FollowedGroups
    _skipping: bool
    # Whether the user has called `synchronize` since the last step.
    _synchronized: bool
    _given_settings: Settings
    _given_compression: AnyCompression
    _given_process_set: ProcessSet

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Does not call Optimizer.__init__, which would create separate groups, state and hooks.
        self._optimizer = optimizer

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._optimizer.defaults = value

    def __getattr__(self, name: str) -> Any:
        # Attributes that the wrapped optimizer's own class adds.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # -- Horovod's attributes

    @property
    def op(self) -> ReduceOp:
        """The operation that combines gradients."""
        return self._given_settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor that is applied to gradients before the sum."""
        return self._given_settings.gradient_predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are averaged as dense ones."""
        return self._given_settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The process set whose ranks' gradients are averaged."""
        return self._given_process_set

    @property
    def _compression(self) -> AnyCompression:
        """The compression, as the user passed it."""
        return self._given_compression

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes that add to a gradient before it is averaged."""
        return self._reducer.state.passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._reducer.state.passes_per_step = check_positive_int(passes, "backward_passes_per_step")

    # The name in older versions of Horovod.
    _backward_passes_per_step = backward_passes_per_step

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter, in the order of the names."""
        return {param: name for name, param in sorted(self._groups.named, key=itemgetter(0))}

    @property
    def _requires_update(self) -> set[Tensor]:
        """The parameters that require a gradient."""
        return {param for _, param in self._groups.named if param.requires_grad and can_have_gradient(param.dtype)}

    @property
    def _handles(self) -> dict[Tensor, tuple[None, None]]:
        """The parameters that got a gradient since the last step or `synchronize`, as keys; values are pairs of None.

        A program may set an empty dictionary while no gradient is being averaged.
        """
        return dict.fromkeys(self._reducer.step.plan.layout.passes(), (None, None))

    @_handles.setter
    def _handles(self, value: Mapping[Any, Any]) -> None:
        if value or self._reducer.step.plan.layout.ready():
            raise GradientError(
                "optimizer._handles may only be set to an empty dict, and not while gradients are being averaged: call "
                "optimizer.synchronize() on every rank before, and optimizer.zero_grad() to drop the gradients"
            )

    @property
    def _allreduce_delay(self) -> dict[Tensor, int]:
        """The number of backward passes that each parameter still waits for before its gradient is averaged."""
        passes_of, needed = self._reducer.step.plan.layout.passes(), self._reducer.state.passes_per_step
        return {param: max(0, needed - passes_of.get(param, 0)) for param in self._parameter_names}

    @property
    def _should_synchronize(self) -> bool:
        """Whether ``step()`` waits for the averages itself. It does, except in `skip_synchronize`."""
        return not self._skipping

    @_should_synchronize.setter
    def _should_synchronize(self, value: bool) -> None:
        self._skipping = not value


keep_outside_graphs(globals())
