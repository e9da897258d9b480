"""
The two lines' second half: an optimizer that steps with averaged gradients.

    loss.backward() ── Reducer (hooks) ── step: synchronize, then the wrapped optimizer's own step

`DistributedOptimizer` wraps an instance and leaves it whole: state, schedulers and step hooks stay with
it. Arguments are checked here; how gradients become averages is in `reducer`, what Adasum does instead in `deltas`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..channels.collective import Group
from ..channels.reduce_op import Adasum, Average, ReduceOp
from ..collectives.compression import AnyCompression, Compression, check_compression
from ..environment import Environment
from ..errors import GradientError
from ..process_set import ProcessSet
from ..process_sets import global_process_set, group_of
from ..world import current_world, is_initialized
from .arguments import (
    check_autotune,
    check_cap,
    check_groups,
    check_named_parameters,
    check_op,
    check_optimizer,
    check_positive_int,
    check_predivide,
    check_step_on_arrival,
    groups_of,
    names_of_added_group,
)
from .arrival import StepByBucket
from .autotune import tuned_cap
from .deltas import Deltas
from .proxy import OptimizerProxy
from .reducer import Reducer
from .wire import Settings

# Measured with two ranks over gloo, from 1 to 64 MiB, on a 25 M-parameter MLP and on a ResNet of many small
# tensors: fastest, by a few per cent, on both.
DEFAULT_BUCKET_CAP_BYTES = 16 * 2**20


class DistributedOptimizer(OptimizerProxy):
    """Wraps an optimizer so that ``step()`` uses gradients averaged over all ranks.

    Every rank must construct it, with the same arguments and a model of the same shapes (a `MismatchError`
    names the first parameter that differs), and must call ``step()`` equally often.

    ``optimizer``: any of `torch.optim` but LBFGS, or a subclass of `torch.optim.Optimizer`. It is wrapped,
    not copied: its state, its LR schedulers and its hooks go on working.

    ``named_parameters``: ``model.named_parameters()``; names make messages readable and must be unique.

    ``compression``: what travels, see `Compression`. Parameters and optimizer state keep their dtype.

    ``backward_passes_per_step``: how many backward passes add to a gradient before it is averaged. They
    are summed, not averaged, as in Horovod. A ``step()`` that comes early, at the end of an epoch, averages
    what there is.

    ``op``: ``hvd.Average``, ``hvd.Sum``, or ``hvd.Adasum`` (arXiv 2006.02924). With Adasum each rank takes the wrapped
    optimizer's step with its own gradients, and what the steps changed is combined; the state of the optimizer, and a
    GradScaler's scale, are each rank's own. `synchronize` does nothing then, and `skip_synchronize` is an error.

    ``gradient_predivide_factor``: f scales by 1/f before the sum and by f/size after it; only for
    ``Average``. 1.0 scales by 1/size before the sum.

    ``num_groups``: Horovod's older name for a number of ``groups``.

    ``groups``: gradients that travel together: a number of groups of neighbouring parameters, or lists of
    parameters. Others are grouped by size.

    ``sparse_as_dense``: average sparse gradients as dense ones instead of gathering their rows. They are
    sparse again when the optimizer sees them.

    ``process_set``: the ranks that take part. Any other rank steps with its own gradients and waits for nobody.

    ``bucket_cap_mb``: gradients travel in buckets of at most so many MiB, each as soon as it is full. Unless
    given, it is 16, or what ``HVDLITE_FUSION_THRESHOLD`` says in bytes (0: a bucket for each parameter).

    ``autotune``: choose that size by measuring. For about a second at most, before the constructor returns, buckets of
    zeros travel as those of gradients will; the latency and the bandwidth that follow from it, and the sizes of this
    model's gradients, say which cap makes the shortest step. All ranks take the same, for parameters that are added
    later too; the log tells which at level info. `HVDLITE_AUTOTUNE=1` does it for every optimizer that is given no
    ``bucket_cap_mb``. Not for ``hvd.Adasum``, nor together with a size that is given: a ValueError.

    ``step_on_arrival``: let ``step()`` update the parameters of a bucket as soon as its averages are there, while other
    buckets still travel, with the same bits; then their gradients are freed, so that after it every ``param.grad`` is
    None. For optimizers that update each parameter by itself, as all that may be wrapped of `torch.optim` do. A step
    that comes after all averages (after `synchronize` or GradScaler), or that a step hook watches, is taken as a whole.
    One that fails on the way, with a rank that has gone, may have updated some parameters. Neither closures nor Adasum.

    An average is bit-identical on all ranks, and from run to run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: AnyCompression = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        bucket_cap_mb: float | None = None,
        autotune: bool = False,
        step_on_arrival: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is a DistributedOptimizer already: wrap the original one, once")
        super().__init__(check_optimizer(optimizer))
        # A process set may be used without a world.
        environment = current_world().environment if is_initialized() else Environment()
        tunes = check_autotune(autotune, bucket_cap_mb, op, environment)
        settings = Settings(
            check_compression(compression),
            check_op(op),
            check_predivide(gradient_predivide_factor, op),
            check_cap(bucket_cap_mb, environment.fusion_threshold_bytes, DEFAULT_BUCKET_CAP_BYTES),
            bool(sparse_as_dense),
            check_step_on_arrival(step_on_arrival, op),
        )
        check_positive_int(backward_passes_per_step, "backward_passes_per_step")
        named = check_named_parameters(optimizer, named_parameters)
        named_groups = check_groups(groups_of(num_groups, groups), named)
        if isinstance(process_set, ProcessSet) and not process_set.included():
            # This rank trains by itself.
            group, settings, tunes = current_world().group.alone(), settings.of_bystander(), False
        else:
            group = group_of(process_set, "hvd.DistributedOptimizer")
        self._uses_the_world = process_set is global_process_set
        self._named = named
        self._skipping = False
        reducer = _reducer_of(group, settings, backward_passes_per_step)
        try:
            group.require_agreement(
                (*settings.signature(), backward_passes_per_step, named_groups, tunes),
                "hvd.DistributedOptimizer",
                "(compression, op, predivide, bucket cap in bytes, sparse_as_dense, step_on_arrival, passes per step, "
                "groups, autotune)",
            )
            if tunes:
                assert isinstance(reducer, Reducer), "with Adasum it is refused"
                path = environment.autotune_log
                reducer.set_cap(tuned_cap(reducer.meet(), settings, named, named_groups, path=path))
            self._connect(reducer, named, named_groups)
            reducer.meet()
        except BaseException:
            reducer.close()
            raise

    def _connect(
        self, reducer: Reducer | Deltas, named: Sequence[tuple[str, Tensor]], groups: Sequence[Sequence[str]]
    ) -> None:
        self._reducer = reducer
        # GradScaler is to unscale averages itself before it decides whether to step. With Adasum gradients are each
        # rank's own, and so is what it finds: there the ranks decide together.
        self._step_supports_amp_scaling = isinstance(reducer, Deltas)
        self._by_bucket: StepByBucket | None = None
        if isinstance(reducer, Reducer) and reducer.settings.step_on_arrival:
            self._by_bucket = StepByBucket(self._optimizer, reducer)
        self._named_groups = groups
        reducer.add_params(named, groups)
        # Parameters outlive their optimizer; the hooks on them must not.
        finalizer = weakref.finalize(self, reducer.close)
        finalizer.atexit = False

    def close(self) -> None:
        """Remove every hook from the parameters; backward then communicates nothing."""
        self._reducer.close()

    # -- gradients

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks. Every rank must call it.

        For clipping and the like::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        A second call before the next backward does nothing, and ``step()`` without ``skip_synchronize``
        does not average again either.
        """
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` inside use the gradients as they are; call `synchronize` before."""
        if isinstance(self._reducer, Deltas):
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
        check_positive_int(passes, "backward_passes_per_step")
        self._reducer.backward_passes_per_step = passes

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
        if isinstance(self._reducer, Deltas):
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
                "call synchronize() before, or leave skip_synchronize() away"
            )
        self._reducer.require_sound()

    # -- what belongs to the wrapped optimizer

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
        named = names_of_added_group(self._optimizer, [name for name, _ in self._named])
        self._named += named
        self._reducer.add_params(named)
        self._reducer.meet()

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self._reducer.size} ranks of\n{self._optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        if not self._uses_the_world:
            raise TypeError(
                "a DistributedOptimizer with a process_set of its own cannot be pickled: pickle state_dict()"
            )
        place_of = {param: place for place, param in enumerate(self._params())}
        return {
            "optimizer": self._optimizer,
            "named_places": [(name, place_of[param]) for name, param in self._named],
            "groups": self._named_groups,
            "settings": self._reducer.settings,
            "backward_passes_per_step": self._reducer.backward_passes_per_step,
        }

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Wrap the unpickled optimizer anew, in the world as it is now.

        Talks to no other rank: where one alone unpickles, to look at it, nothing hangs. The ranks compare
        their models at the first gradient.
        """
        super().__init__(pickled["optimizer"])
        self._uses_the_world = True
        self._skipping = False
        params = self._params()
        self._named = [(name, params[place]) for name, place in pickled["named_places"]]
        reducer = _reducer_of(current_world().group, pickled["settings"], pickled["backward_passes_per_step"])
        self._connect(reducer, self._named, pickled["groups"])

    def _params(self) -> list[Tensor]:
        return [param for entry in self._optimizer.param_groups for param in entry["params"]]


def _reducer_of(group: Group, settings: Settings, backward_passes_per_step: int) -> Reducer | Deltas:
    if settings.op is Adasum:
        return Deltas(group, settings, backward_passes_per_step)
    return Reducer(group, settings, backward_passes_per_step)
