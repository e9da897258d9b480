"""
How the wrapped optimizer's own step is taken on averages: whole, or bucket by bucket; clipped before, by `NormClipper`.

    averages in param.grad ── clipping ── WholeUpdate    each rank updates all parameters, and has all of the state
                                       └─ ShardedUpdate  each rank its own part (`sharded_update`)
    averages of a bucket ── StepByBucket: param_groups narrowed to its parameters ── step ── the next bucket

`averaging_optimizer` has these, by its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import GradientError
from ..outside_graphs import keep_outside_graphs
from ..steps.step import Arrived, Step
from ..steps.step_world import OptimizerEngine, StepState

DCP = "torch.distributed.checkpoint.state_dict"
_DCP_STEP = "_init_optim_state"
_MOST_WRAPPERS = 5


class Averages(Protocol):
    """The `Reducer`, as what updates parameters uses it."""

    state: StepState
    step: Step

    @property
    def engine(self) -> OptimizerEngine:
        """The optimizer's own engine in the current world."""

    @property
    def name(self) -> str:
        """The optimizer's name in messages, equal on all ranks."""

    def synchronize(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None: ...


class _Measured(NamedTuple):
    grad: Tensor
    version: int
    norm: Tensor


class NormClipper:
    """Scales gradients so that their global 2-norm is at most ``max_norm``, as `clip_grad_norm_` does, to the bit.

    All ranks have equal averages, so each computes the same norm by itself.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        # The norm before the last clipping. None before the first.
        self.norm: Tensor | None = None
        # By the parameter's `id`, for gradients that have been measured in this step.
        self._measured: dict[int, _Measured] = {}

    @torch.no_grad()
    def measure(self, params: Iterable[Tensor]) -> None:
        """Measures gradients on a CPU already. `clip` measures those that are missing or have changed."""
        for param in params:
            grad = param.grad
            if grad is not None and grad.device.type == "cpu":
                self._measured[id(param)] = _Measured(grad, grad._version, torch.linalg.vector_norm(_values_of(grad)))

    @torch.no_grad()
    def clip(self, params: Sequence[Tensor]) -> None:
        """Clips the gradients of all parameters, in this order. Waits for no other rank, and for no GPU."""
        having = [param for param in params if param.grad is not None]
        grads = [param.grad for param in having if param.grad is not None]
        is_on_cpu = all(grad.device.type == "cpu" for grad in grads)
        if is_on_cpu and len({grad.dtype for grad in grads}) == 1:
            # What `get_total_norm` does on a CPU.
            norm = torch.linalg.vector_norm(torch.stack([self._norm_of(param) for param in having]))
        else:
            norm = get_total_norm([_values_of(grad) for grad in grads])
        self._measured.clear()
        self.norm = norm
        # PyTorch multiplies by min(this, 1), and to multiply by 1 changes nothing. On a GPU, to look would wait for it.
        if not (is_on_cpu and bool(self.max_norm / (norm + 1e-6) >= 1.0)):
            clip_grads_with_norm_(having, self.max_norm, norm)

    @staticmethod
    def squares_of(parts: Sequence[Tensor]) -> float:
        """Returns the sum of the squares of the gradients of these parts of parameters, in float64."""
        grads = [part.grad for part in parts if part.grad is not None]
        wide = [torch.complex128 if grad.is_complex() else torch.float64 for grad in grads]
        norms = [
            torch.linalg.vector_norm(g, dtype=dtype).to(grads[0].device) for g, dtype in zip(grads, wide, strict=True)
        ]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    @torch.no_grad()
    def clip_parts(self, parts: Sequence[Tensor], norm: Tensor) -> None:
        """Clips the gradients of parts of parameters, where ``norm`` is that of all gradients, also on other ranks."""
        self.norm = norm
        clip_grads_with_norm_(parts, self.max_norm, norm)

    def _norm_of(self, param: Tensor) -> Tensor:
        grad, measured = param.grad, self._measured.get(id(param))
        assert grad is not None, "the caller has looked"
        if measured is not None and measured.grad is grad and measured.version == grad._version:
            return measured.norm
        norm: Tensor = torch.linalg.vector_norm(_values_of(grad))
        return norm


def _values_of(grad: Tensor) -> Tensor:
    """Returns the gradient, or the values of a sparse one, whose norm PyTorch 2.11 cannot compute itself."""
    return grad.coalesce().values() if grad.is_sparse else grad


class WholeUpdate:
    """Every rank updates all parameters, and has all of the state."""

    holds_parts = False

    def __init__(self, optimizer: torch.optim.Optimizer, clipper: NormClipper | None) -> None:
        self._optimizer = optimizer
        self._clipper = clipper
        self.arrived: Arrived | None = None if clipper is None else clipper.measure
        """To be called with parameters whose averages have arrived, while others are still being sent."""

    def prepare(self, params: Sequence[Tensor]) -> None:
        """Clips the averages of ``params``, if they are to be clipped."""
        if self._clipper is not None:
            self._clipper.clip(params)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes the step. ``closure``, if there is one, leaves averages in the gradients, and calls `prepare`."""
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def state_dict(self, *, whole_for: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._optimizer.state_dict(), {}

    def complete_pattern(self) -> None:
        """Does nothing: the optimizer's first step has made all that is in its state."""

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Loads the optimizer's state. Raises ValueError for one rank's part of a state."""
        if own:
            raise ValueError(
                f"the checkpoint has one rank's part of an optimizer's state, saved with shard={own['scope']!r}: wrap "
                "the optimizer with the same, or call consolidate_state_dict() on all ranks before it is saved"
            )
        self._optimizer.load_state_dict(state)

    def consolidate(self, *, keeps: bool) -> None:
        """Does nothing: every rank has all of the state."""


class StepByBucket:
    """``step_on_arrival``: takes one step in several parts, with bit-identical results, while buckets are being sent.

    This requires an optimizer that updates each parameter independently, from only its gradient, its state, and the
    options of its group. Nothing is updated during backward, in which autograd still reads the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, averages: Averages) -> None:
        self._optimizer = optimizer
        self._averages = averages
        # The number of each parameter's group, by the parameter's `id`.
        self._group_of: dict[int, int] = {}

    def step(self) -> None:
        """Waits for the averages, and steps on those of each bucket as soon as they are there."""
        groups = self._optimizer.param_groups
        self._group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
        self._averages.synchronize(self._update)
        self._averages.state.require_sound()
        # On the remaining parameters, even if there are none: this call runs the LR scheduler's count of steps.
        with self._narrowed([[param for param in group["params"] if param.grad is not None] for group in groups]):
            self._optimizer.step()

    @property
    def is_possible(self) -> bool:
        """Whether no other code may read all gradients: a step hook, or a ``step`` that is not an LR scheduler's."""
        optimizer = self._optimizer
        own_step = vars(optimizer).get("step")
        return not (
            _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"))
        )

    def _update(self, params: Iterable[Tensor]) -> None:
        """Takes the step on these parameters alone."""
        parts: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for param in params:
            # One that has left the groups within this step is let go after it.
            if (number := self._group_of.get(id(param))) is not None:
                parts[number].append(param)
        with self._narrowed(parts):
            # The class's method: an LR scheduler replaces the instance's, to count whole steps.
            type(self._optimizer).step(self._optimizer)

    @contextmanager
    def _narrowed(self, parts: list[list[Tensor]]) -> Iterator[None]:
        """`narrowed`, and raises GradientError if the step has changed what all parameters of a group share."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        with narrowed(groups, parts):
            yield
        for number, (group, earlier) in enumerate(zip(groups, before, strict=True)):
            for key, value in group.items():
                if key not in earlier or earlier[key] is not value:
                    raise GradientError(
                        f"step_on_arrival=True does not work with {type(self._optimizer).__name__}: its step changes "
                        f"param_groups[{number}][{key!r}], and would do so once for each bucket. Wrap it without "
                        "step_on_arrival"
                    )


@contextmanager
def narrowed(groups: Sequence[dict[str, Any]], parts: Sequence[list[Tensor]]) -> Iterator[None]:
    """A context in which an optimizer's parameter groups hold only these parameters, a list for each group."""
    before = [group["params"] for group in groups]
    try:
        # In place, since an optimizer inside the optimizer may refer to the same groups.
        for group, part in zip(groups, parts, strict=True):
            group["params"] = part
        yield
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params


class StatePattern:
    """Makes the state that `torch.distributed.checkpoint` loads into, and drops it if nothing is loaded.

    For this it sets all gradients to zeros and takes a step, of an optimizer that has no state yet. With PyTorch's own
    optimizers that step counts, as in pytorch#164929, and here all ranks would have to take it together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, complete: Callable[[], None]) -> None:
        """``complete`` gives the state what it has besides in later steps."""
        self._optimizer = optimizer
        self._complete = complete
        self._is_there = False

    def is_asked_for(self) -> bool:
        """Whether a step is that of `torch.distributed.checkpoint`. To be called in ``step`` itself."""
        if self._optimizer.state:
            return False
        frame = sys._getframe(1)
        for _ in range(_MOST_WRAPPERS):
            if frame.f_code.co_name == _DCP_STEP and frame.f_globals.get("__name__") == DCP:
                return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False

    def make(self) -> None:
        """Makes the state by a step with the gradients of zeros that are there. Waits for no rank."""
        self._optimizer.step()
        self._complete()
        self._is_there = True

    def drop(self) -> None:
        """Drops it, before a step of training or when the program itself looks at the state."""
        if self._is_there:
            self._is_there = False
            self._optimizer.state.clear()

    def replace(self) -> None:
        """Notes that a state is loaded in its place."""
        self._is_there = False


keep_outside_graphs(globals())
