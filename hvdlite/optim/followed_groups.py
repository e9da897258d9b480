"""
`FollowedGroups`: the named parameters that are averaged, which follow the wrapped optimizer's groups.

    optimizer.param_groups ── follow (in step) ── averaged from then on ── let_go (after it) ── what has left is not

Programs change the groups themselves, as in densification, and every rank must make the same changes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from ..outside_graphs import keep_outside_graphs
from .arguments import check_trained, names_of_new
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
        """Averages what has come to the groups.

        Call it only where all ranks come, and never where a step begins: a rank without a backward pass begins it in
        ``step()``, and would find in one change, and send in one bucket, what another has found in two. Raises
        GradientError if another optimizer averages the gradient of a new parameter in this step.
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

        A step does not begin with this: ranks begin it at different points, one with its first gradient and one without
        any when it steps, and all must make the same changes in the same step.
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
        """Returns the named parameters, and the names that share a bucket, of a copy, which has what is in the groups.

        It changes nothing here: a single rank may copy its optimizer.
        """
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


keep_outside_graphs(globals())
