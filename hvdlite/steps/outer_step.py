"""
`OuterStep`: wraps a step that averages gradients within each host, and lets hosts take outer steps together.

    the wrapped step: gradients ── averaged over the ranks of this host
    stepping: the optimizer's own step ── `OuterSteps`: the outer steps that are due
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.plan import Description
from ..comm.group import Group
from ..errors import GradientError
from .averaged_step import AveragedStep
from .kept_gradients import KeptGradients
from .outer_steps import OuterSteps
from .step import Arrived
from .step_world import Added, CarriedOver, StepWorld


class OuterStep:
    """Steps of hosts that train apart, and average their parameters after some of them."""

    steps_first: ClassVar[bool] = False
    kept: KeptGradients | None = None

    def __init__(self, inner: AveragedStep, outer: OuterSteps, world: StepWorld) -> None:
        self.plan = inner.plan
        self.outer = outer
        self._inner = inner
        self._world = world

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

    def opened(self, cap_bytes: int | None) -> None:
        """Plans the buckets of gradients for good."""
        self._inner.opened(cap_bytes)

    @property
    def is_sending(self) -> bool:
        """Whether gradients, or outer gradients, are on their way."""
        return self._inner.is_sending or self.outer.is_sending()

    # -- gradients, within this host

    def begin(self) -> None:
        """Begins a step of the wrapped kind."""
        self._inner.begin()

    def launch(self) -> None:
        """Sends full buckets."""
        self._inner.launch()

    def spoil(self) -> None:
        """Gives up the step's averages."""
        self._inner.spoil()

    def finish(self, update: Arrived | None, arrived: Arrived | None) -> None:
        """Waits for the ranks of this host, and leaves their averages in ``param.grad``."""
        self._inner.finish(update, arrived)

    def drop(self) -> None:
        """Finishes the step on the ranks of this host, and drops its averages."""
        self._inner.drop()

    def leave(self) -> None:
        """Ends the step, of which nothing is averaged, or gives it up."""
        self._inner.leave()

    def leave_world(self) -> None:
        """Gives up the step, since its world has been shut down."""
        self._inner.leave_world()

    @property
    def is_replaced(self) -> bool:
        """No optimizer goes on in a new world with the steps of the old one."""
        return False

    # -- around the optimizer's own step

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Returns whether GradScaler has found all gradients of this host finite, and divides them by its scale."""
        return self._inner.agree_to_step(grad_scale, found_inf)

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
        """Makes the next `state_dict` that of all ranks, where ``keeps``. Every rank must call it; it waits for all."""
        self.outer.consolidate(keeps=keeps)

    def carried_over(self, *, goes_on: bool) -> CarriedOver:
        """Returns what the wrapped step carries over: in a new world an interval begins."""
        return self._inner.carried_over(goes_on=goes_on)
