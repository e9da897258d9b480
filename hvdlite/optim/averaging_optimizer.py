"""
`AveragingOptimizer`: wraps an optimizer, and averages gradients over the ranks before it steps.

    loss.backward() ── Reducer (hooks) ── step: synchronize, then the wrapped optimizer's own step

It wraps an instance and leaves it whole: state, schedulers and step hooks stay with it. How gradients become averages
is in `reducer`; how one is made of a user's arguments is in `optimizer`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import GradientError
from .arguments import check_trained, names_of_added_group
from .horovod_attributes import HorovodsAttributes
from .reducer import Reducer
from .step_by_bucket import StepByBucket

# In a state_dict.
_EXCHANGE = "exchange"

# So many steps in a row are no accident.
_SINGLE_PASSES = 3


class AveragingOptimizer(HorovodsAttributes):
    """Adds to a proxy what averages gradients; whoever makes one calls `_connect`."""

    def _connect(self, reducer: Reducer, named: Sequence[tuple[str, Tensor]], groups: Sequence[Sequence[str]]) -> None:
        self._reducer = reducer
        # GradScaler is to unscale averages itself before it decides whether to step. With Adasum gradients are each
        # rank's own, and so is what it finds: there the ranks decide together.
        self._step_supports_amp_scaling = reducer.steps_first
        self._by_bucket: StepByBucket | None = None
        if reducer.settings.step_on_arrival:
            self._by_bucket = StepByBucket(self._optimizer, reducer)
        self._named = list(named)
        self._named_groups = groups
        self._skipping = False
        self._synchronized = False
        # Whether the user was told that a step came after `synchronize`.
        self._has_warned = False
        # The steps so far that came after a single backward pass; None once that is told, or another has come.
        self._single_passes: int | None = 0
        reducer.add_params(named, groups)
        # Parameters outlive their optimizer; the hooks on them must not.
        self._finalizer = weakref.finalize(self, reducer.abandon)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Remove every hook from the parameters; backward then communicates nothing."""
        self._reducer.close()
        # It would keep the reducer, with the parameters and their buckets, beyond the collection that finds this.
        self._finalizer.detach()

    # -- gradients

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks. Every rank must call it.

        For clipping and the like::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        A second call before the next backward does nothing, and ``step()`` without ``skip_synchronize``
        does not average again either, but warns once, as Horovod does.
        """
        self._reducer.synchronize()
        # With Adasum nothing has been waited for.
        self._synchronized = not self._reducer.steps_first

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` inside use the gradients as they are; call `synchronize` before."""
        if self._reducer.steps_first:
            # Horovod's words.
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        earlier, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = earlier

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside only add to the gradients; the next one outside averages the sum."""
        with self._reducer.only_accumulating():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make a step; on every rank, between two steps."""
        self.backward_passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's. A GradientError where gradients are on their way, since they would be lost."""
        # The first two sentences are Horovod's.
        self._reducer.require_nothing_pending(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(). This is prohibited as it can cause a race condition: it came",
            "call step() first, or, to drop them, synchronize(), on every rank. Gradients that are never wanted are "
            "best computed under `with optimizer.no_sync():`, or with the parameters frozen meanwhile",
        )
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Wait for the averages, then take the wrapped optimizer's step. Every rank must call it.

        A ``closure`` is called once; its gradients are averaged before they are used. What it returns,
        its own rank's loss, is returned.
        """
        self._warn_of_synchronizing_twice()
        self._warn_of_accumulating_nothing()
        set_by_scaler = vars(self)
        if not self._reducer.agree_to_step(set_by_scaler.get("grad_scale"), set_by_scaler.get("found_inf")):
            return None
        by_bucket = self._by_bucket
        if closure is not None and by_bucket is not None:
            raise ValueError(
                "step(closure) with step_on_arrival=True: a closure computes gradients inside the step; call it before "
                "step(), without an argument, or leave step_on_arrival out"
            )
        result = None
        with self._reducer.stepping():
            if closure is not None:
                result = self._optimizer.step(self._averaging(closure))
            elif self._skipping or by_bucket is None or not by_bucket.take():
                self._prepare_step()
                result = self._optimizer.step()
        if by_bucket is not None:
            by_bucket.drop_gradients()
        return result

    def _warn_of_synchronizing_twice(self) -> None:
        was_synchronized, self._synchronized = self._synchronized, False
        if was_synchronized and not self._skipping and not self._has_warned:
            self._has_warned = True
            # Horovod's words.
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
                "if you use optimizer.synchronize() in your code.",
                stacklevel=3,
            )

    def _warn_of_accumulating_nothing(self) -> None:
        passes = self.backward_passes_per_step
        if self._single_passes is None or passes == 1 or self._reducer.backwards_of_step == 0:
            return
        # A single one may be all that is left at the end of an epoch.
        self._single_passes = self._single_passes + 1 if self._reducer.backwards_of_step == 1 else None
        if self._single_passes == _SINGLE_PASSES:
            self._single_passes = None
            warnings.warn(
                f"optimizer.step() was called after a single backward pass in each of the first {_SINGLE_PASSES} "
                f"steps, with backward_passes_per_step={passes}: the gradients of each pass are averaged and used at "
                f"once, and nothing is accumulated. Call step() and zero_grad() once for every {passes} backward "
                "passes, or leave backward_passes_per_step out.",
                stacklevel=3,
            )

    def _averaging(self, closure: Callable[[], float]) -> Callable[[], float]:
        def average_after() -> float:
            loss = closure()
            self._prepare_step()
            return loss

        return average_after

    def _prepare_step(self) -> None:
        if not self._skipping:
            self._reducer.synchronize()
        elif self._reducer.has_arrivals:
            raise GradientError(
                "step() was called in skip_synchronize() while gradients are on their way between the ranks: "
                "call synchronize() before, or leave out skip_synchronize()"
            )
        self._reducer.require_sound()

    # -- what belongs to the wrapped optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, so that checkpoints do not depend on the wrapping.

        And this rank's state of an exchange that keeps one, under the key ``"exchange"``.
        """
        state, exchanged = super().state_dict(), self._reducer.exchange.state_dict()
        return {**state, _EXCHANGE: exchanged} if exchanged else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load on every rank, or on one and `broadcast_optimizer_state`, which leaves each rank its exchange's state.

        Where there is none for an exchange that keeps one, it begins anew.
        """
        self._reducer.exchange.load_state_dict(state_dict.get(_EXCHANGE, {}))
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _EXCHANGE})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups.

        Reading them waits for gradients that are on their way: GradScaler.unscale_ and clipping by group
        reach the gradients through here, without a call of `synchronize`.
        """
        if self._reducer.has_arrivals and not self._skipping:
            self._reducer.synchronize()
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's, and average its gradients too. Every rank must call it; it waits for all."""
        self._reducer.require_nothing_pending("add_param_group() was called", "call step() first")
        self._optimizer.add_param_group(param_group)
        try:
            named = check_trained(names_of_added_group(self._optimizer, [name for name, _ in self._named]))
        except (TypeError, ValueError):
            self._optimizer.param_groups.pop()
            raise
        self._named += named
        self._reducer.add_params(named)
        self._reducer.meet()
