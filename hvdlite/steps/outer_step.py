"""
`OuterStep`: wraps a step that averages gradients within each host, and lets hosts take outer steps together.

    the wrapped step: gradients ── averaged over the ranks of this host
    stepping: the optimizer's own step ── `OuterSteps`: the outer steps that are due
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..buckets.exchange import Links
from ..buckets.plan import Description
from ..comm.group import Group
from ..errors import GradientError
from .averaged_step import AveragedStep, WrappingStep
from .outer_steps import OuterSteps
from .step_world import Added, StepWorld


class OuterStep(WrappingStep):
    """Steps of hosts that train apart, and average their parameters after some of them."""

    def __init__(self, inner: AveragedStep, outer: OuterSteps, world: StepWorld) -> None:
        super().__init__(inner, world)
        self.outer = outer

    # -- parameters

    def add(self, added: Added) -> Description:
        """Adds parameters to both kinds of step."""
        description = self._inner.add(added)
        self.outer.add(added.params, added.groups)
        return description

    def drop_params(self, names: Collection[str]) -> None:
        """Raises GradientError, since the anchor has the values of these parameters."""
        raise GradientError(
            f"parameter {next(iter(names))!r} has left optimizer.param_groups, and "
            f"outer={self._world.settings.outer!r} has its value of the last outer step: make a new "
            "DistributedOptimizer on every rank"
        )

    # -- the engine

    @property
    def open_links(self) -> Callable[[Group], Links]:
        """Opens the links within and between hosts."""
        return self.outer.open

    @property
    def is_sending(self) -> bool:
        """Whether gradients, or outer gradients, are on their way."""
        return self._inner.is_sending or self.outer.is_sending()

    # -- around the optimizer's own step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for the optimizer's own step. At its end it begins and ends the outer steps that are due."""
        self._world.engine.require_usable()
        self._world.engine.connected()
        with self.outer.stepping():
            yield

    def sit_out(self, average_of_active: bool) -> bool:
        """Raises GradientError; see `why_no_join`."""
        raise GradientError(self.why_no_join())

    def why_no_join(self) -> str:
        """Says that hosts take outer steps together."""
        return (
            f"hvd.join() does not work with outer={self._world.settings.outer!r}: hosts take outer steps together, and "
            "one that has joined would not come to them. Give every rank as many batches, for example with "
            "drop_last=True in its sampler"
        )

    # -- what outlives it

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the parameters are the anchor, equal on all ranks."""
        self._world.engine.require_own("optimizer.averaged()")
        if self.outer.must_open:
            self._world.engine.connected()
        with self.outer.showing_anchor():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state of the outer steps."""
        self._world.engine.require_own("optimizer.state_dict() with outer=")
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, or begins a new interval if it is empty."""
        self.outer.load_state_dict(state)

    def consolidate(self, *, keeps: bool) -> None:
        self.outer.consolidate(keeps=keeps)
