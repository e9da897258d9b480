"""
Autograd hooks on an optimizer's parameters, and the optimizer's own communicator between its ranks.

What is done with the gradients is in `reducer`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..comm import deferred_close
from ..comm.group import Group
from ..control.generation import Generation
from ..errors import GradientError, MismatchError
from ..ops.base import compare
from .parameter_check import ParameterCheck
from .plan import Description, can_have_gradient, first_difference
from .step_trace import StepTrace

# Autograd's number of the backward pass under way. Looked up once: it is called at every gradient.
number_of_backward = torch._C._current_graph_task_id


class GradientHooks(ABC):
    """Hears, by a bound method, when a gradient has been added to, and has a channel to the other ranks.

    A parameter has one listener at most. What is done with the gradients is a subclass's.
    """

    def __init__(
        self, group: Group, generation: Generation, backward_passes_per_step: int, check_parameters: bool | int
    ) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        self._join(group, generation, check_parameters)
        self._hooks: list[RemovableHandle] = []
        self._is_closed = False
        self._spoilt_by: str | None = None
        # How many count on the channel, closed or not; held to look at that, never by a finalizer.
        self._pins = 0
        self._pinning = threading.Lock()
        self._only_accumulating = False
        # Autograd's numbers of the backward passes since the last step, those under `only_accumulating` among them.
        self._backwards: set[int] = set()

    def _join(self, group: Group, generation: Generation, check_parameters: bool | int) -> None:
        """Attach to ``group``; the communicator of its own is opened when the ranks first meet."""
        self.size = group.size
        self._ranks = group
        self._reducers = generation.reducers
        self._tracks = StepTrace(generation.recorder)
        self._check = ParameterCheck(group, check_parameters)
        # A channel of our own between the same ranks, opened when they first meet.
        self._group: Group | None = None
        self._uncompared: list[Description] = []

    @property
    def ranks(self) -> Group:
        """The group that was given, not the communicator of the optimizer's own."""
        return self._ranks

    @property
    def backwards_of_step(self) -> int:
        """How many backward passes there were since the last step."""
        return len(self._backwards)

    @property
    @abstractmethod
    def _collecting(self) -> bool:
        """Whether something is under way on the channel to the other ranks."""

    @abstractmethod
    def sit_out(self, average_of_active: bool) -> bool:
        """Take part in one step of the other ranks with nothing to give; False if they all sat out as well."""

    def _compare_later(self, named: Mapping[str, Tensor], description: Description) -> None:
        """Have the ranks compare these parameters when they next meet; their values, in a step."""
        self._check.add(named.items())
        self._uncompared.append(description)

    def _hear(self, params: Sequence[Tensor], on_gradient: Callable[[Tensor], None]) -> None:
        """Listen to more parameters; the bound method ``on_gradient`` is called after each addition to a gradient."""
        take_over(params)
        self._hooks += [listen(param, on_gradient) for param in params if can_have_gradient(param.dtype)]

    def meet(self) -> Group:
        """The channel to the other ranks; the first call opens it and compares the models.

        Every rank must call it before the first gradient, or leave it to that. A MismatchError on every
        rank if one has other parameters than another.
        """
        if self._group is None or self._uncompared:
            with self.only_one_thread():
                return self._open()
        return self._group

    def only_one_thread(self) -> AbstractContextManager[None]:
        """A RuntimeError for a thread that makes an optimizer for these ranks while another one does."""
        return self._reducers.only_one_thread(self._ranks, "hvd.DistributedOptimizer")

    def _open(self) -> Group:
        while self._uncompared:
            require_same_model(self._ranks, self._uncompared.pop(0))
        if self._group is None:
            deferred_close.prepare()
            self._reducers.enter(self._ranks, self)
            self._group = self._ranks.duplicate()
        return self._group

    def close(self) -> None:
        """Listen no more. Gradients stay where they are; what is under way is not waited for.

        While it is pinned the channel stays, for the last steps of ranks that have joined.
        """
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._give_back()

    def abandon(self) -> None:
        """`close`, called by the garbage collector: in any thread, in the middle of whatever that does."""
        self._is_closed = True
        deferred_close.close_later(self.close)

    def spoil(self, why: str) -> None:
        """Something is under way on the channel that will not come to its end: no step may be taken any more."""
        self._spoilt_by = why
        self._is_closed = True

    def pin(self) -> bool:
        """Keep the channel to the other ranks until `unpin`, closed or not; False if it is given back already."""
        with self._pinning:
            if self._is_closed and not self._pins:
                return False
            self._pins += 1
            return True

    def unpin(self) -> None:
        """Undo one `pin`."""
        with self._pinning:
            self._pins -= 1
        self._give_back()

    def _give_back(self) -> None:
        with self._pinning:
            # A channel that something is under way on stays until the group is closed.
            if not self._is_closed or self._pins or self._collecting:
                return
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _require_not_closed(self) -> None:
        if self._spoilt_by is not None:
            raise GradientError(f"this DistributedOptimizer takes no more steps: {self._spoilt_by}")
        if self._is_closed:
            raise GradientError(
                "this DistributedOptimizer averages nothing any more: it was closed, or another one was made over "
                "the same parameters since; step with that one, or with the optimizer that was wrapped"
            )

    @contextmanager
    def only_accumulating(self) -> Iterator[None]:
        """Let backward passes inside add to the gradients, without counting and without communication."""
        earlier, self._only_accumulating = self._only_accumulating, True
        try:
            yield
        finally:
            self._only_accumulating = earlier


def take_over(params: Iterable[Tensor]) -> None:
    """Close whoever listens to these parameters so far: averaged twice, their gradients would be too small."""
    for param in params:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, GradientHooks):
                earlier.close()


def listen(param: Tensor, on_gradient: object) -> RemovableHandle:
    """Have a bound method of a `GradientHooks` called after each addition to the gradient."""
    # Only what requires a gradient can be hooked. A frozen parameter may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
    return handle


def too_many_passes(name: str, backward_passes_per_step: int) -> GradientError:
    """What a listener raises at a gradient that is one backward pass too many."""
    # The first two sentences are Horovod's.
    return GradientError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. (The first: those of {name!r}, with "
        f"backward_passes_per_step={backward_passes_per_step}. Or wrap all backward passes but the last in `with "
        "optimizer.no_sync():`)"
    )


def require_same_model(group: Group, description: Description) -> None:
    """A MismatchError on every rank, which names the first parameter, if one has others; waits for all."""
    descriptions = compare(group, description, "comparing the models")
    if descriptions is not None:
        raise MismatchError(_words_of_difference(descriptions, group))


def _words_of_difference(descriptions: Sequence[Description], group: Group) -> str:
    for rank, description in enumerate(descriptions):
        difference = first_difference(descriptions[0], description)
        if difference is not None:
            name, here, there = difference
            return (
                f"parameter {name!r} has {here} on {group.describe_rank(0)} and {there} on "
                f"{group.describe_rank(rank)}: every rank must build the same model; check the arguments that "
                "size it"
            )
    raise AssertionError("called only where the descriptions differ")
