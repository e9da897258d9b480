"""
Attributes of Horovod's `DistributedOptimizer` that programs read, under Horovod's names.

    optimizer._parameter_names, ._handles, ._requires_update, .op, ... ── read from where hvdlite keeps it, at each look

Nothing is kept here, so that nothing can be out of date: dictionaries and sets are made anew at each look, and what a
program changes in one, it changes in its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..comm.reduce_op import ReduceOp
from ..compression.casts import AnyCompression
from ..errors import GradientError
from ..runtime.process_set import ProcessSet
from .arguments import check_positive_int
from .optimizer_proxy import OptimizerProxy
from .plan import can_have_gradient
from .reducer import Reducer
from .settings import Settings


class HorovodsAttributes(OptimizerProxy):
    """Has Horovod's attributes; whoever makes one sets what is declared here."""

    _reducer: Reducer
    _named: list[tuple[str, Tensor]]
    _skipping: bool
    # Whether the user has called `synchronize` since the last step.
    _synchronized: bool
    _given_settings: Settings
    _given_compression: AnyCompression
    _given_process_set: ProcessSet

    @property
    def op(self) -> ReduceOp:
        """How gradients are combined."""
        return self._given_settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        """By what an average is divided before the sum."""
        return self._given_settings.gradient_predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are averaged as dense ones."""
        return self._given_settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._given_process_set

    @property
    def _compression(self) -> AnyCompression:
        """The compression, as it was given."""
        return self._given_compression

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add to a gradient before it travels."""
        return self._reducer.backward_passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._reducer.backward_passes_per_step = check_positive_int(passes, "backward_passes_per_step")

    # Of older versions.
    _backward_passes_per_step = backward_passes_per_step

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter, in the order of the names."""
        return {param: name for name, param in sorted(self._named, key=_name)}

    @property
    def _requires_update(self) -> set[Tensor]:
        """The parameters that are trained."""
        return {param for _, param in self._named if param.requires_grad and can_have_gradient(param.dtype)}

    @property
    def _handles(self) -> dict[Tensor, tuple[None, None]]:
        """The parameters whose gradients have come since the last step, or `synchronize`.

        There is no handle to each, nor a context: gradients travel in buckets. An empty dictionary may be set where
        nothing is on its way.
        """
        return dict.fromkeys(self._reducer.passes_of(), (None, None))

    @_handles.setter
    def _handles(self, value: Mapping[Any, Any]) -> None:
        if value or self._reducer.has_arrivals:
            raise GradientError(
                "optimizer._handles was set while gradients are on their way between the ranks, or to what is none of "
                "these: call optimizer.synchronize(), and to drop them optimizer.zero_grad(), on every rank"
            )

    @property
    def _allreduce_delay(self) -> dict[Tensor, int]:
        """For each parameter, how many backward passes are still to come before its gradient travels."""
        passes_of, needed = self._reducer.passes_of(), self._reducer.backward_passes_per_step
        return {param: max(0, needed - passes_of.get(param, 0)) for _, param in sorted(self._named, key=_name)}

    @property
    def _should_synchronize(self) -> bool:
        """Whether ``step()`` waits for the averages itself, which it does but in `skip_synchronize`."""
        return not self._skipping

    @_should_synchronize.setter
    def _should_synchronize(self, value: bool) -> None:
        self._skipping = not value


def _name(entry: Sequence[Any]) -> str:
    name: str = entry[0]
    return name
