"""
`GradientHooks`: autograd hooks on an optimizer's parameters, and its communicator, reopened in each new world.

`Reducer` is its subclass, and does the work on the gradients. `opening` opens the communicator.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .. import forks
from ..buckets.parameter_check import ParameterCheck
from ..buckets.plan import Description, can_have_gradient
from ..buckets.step_trace import StepTrace
from ..comm import deferred_close
from ..comm.group import Group
from ..control.generation import Generation
from ..control.operation import OPTIMIZER
from ..environment import CheckParameters
from ..errors import GradientError, NotInitializedError
from ..ops.base import compare
from ..outside_graphs import keep_outside_graphs
from .opening import Opened, Opening, Submit, raise_difference

# Returns autograd's number of the current backward pass. A global, since it is called for every gradient.
number_of_backward = torch._C._current_graph_task_id

# Has autograd call a function at the end of the current backward pass. DDP uses it too.
_when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback


class GradientHooks(ABC):
    """Hooks on some parameters' gradients, and a communicator to the other ranks. A subclass handles the gradients.

    The hooks call a bound method after each addition to a gradient. At most one `GradientHooks` listens to a parameter.
    """

    def __init__(
        self,
        group: Group,
        generation: Generation,
        backward_passes_per_step: int,
        check_parameters: CheckParameters,
        submit: Submit | None,
    ) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        # The optimizer's number among those of these ranks. It keeps the number in a later world if that is free.
        self._number: int | None = None
        self._join(group, generation, check_parameters, submit)
        # By parameter.
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._is_closed = False
        self._spoilt_by: str | None = None
        # The number of `pin` calls without `unpin`. Finalizers must not take the lock: they call `abandon` instead.
        self._pins = 0
        self._pinning = threading.Lock()
        self._only_accumulating = False
        # Autograd's numbers of the backward passes since the last step, including those under `only_accumulating`.
        self._backwards: set[int] = set()
        # What this process is, in words, if it is a forked child, whose parent has the optimizer.
        self._copied_to = ""
        forks.when_forked(self)

    def leave_to_parent(self) -> None:
        """Makes gradients the child's own: autograd calls no hook, and no collective of the parent's is waited for."""
        if forks.parent is None:
            # No rank has been forked, but a process that may become one, as its child may.
            return
        self._copied_to = forks.description()
        # For a hook that autograd is about to call, where a hook of the program has forked.
        self._is_closed = True
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._forget_engine()
        self._pinning = threading.Lock()
        self._backwards.clear()

    def require_own(self, what: str) -> None:
        """Raises a NotInitializedError in a forked child, which names ``what``."""
        if self._copied_to:
            raise NotInitializedError(
                f"{what}: {self._copied_to}: call it in the rank's own process, or train a copy of the model with an "
                "optimizer that is not wrapped"
            )

    def _join(
        self,
        group: Group,
        generation: Generation,
        check_parameters: CheckParameters,
        submit: Submit | None,
        *,
        is_in_step: bool = False,
    ) -> None:
        """Sets the ranks to communicate with. Their communicator is opened later, by `connect`.

        ``is_in_step``: all of them come from the same step, which they finish first.
        """
        self._submit = submit
        self.size = group.size
        self._ranks = group
        self._reducers = generation.reducers
        self._clock = generation.watch.clock
        self._trace = StepTrace(generation.recorder)
        self._check = ParameterCheck(group, check_parameters, spares_first=is_in_step)
        self._forget_engine()
        self._uncompared: list[Description] = []

    def _forget_engine(self) -> None:
        # The optimizer's own communicator between the same ranks, opened by `connect`.
        self._opening: Opening | None = None
        self._group: Group | None = None

    @property
    def backwards_of_step(self) -> int:
        """The number of backward passes since the last step."""
        return len(self._backwards)

    @property
    @abstractmethod
    def _is_sending(self) -> bool:
        """Whether collectives may be running on the communicator."""

    @abstractmethod
    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in one step of the other ranks without gradients. Returns False if all ranks sat out."""

    def _begin_backward(self, backward: int) -> None:
        """Notes the first gradient of a backward pass, by autograd's number of it."""
        self._backwards.add(backward)
        if self._clock.is_on:
            self._clock.begin_backward()
            _when_backward_ends(self._clock.end_backward)

    def _compare_later(self, named: Mapping[str, Tensor], description: Description) -> None:
        """Schedules checks of these parameters: their shapes at the next `connect`, their values in the next step."""
        self._check.add(named.items())
        self._uncompared.append(description)

    def _hear(self, params: Sequence[Tensor], on_gradient: Callable[[Tensor], None]) -> None:
        """Hooks more parameters: ``on_gradient``, a bound method, is called after each addition to a gradient."""
        if forks.parent is not None:
            return
        deferred_close.prepare()
        take_over(params)
        self._hooks |= {param: listen(param, on_gradient) for param in params if can_have_gradient(param.dtype)}

    def _stop_hearing(self, params: Iterable[Tensor]) -> None:
        """Removes the hooks of these parameters."""
        for param in params:
            if (hook := self._hooks.pop(param, None)) is not None:
                hook.remove()

    def take_number(self) -> None:
        """Takes a number among the optimizers of these ranks. Every rank must call it; it does not wait for them."""
        self._number = self._reducers.take_number(self._ranks, self._number)
        self._opening = self._make_opening(self._number, self._uncompared.pop(0))
        self._reducers.open_later(self._opening)

    def only_one_thread(self) -> AbstractContextManager[None]:
        """A context that raises RuntimeError if two threads construct optimizers for these ranks at once."""
        return self._reducers.only_one_thread(self._ranks, OPTIMIZER.name)

    @abstractmethod
    def _make_opening(self, number: int, description: Description) -> Opening:
        """Returns the operation that opens the communicator and compares ``description``."""

    def connect(self) -> Group:
        """Returns the communicator to the other ranks. The first call opens it and compares the models.

        Every rank must call it; the first step does. Raises MismatchError on every rank if the ranks have different
        parameters or arguments.
        """
        if self._group is None:
            self._ranks.require_open("averaging gradients")
        if self._opening is None:
            self.take_number()
        self._reducers.open_all()
        if self._group is None:
            assert self._opening is not None, "it has a number"
            self._take(self._opening.wait())
        if self._uncompared:
            # As one, since ranks may have found the changes at other points.
            description = list(chain.from_iterable(self._uncompared))
            self._uncompared.clear()
            what = "comparing the models, since optimizer.param_groups has changed"
            raise_difference(self._ranks, compare(self._ranks, description, what))
        assert self._group is not None, "it has been taken"
        return self._group

    def _take(self, opened: Opened) -> None:
        """Uses this engine from now on."""
        self._group = opened.group

    def close(self) -> None:
        """Removes the hooks and closes the communicator. Leaves the gradients, and waits for no collective.

        A pinned communicator stays open, for the last steps of ranks that have joined.
        """
        self._is_closed = True
        self._stop_hearing(list(self._hooks))
        self._give_back()

    def abandon(self) -> None:
        """Closes in another thread, soon. For the garbage collector, which may run while this thread holds locks."""
        self._is_closed = True
        deferred_close.close_later(self.close)

    def spoil(self, why: str) -> None:
        """Makes every later step raise an error with ``why``, since a collective on the communicator will never end."""
        self._spoilt_by = why
        self._is_closed = True

    def pin(self) -> bool:
        """Keeps the communicator open until `unpin`, even after `close`. Returns False if it is closed already."""
        with self._pinning:
            if self._is_closed and not self._pins:
                return False
            self._pins += 1
            return True

    def unpin(self) -> None:
        """Undoes one `pin`."""
        with self._pinning:
            self._pins -= 1
        self._give_back()

    def _give_back(self) -> None:
        with self._pinning:
            # With a collective running on it, the communicator stays open until the group is closed.
            if not self._is_closed or self._pins or (self._is_sending and self._group is not None):
                return
            opening, self._group = self._opening, None
        if opening is not None:
            opening.close()

    def _require_not_closed(self) -> None:
        self.require_own("averaging gradients")
        if self._spoilt_by is not None:
            raise GradientError(f"this DistributedOptimizer can take no more steps: {self._spoilt_by}")
        if self._is_closed:
            raise GradientError(
                "this DistributedOptimizer no longer averages gradients: it was closed, or a newer one has the same "
                "parameters. Use the newer one, or the original optimizer"
            )

    @contextmanager
    def only_accumulating(self) -> Iterator[None]:
        """A context in which backward passes add to gradients, without being counted and without communication."""
        earlier, self._only_accumulating = self._only_accumulating, True
        try:
            yield
        finally:
            self._only_accumulating = earlier


def take_over(params: Iterable[Tensor]) -> None:
    """Closes any earlier `GradientHooks` on these parameters, since gradients averaged twice would be too small."""
    for param in params:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, GradientHooks):
                earlier.close()


def listen(param: Tensor, on_gradient: object) -> RemovableHandle:
    """Registers a bound method of a `GradientHooks`, to be called after each addition to the gradient."""
    # PyTorch hooks only parameters that require a gradient, but a frozen one may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
    return handle


def too_many_passes(name: str, backward_passes_per_step: int) -> GradientError:
    """Returns the error for a gradient that gets more than ``backward_passes_per_step`` backward passes."""
    # The first two sentences are Horovod's.
    return GradientError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. (The first: those of {name!r}, with "
        f"backward_passes_per_step={backward_passes_per_step}. Or wrap all backward passes but the last in `with "
        "optimizer.no_sync():`)"
    )


keep_outside_graphs(globals())
