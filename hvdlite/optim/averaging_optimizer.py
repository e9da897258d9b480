"""
`AveragingOptimizer`: wraps an optimizer, and averages gradients over the ranks before it steps.

    loss.backward() ── Reducer (hooks) ── step: synchronize, then the wrapped optimizer's own step

The wrapped instance keeps its state, LR schedulers and step hooks. `reducer` averages the gradients. The subclass
`DistributedOptimizer` in `optimizer` checks the user's arguments and constructs the reducer.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from ..buckets.flags import FIRST_REFERENCE, no_loss
from ..errors import GradientError
from ..outside_graphs import keep_outside_graphs
from ..updates.divided_state import DividedState
from ..updates.sharded_update import ShardedUpdate
from ..updates.update import DCP, NormClipper, StatePattern, StepByBucket, WholeUpdate
from ..values import shown, whole_number
from .arguments import check_weighted
from .optimizer_proxy import FollowedGroups, OptimizerProxy
from .reducer import Reducer

# The key of hvdlite's own state in a state_dict, which PyTorch's optimizers ignore, and the keys of its parts.
_KEY = "hvdlite"
# What the exchange keeps; and its key in checkpoints that were written before there were parts.
_EXCHANGE = "exchange"
_OUTER = "outer"
# This rank's part of the optimizer's state, where ranks share it.
_SHARD = "shard"
# The scale of the losses whose gradients the exchange keeps, and what their weights were divided by, if they have some.
_LOSS_SCALE = "loss_scale"
_REFERENCE = "weight_reference"

# The methods that read the gradients of an optimizer's groups: GradScaler's, to unscale them or to look for inf, and
# that of Lightning's precision plugins, to clip them.
_UNSCALING = GradScaler._unscale_grads_.__name__
_CLIPPING = "main_params"


class _DiscardedError(Exception):
    """Leaves the wrapped optimizer's step with a closure, since all ranks discard the step."""


