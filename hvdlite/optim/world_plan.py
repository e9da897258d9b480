"""
`WorldPlan`: what an optimizer's reducer has for the ranks of one world, and plans again in the next.

    init, new ranks ── settings ── exchange, outer steps ── layout of buckets ── weights, queue, sparse gradients
    first step      ── opening: links to the other ranks, autotune's cap ── buckets in the engine's memory

`Reducer` is its subclass, and averages gradients with what is planned here. After `hvd.shutdown` and `hvd.init` it
connects to the ranks that there are then; the state of the exchange, and autotune's cap, are kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, Links, TakesBackSteps
from ..buckets.flags import RankAndSize
from ..buckets.in_flight import BucketQueue
from ..buckets.layout import Layout
from ..buckets.plan import Description
from ..buckets.settings import Settings
from ..buckets.weights import Weights
from ..comm.engine import HasMemory
from ..comm.group import Group
from ..control.generation import Generation
from ..control.reducer_registry import Progress
from ..environment import CheckParameters
from ..errors import GradientError, NotInitializedError
from ..exchanges.exchange_choice import exchange_of
from ..exchanges.exchange_state import ExchangeState
from ..exchanges.sparse_gather import SparseParameters
from ..runtime.survival import Survival
from ..steps.outer_steps import outer_steps_of
from ..steps.step_deltas import StepDeltas
from ..steps.surviving_step import Buffers, SurvivingSteps
from .gradient_hooks import GradientHooks
from .opening import Arguments, Opened, Opening, Submit, Tune


@dataclass(frozen=True, slots=True)
class Connection:
    """The ranks that gradients are averaged over, and the settings, while the world's group is open.

    ``check_parameters`` is as in `parameter_check.ParameterCheck`. ``world`` is the group of all ranks, and ``submit``
    the method of the world's controller. Both are None if there is no world. ``survival`` is the world's, and None
    unless a step goes on where a rank is lost.
    """

    group: Group
    generation: Generation
    settings: Settings
    check_parameters: CheckParameters = False
    world: Group | None = None
    submit: Submit | None = None
    survival: Survival | None = None


@dataclass(frozen=True, slots=True)
class _Added:
    """Parameters that were added together, by name; the names that share a bucket, and those that were not frozen.

    The last are kept, since a new world may begin within a step, in which ranks have frozen some for a moment.
    """

    params: dict[str, Tensor]
    groups: list[list[str]]
    trainable: frozenset[str]

    def without(self, names: Collection[str]) -> _Added:
        """Returns the same without the parameters of these names."""
        params = {name: param for name, param in self.params.items() if name not in names}
        return replace(self, params=params, groups=[[n for n in group if n not in names] for group in self.groups])


class TuneNamed(Protocol):
    """Autotune's function that chooses the cap, in bytes, for these parameters. It waits for all ranks."""

    def __call__(self, group: Group, /, *, named: Sequence[tuple[str, Tensor]]) -> int: ...


# The arguments that the ranks compare, and autotune, or None.
Described = tuple[Arguments, TuneNamed | None]