class AveragingOptimizer(OptimizerProxy):
    """An optimizer proxy that averages gradients. A subclass's constructor calls `_connect`."""

    def _connect(
        self,
        reducer: Reducer,
        named: Sequence[tuple[str, Tensor]],
        groups: Sequence[Sequence[str]],
        *,
        claims: bool,
    ) -> None:
        """Starts to average the gradients of these parameters. Waits for no other rank.

        ``claims``: take the optimizer's number now, as where every rank constructs one, and not at first use.
        """
        self._reducer = reducer
        self._by_bucket: StepByBucket | None = None
        if reducer.settings.step_on_arrival:
            self._by_bucket = StepByBucket(self._optimizer, reducer)
        max_norm, shard = reducer.settings.max_norm, reducer.settings.shard
        self._clipper = None if max_norm is None else NormClipper(max_norm)
        self._update = self._states = WholeUpdate(self._optimizer, self._clipper)
        if shard is not None:
            states = self._states = DividedState(self._optimizer, reducer, shard)
            self._update = ShardedUpdate(self._optimizer, reducer, states, self._clipper)
        self._skipping = False
        self._synchronized = False
        self._pattern = StatePattern(self._optimizer, self._states.complete_pattern)
        self._has_warned = False
        self._groups = FollowedGroups(self._optimizer, reducer, named, groups)
        if claims:
            reducer.engine.take_number()
        # Parameters outlive their optimizer; the hooks on them must not.
        self._finalizer = weakref.finalize(self, reducer.abandon)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Removes every hook from the parameters. Backward then communicates nothing."""
        self._reducer.close()
        # The finalizer refers to the reducer, and would keep its parameters and buckets in memory.
        self._finalizer.detach()

    # -- gradients

    def synchronize(self) -> None:
        """Waits until every gradient is the average over all ranks. Every rank must call it.

        For example, to clip gradients::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        A second call before the next backward does nothing. A ``step()`` without ``skip_synchronize`` does not average
        again either; it warns once, as Horovod does. With Adasum, `synchronize` does nothing.
        """
        self._gather_averages("optimizer.synchronize()")
        # With Adasum, `synchronize` did nothing.
        self._synchronized = not self._reducer.step.steps_first

    def weighted(self, loss: Tensor, n: int | Tensor) -> Tensor:
        """Returns the loss, scaled so that ``step()`` averages gradients by the samples or tokens ``n`` of each rank.

        ``loss`` is the mean over the n samples or tokens of this rank's batch. The gradient of the step is then that of
        the mean over the samples of all ranks: sum(n g) / sum(n). A plain average is the mean of their means, in which
        a sample of a small batch counts for more (pytorch/pytorch#67253, huggingface/transformers#34242)::

            optimizer.weighted(loss, n).backward()
            optimizer.step()

        Call it on every rank for every loss, before its backward pass, or on none: ranks that differ in a step get a
        MismatchError that names them. (On a GPU only those that called it look.) Over several backward passes n adds
        up. ``n`` is a whole number from 0, or a tensor of one, which is read and so waits for a GPU. With n = 0 the
        loss may be NaN, and its backward pass gives no parameter a gradient. The returned loss is for the backward pass
        alone: it is ``loss * n / reference``, where the reference, equal on all ranks, is the mean n of the last step,
        to keep gradients in range for 16-bit wires. n costs no collective. A rank that has joined counts as n = 0.

        Raises ValueError for other ``n``, with another ``op`` than ``hvd.Average``, with ``exchange=``, and ``outer=``.
        """
        tensor, number = check_weighted(loss, n, self._given_settings)
        factor = self._reducer.weigh(number)
        return tensor * factor if number else no_loss(tensor)

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last step's gradients, before ``max_norm`` clipped them: a scalar on their device.

        It is equal on all ranks (with ``outer=``, on those of a host). None before the first step, and without
        ``max_norm``. A step that GradScaler skips leaves it as it was.
        """
        return None if self._clipper is None else self._clipper.norm

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` uses the gradients as they are. Call `synchronize` before."""
        if self._reducer.step.steps_first:
            # Horovod's words.
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        earlier, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = earlier

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes only add to the gradients. The next pass outside averages the sum."""
        with self._reducer.state.accumulating():
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the parameters are those that all hosts share, to evaluate or save the model.

        With ``outer=`` that is the anchor: equal bits on all ranks. Afterwards, also after an exception, the
        parameters are again the host's own, bit for bit. Buffers, such as BatchNorm's statistics, stay this rank's own.
        It keeps a copy of the parameters meanwhile, and ``step()`` raises GradientError.

        Where hosts have several ranks, all ranks of a host must enter it together; no other host is waited for, but
        between `load_state_dict` and the first step: then the ranks of all hosts enter it together. Without a step
        or a loaded state, and without ``outer=``, ranks have equal parameters anyway, and it does nothing.
        """
        with self._reducer.step.averaged():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes add to a gradient before it is averaged; on every rank, between steps."""
        self.backward_passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like PyTorch's. Raises GradientError while gradients are being averaged, since they would be lost."""
        # The first two sentences are Horovod's.
        self._reducer.require_nothing_pending(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(). This is prohibited as it can cause a race condition: it was called",
            "call step() first, or synchronize() to drop them, on every rank. If these gradients are never used, "
            "compute them under `with optimizer.no_sync():`, or freeze the parameters meanwhile",
        )
        # The user drops their gradients, and nothing is pending.
        self._reducer.step.plan.weights.drop()
        self._optimizer.zero_grad(set_to_none)
        # After it: what has come from another optimizer has no gradient of that one any more.
        self._groups.let_go()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Waits for the averages, then takes the wrapped optimizer's step. Every rank must call it.

        A ``closure`` is called once, and the gradients that it computes are averaged before they are used. Returns
        what the closure returns, this rank's own loss.
        """
        if self._pattern.is_asked_for():
            self._pattern.make()
            return None
        self._pattern.drop()
        self._check_use(closure)
        set_by_scaler = vars(self)
        if not self._reducer.agree_to_step(set_by_scaler.get("grad_scale"), set_by_scaler.get("found_inf")):
            return None
        result: float | None = None
        with self._reducer.stepping():
            if closure is not None:
                result = self._step_with(closure)
            elif self._by_bucket is not None and not self._skipping and self._by_bucket.is_possible:
                self._by_bucket.step()
            else:
                result = self._step_on_averages()
        if self._by_bucket is not None:
            self._reducer.step.plan.drop_gradients()
        self._groups.let_go()
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks an optimizer in its own ``step``, and so where it is seen.

        If False, it unscales the averages itself before it decides whether to step. With Adasum and outer steps the
        ranks decide together: see `Reducer.agree_to_step`.
        """
        self._reducer.exchange_state.see_scaler(sys._getframe(1))
        return self._reducer.step.steps_first or self._reducer.settings.outer is not None

    def _gather_averages(self, what: str, *, of_next_step: bool = True) -> None:
        """Waits for all averages. ``of_next_step``: of the next step, where a GradScaler has skipped the last."""
        self._reducer.engine.require_own(what)
        if of_next_step:
            self._reducer.state.begin_after_skipped()
        self._groups.follow()
        self._reducer.synchronize()
        self._reducer.gather_averages()

    def _check_use(self, closure: object) -> None:
        self._reducer.engine.require_own("optimizer.step()")
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
        if closure is not None and self._by_bucket is not None:
            raise ValueError(
                "step(closure) does not work with step_on_arrival=True, because the closure computes gradients inside "
                "the step: call the closure before step(), or leave out step_on_arrival"
            )
        self._groups.follow()

    def _step_on_averages(self) -> float | None:
        """Averages the gradients, and takes the wrapped optimizer's step unless all ranks discard it."""
        self._average()
        if self._reducer.state.is_discarded:
            return None
        return self._update.step()

    def _step_with(self, closure: Callable[[], float]) -> float | None:
        """Takes the wrapped optimizer's step on the averages of what the closure computes. Returns its loss."""
        loss: float | None = None

        def average_after() -> float:
            nonlocal loss
            loss = closure()
            self._groups.follow()
            self._average()
            if self._reducer.state.is_discarded:
                raise _DiscardedError
            return loss

        try:
            # It calls the closure before it changes anything.
            return self._update.step(average_after)
        except _DiscardedError:
            return loss

    def _average(self) -> None:
        """Leaves averages in the gradients, clipped, unless the program has done so."""
        if not self._skipping:
            self._reducer.synchronize(arrived=self._update.arrived)
        elif self._reducer.step.plan.has_passes:
            raise GradientError(
                "step() was called in skip_synchronize() while gradients are not averaged: call synchronize() before "
                "step(), or call step() without skip_synchronize()"
            )
        self._reducer.state.require_sound()
        if self._reducer.state.is_discarded:
            return
        # Here and not in `synchronize`: before its step GradScaler has to unscale the gradients, and look for inf. What
        # has left the groups since backward is still averaged in this step, but is no part of the norm.
        self._update.prepare(self._groups.present())

    # -- what belongs to the wrapped optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict, so that checkpoints do not depend on the wrapping.

        What this rank's exchange, compression or outer steps keep is added under the key ``"hvdlite"``, which PyTorch's
        optimizers ignore. It differs by rank: see `consolidate_state_dict`. Waits for outer gradients that are being
        averaged.
        """
        exchange_state = self._reducer.exchange_state.state_dict(self._groups.gone())
        parts = {_EXCHANGE: exchange_state, _OUTER: self._reducer.step.state_dict()}
        # It would take a state dict without states of parameters for that of an optimizer without any.
        is_dcp = sys._getframe(1).f_globals.get("__name__") == DCP
        if not is_dcp:
            self._pattern.drop()
        state, shard = self._states.state_dict(whole_for="torch.distributed.checkpoint" if is_dcp else None)
        parts |= {_SHARD: shard}
        kept: dict[str, Any] = {owner: part for owner, part in parts.items() if part}
        if _EXCHANGE in kept and (scale := self._reducer.exchange_state.scale) is not None:
            kept[_LOSS_SCALE] = scale
        if _EXCHANGE in kept and (reference := self._reducer.exchange_state.reference) != FIRST_REFERENCE:
            kept[_REFERENCE] = reference
        return {**state, _KEY: kept} if kept else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state, and what this rank's exchange, compression and outer steps keep.

        Call it on every rank, or on one and then `broadcast_optimizer_state`, which does not send the latter. If
        ``state_dict`` has nothing under the key ``"hvdlite"``, these start anew.
        """
        kept = state_dict.get(_KEY, {_EXCHANGE: state_dict.get(_EXCHANGE, {})})
        numels = self._reducer.step.plan.layout.numels()
        self._reducer.exchange_state.load(
            kept.get(_EXCHANGE, {}), kept.get(_LOSS_SCALE), kept.get(_REFERENCE, FIRST_REFERENCE), numels
        )
        self._reducer.step.load_state_dict(kept.get(_OUTER, {}))
        self._pattern.replace()
        plain = {key: value for key, value in state_dict.items() if key not in (_KEY, _EXCHANGE)}
        self._states.load_state_dict(plain, kept.get(_SHARD, {}))

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Makes the next ``state_dict()`` of global rank ``to`` one that any number of ranks can load; None: of all.

        Every rank must call it, between two steps; it waits for all. Where ranks share the optimizer's state
        (``shard=``), that has the states of all parameters, whole and in CPU memory, as without ``shard``. What the
        compression has kept of gradients on each rank is replaced in that state by its mean, so that it enters the next
        average where every rank loads the same file. Of outer steps that state has the whole anchor and velocity.
        Training goes on as without it; after the next step ``state_dict()`` is local again. Raises ValueError for an
        exchange of your own that keeps a state, and has no `Exchange.consolidate`.
        """
        self._reducer.engine.require_own("optimizer.consolidate_state_dict()")
        self._pattern.drop()
        reducer = self._reducer
        # As in `add_param_group`.
        self._groups.follow()
        reducer.settle("optimizer.consolidate_state_dict() was called", "call step() first")
        group, links = reducer.connect(), reducer.engine.connected()
        named = whole_number(to)
        if to is not None and named not in group.ranks:
            ranks = ", ".join(map(str, group.ranks))
            raise ValueError(f"consolidate_state_dict: to={shown(to)} is not one of the optimizer's ranks: {ranks}")
        is_asked = to is None or group.ranks[group.rank] == named
        plans = [bucket.plan for bucket in reducer.step.plan.layout.buckets]
        reducer.exchange_state.consolidate(plans, links, keeps=is_asked)
        reducer.step.consolidate(keeps=is_asked)
        self._states.consolidate(keeps=is_asked)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups. Reading them is local, and any thread may do so.

        Only where a GradScaler reads them, to unscale the gradients or to look for infinities, or Lightning, to clip
        them, this waits for the averages, as `synchronize` does. Before clipping by group yourself, call `synchronize`.

        A parameter that is put into them is averaged from then on, and one that leaves them is let go. Every rank must
        make the same change.
        """
        reader = sys._getframe(1).f_code.co_name
        if reader == _UNSCALING and not self._skipping:
            # A rank without gradients takes part with zeros.
            self._gather_averages("GradScaler's step")
            # Also of a step that it skips, for which it does not call `step`.
            self._reducer.surplus.note_used_passes()
            self._reducer.state.is_unscaled = True
        elif reader == _CLIPPING and not self._skipping:
            self._gather_averages("clipping gradients", of_next_step=False)
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works like PyTorch's, and averages the group's gradients too. Every rank must call it; it waits for all."""
        self._reducer.engine.require_own("optimizer.add_param_group()")
        # Before surplus gradients are averaged: a rank that has some is within a step already, and others begin one.
        self._groups.follow()
        self._reducer.settle("add_param_group() was called", "call step() first")
        self._optimizer.add_param_group(param_group)
        try:
            self._groups.follow()
        except (TypeError, ValueError, GradientError):
            self._optimizer.param_groups.pop()
            raise
        self._reducer.connect()


keep_outside_graphs(globals())