class WorldPlan(GradientHooks):
    """Buckets for the gradients of some parameters, an exchange, and links to the ranks of the current world.

    A subclass handles the gradients.
    """

    def __init__(self, connect: Callable[[], Connection], backward_passes_per_step: int = 1) -> None:
        """``connect`` returns the ranks of the current world. It may raise NotInitializedError if there is none."""
        connection = connect()
        super().__init__(
            connection.group,
            connection.generation,
            backward_passes_per_step,
            connection.check_parameters,
            connection.submit,
        )
        self._connect = connect
        self._arguments: Arguments | None = None
        self._describe: Callable[[Settings, Exchange], Described] | None = None
        # Autotune's function that chooses the cap, and the hosts of the ranks that it last chose one for.
        self._tune: TuneNamed | None = None
        self._tuned_for: tuple[str, ...] | None = None
        # What each `add_params` has added.
        self._added: list[_Added] = []
        # In how many worlds it has been so far.
        self._worlds = 0
        # `Survival.beginnings` in the world that is planned for.
        self._beginnings = 0
        # None where no step survives the loss of a rank.
        self._surviving: SurvivingSteps | None = None
        self._plan(connection)
        self.exchange_state = ExchangeState(self.exchange)

    def _plan(self, connection: Connection) -> None:
        """Creates the exchange and an empty layout, for the connection's settings and ranks."""
        settings, group = connection.settings, connection.group
        self.settings = settings
        self.outer = outer_steps_of(
            settings,
            group,
            self._trace,
            compares=connection.check_parameters is not False,
            is_later=self._worlds > 0,
        )
        self._worlds += 1
        # The ranks that average gradients in every step.
        self._inner = RankAndSize(group.rank, group.size) if self.outer is None else self.outer.inner
        self.exchange = exchange_of(settings, self._inner.size)
        # The same, if its state changes with each step and can go back to the state before; else None.
        self._stateful_exchange = self.exchange if isinstance(self.exchange, TakesBackSteps) else None
        self._world = connection.world
        if connection.survival is None:
            self._surviving = None
        else:
            self._beginnings = connection.survival.beginnings
            self._surviving = self._surviving or SurvivingSteps(connection.survival)
            self._surviving.join(connection.survival, self.exchange, group.engine)
        self._links: Links | None = None
        # Whether the current step is the first, which plans buckets and allocates memory before the engine is open.
        self._is_provisional = False
        self.weights = Weights(self._inner)
        self._lay_out()
        self._deltas: StepDeltas | None = None
        if self.exchange.after_step:
            self._deltas = StepDeltas(self.exchange, self._trace, self._check, self.connected, group.size)

    def _lay_out(self) -> None:
        """Creates an empty layout, and the objects that work on it."""
        settings, size = self.settings, self._inner.size
        self._layout = Layout(
            ranks=self._inner,
            cap_bytes=settings.cap_bytes,
            scale_of=lambda dtype: self.exchange.scale_before(dtype, size),
            densify=settings.sparse_as_dense,
            memory=self._take_memory,
            stays=self.exchange.after_step or settings.leaves_gradients(size),
            aligned=self.exchange.aligned,
            weights=self.weights,
        )
        self._queue = BucketQueue(self.exchange, self._trace, self._check, size)
        self._sparse = SparseParameters(settings, self._layout, size)

    def follow_world(self, buffers: Buffers = ()) -> None:
        """Connects to the current world, if the old one has been shut down. Waits for no other rank.

        Gradients that were being averaged in the old world are dropped. The state of the exchange is kept. The new
        buckets use these ``buffers`` of the old ones, if their memory was kept.
        """
        if self._world is None or not self._world.is_closed:
            return
        try:
            connection = self._connect()
        except NotInitializedError:
            # The next collective raises an error that says so.
            return
        survival = connection.survival
        # Whether each world since this one has had only ranks of this one, which came to it within a step.
        goes_on = survival is not None and survival.beginnings == self._beginnings
        self._leave_world(goes_on=goes_on)
        weights = self.weights.state
        self._join(
            connection.group,
            connection.generation,
            connection.check_parameters,
            connection.submit,
            is_in_step=survival is not None and survival.all_are_in_step,
        )
        # Keep the cap that autotune has chosen.
        self._plan(replace(connection, settings=replace(connection.settings, cap_bytes=self.settings.cap_bytes)))
        if goes_on:
            # Losses may be weighted already, and other ranks may be a step further in the old world.
            self.weights.state = weights
        # A rank that was outside the process set may be in it now, with the settings of the others.
        if self._describe is not None:
            self._arguments, self._tune = self._describe(connection.settings, self.exchange)
        self.exchange_state.move_to(self.exchange)
        if self._surviving is not None:
            is_first = self._ranks.rank == 0
            self._surviving.tell_of_lost_residuals(is_first, self.settings.codec, self._trace.optimizer)
        for added in self._added:
            self._take_in(added)
        if isinstance(engine := connection.group.engine, HasMemory):
            # The new engine holds them only if it is safe to use them again: see `shm.kept_memory`.
            self._layout.take_over(buffers, engine.holds)

    @abstractmethod
    def progress(self) -> Progress:
        """Returns how far the current step is; see `control.reducer_registry.Progress`. Any thread may call it."""

    @abstractmethod
    def why_no_join(self) -> str:
        """Says why no rank of this optimizer may join, as the message of an error; empty if they may."""

    @property
    @abstractmethod
    def is_in_step(self) -> bool:
        """Whether gradients of the current step have arrived, and its averages are not there yet."""

    @abstractmethod
    def _leave_world(self, *, goes_on: bool) -> None:
        """Gives up the current step, since the world has been shut down.

        ``goes_on``: the next has those of its ranks that are left, and no others: averages that have arrived are used.
        """

    def compare_and_tune(self, describe: Callable[[Settings, Exchange], Described]) -> None:
        """Sets what returns, for a world's settings and exchange, what the ranks compare and tune in `connect`.

        It is called now, and in each new world.
        """
        self._describe = describe
        self._arguments, self._tune = describe(self.settings, self.exchange)

    @property
    def is_to_be_tuned(self) -> bool:
        """Whether autotune is on and has not chosen a cap yet."""
        return self._tune is not None and self._tuned_for is None

    def add_params(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        groups: Iterable[Iterable[str]] = (),
        *,
        are_new: bool = False,
    ) -> None:
        """Adds parameters: plans their buckets behind the existing ones, and hooks their gradients.

        ``are_new``: in their first step their bucket is sent even if they are frozen. They may have gradients already,
        and ranks may find them at other points of the step.
        """
        self.follow_world()
        params = dict(named_params)
        trainable = frozenset(name for name, param in params.items() if param.requires_grad or are_new)
        added, there = _Added(params, [list(group) for group in groups], trainable), len(self._layout.buckets)
        self._added.append(added)
        self._take_in(added)
        if self.is_in_step:
            # Their gradients were computed before there were hooks.
            self._queue.add(self._layout.buckets[there:])
        self._hear(list(params.values()), self._on_gradient)

    def drop_params(self, names: Collection[str]) -> None:
        """Lets go of parameters. Every rank must call it, with the same names and between two steps; it waits for none.

        Raises GradientError with outer steps.
        """
        if self.outer is not None:
            raise GradientError(
                f"parameter {next(iter(names))!r} has left optimizer.param_groups, and outer={self.settings.outer!r} "
                "has its value of the last outer step: make a new DistributedOptimizer on every rank"
            )
        self.follow_world()
        self._stop_hearing(added.params[name] for added in self._added for name in names if name in added.params)
        self._added = [left for added in self._added if (left := added.without(names)).params]
        self._check.drop(names)
        self._uncompared.append([(name, "left optimizer.param_groups") for name in sorted(names)])
        self.exchange_state.forget(names)
        self._lay_out_again()

    @abstractmethod
    def _on_gradient(self, param: Tensor) -> None:
        """Handles an addition to ``param.grad`` by autograd."""

    def _take_in(self, added: _Added) -> None:
        params, groups = added.params, added.groups
        description, plans = self._layout.add(params, groups, added.trainable)
        for param in params.values():
            self._clock.follow(param.device)
            if self._surviving is not None:
                self._surviving.add(param)
        if self._deltas is not None:
            self._deltas.add(plans, params)
        if self.outer is not None:
            self.outer.add(params, groups)
        self._compare_later(params, description)

    def connect(self) -> Group:
        """Returns the communicator to the other ranks of the current world; see `GradientHooks.connect`."""
        self.follow_world()
        return super().connect()

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # From the engine: if that has shared memory, gradients in it are summed without a copy. In the first step the
        # engine is not open yet.
        if self._links is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._links.all.zeros(numel, dtype, device)

    def _make_opening(self, number: int, description: Description) -> Opening:
        devices = [param.device for added in self._added for param in added.params.values() if param.is_cuda]
        open_links: Callable[[Group], Links] = self.exchange.open_links
        if self.outer is not None:
            open_links = self.outer.open
        return Opening(
            self._ranks,
            self._reducers,
            number,
            self,
            self._submit,
            arguments=self._arguments,
            description=description,
            open_links=open_links,
            tune=None if self._tune is None else Tune(partial(self._tune, named=self._named()), self._known_cap()),
            device=devices[0] if devices else None,
        )

    def _named(self) -> list[tuple[str, Tensor]]:
        return [pair for added in self._added for pair in added.params.items()]

    def _known_cap(self) -> int | None:
        """Returns the cap that autotune has chosen for ranks on these hosts, in this world or an earlier one."""
        return self.settings.cap_bytes if self._tuned_for == self._ranks.hosts else None

    def _take(self, opened: Opened) -> None:
        super()._take(opened)
        self._links = opened.links
        if opened.cap_bytes is not None:
            self._tuned_for = self._ranks.hosts
            self.settings = replace(self.settings, cap_bytes=opened.cap_bytes)
        if not self.is_in_step:
            self._plan_for_good()

    def _plan_for_good(self) -> None:
        """Replans the buckets with autotune's cap, or moves them to the engine's memory, once the engine is open.

        Call it only between steps.
        """
        self._is_provisional = False
        if self._layout.cap_bytes != self.settings.cap_bytes:
            self._lay_out_again()
        elif self._links is not None and isinstance(engine := self._links.all.engine, HasMemory):
            for bucket in self._layout.buckets:
                if bucket.flat is not None and not engine.holds(bucket.flat):
                    bucket.renew()

    def _lay_out_again(self) -> None:
        """Plans the buckets of all parameters anew. Their gradients move there in the next step."""
        self._lay_out()
        if self._deltas is not None:
            self._deltas.clear()
        for added in self._added:
            _, plans = self._layout.add(added.params, added.groups, added.trainable)
            if self._deltas is not None:
                self._deltas.add(plans, added.params)

    def connected(self) -> Links:
        """Returns the links to the other ranks. The first call opens them: see `connect`."""
        self.connect()
        assert self._links is not None, "they have met"
        return self._links

    # -- outer steps

    def outer_state(self) -> dict[str, Any]:
        """Returns this rank's part of the state of the outer steps; empty if there are none."""
        if self.outer is None:
            return {}
        self.require_own("optimizer.state_dict() with outer=")
        return self.outer.state_dict()

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `outer_state` returned, or begins a new interval if it is empty.

        Raises ValueError if there are no outer steps, unless hosts have been lost since the first world.
        """
        if self.outer is not None:
            self.outer.load_state_dict(state)
        elif state and self._worlds == 1:
            reason = "all ranks are on one host" if self.settings.outer is not None else "the optimizer has no outer="
            raise ValueError(
                f"the checkpoint has the state of outer={state['outer']}, and {reason}: make the optimizer as it was, "
                "or delete the key 'outer' of state_dict()['hvdlite'] on every rank"
            )
