"""
`DistributedOptimizer`: checks its arguments and constructs its reducer. It also supports pickle.

    optimizer, arguments ── checked (`arguments`) ── Reducer, which has all ranks compare them ── DistributedOptimizer

Its methods, such as ``step``, are those of its base class in `averaging_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import forks
from ..buckets.exchange import Exchange
from ..buckets.flags import FIRST_REFERENCE
from ..buckets.settings import AnyOuter, Settings
from ..comm.reduce_op import Average, ReduceOp
from ..compression.casts import AnyCompression, Compression
from ..environment import Environment
from ..log import log
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set, group_of
from ..runtime.process_set import ProcessSet
from ..runtime.world import current_world, is_initialized
from .arguments import (
    check_autotune,
    check_cap,
    check_codec,
    check_exchange,
    check_groups,
    check_max_norm,
    check_named_parameters,
    check_op,
    check_optimizer,
    check_outer,
    check_positive_int,
    check_predivide,
    check_shard,
    check_sparse_as_dense,
    check_step_on_arrival,
    check_survivable,
    check_trained,
    groups_of,
)
from .autotune import tuned_cap
from .averaging_optimizer import AveragingOptimizer
from .optimizer_state import is_plain_optimizer, params_of
from .own_engine import Arguments, Connection
from .reducer import Reducer

# The fastest of 1 to 64 MiB by a few per cent, measured with two ranks over gloo on a 25 M-parameter MLP and on a
# ResNet of many small tensors.
DEFAULT_BUCKET_CAP_BYTES = 16 * 2**20
# The same for codecs, `powersgd` and `topk`, with which each bucket takes several small messages between hosts: so a
# matrix of 2048 × 2048 float32 numbers shares one with its bias.
_ENCODED_BUCKET_CAP_BYTES = 17 * 2**20


class DistributedOptimizer(AveragingOptimizer):
    """Wraps an optimizer so that ``step()`` uses gradients averaged over all ranks.

    Every rank must construct it, with the same arguments and a model of the same shapes, and must call ``step()``
    equally often. The constructor waits for no other rank. At the first step the ranks compare arguments and models,
    and a `MismatchError` on every rank names the argument or the first parameter that differs. All ranks must construct
    several optimizers one after the other, in the same order, but may use them in any order. Constructing in two
    threads at once raises RuntimeError. An average is bit-identical on all ranks, and from run to run.

    ``optimizer``: any of `torch.optim` except LBFGS, or a subclass of `torch.optim.Optimizer`. It is wrapped, not
    copied: its state, LR schedulers and hooks keep working.

    ``named_parameters``: ``model.named_parameters()``. The names appear in messages and must be unique.

    ``compression``: the format in which gradients are sent, see `Compression`. Parameters and optimizer state keep
    their dtype. Your own compression gets a whole bucket if it is a `Compressor`, or each gradient in its shape if it
    is in Horovod's style; the wires that it makes are summed and divided, in ``step()`` and not during backward. An
    error in it is raised on every rank. ``.int8``, ``.int4``, ``.topk()``, ``.powersgd()`` or a `Codec` of your own are
    for slow links: they are used between hosts only, and what they take from a gradient is added to the next.
    ``state_dict()`` has that under the key ``"hvdlite"``. It differs by rank: save and load it on every rank, or call
    `consolidate_state_dict` first.

    ``backward_passes_per_step``: the number of backward passes whose gradients are summed, as in Horovod, before they
    are averaged. An earlier ``step()``, as at the end of an epoch, averages the gradients so far.

    ``op``: ``hvd.Average``, ``hvd.Sum``, or ``hvd.Adasum`` (arXiv 2006.02924). With Adasum each rank takes the wrapped
    optimizer's step with its own gradients, and then the changes of the parameters are combined. Each rank keeps its
    own optimizer state and GradScaler scale. `synchronize` does nothing then, and `skip_synchronize` is an error.

    ``gradient_predivide_factor``: f scales by 1/f before the sum and by f/size after it; only for ``Average``. With 1.0
    the sum is divided by size, so the average of equal gradients is exactly that gradient; gradients sent in 16 bits
    are scaled by 1/size before the sum instead, so that it does not overflow.

    ``groups``: gradients that are sent together: a number of groups of neighbouring parameters, or lists of parameters.
    Other gradients are grouped by size. ``num_groups`` is Horovod's older name for a number.

    ``sparse_as_dense``: average sparse gradients as dense ones instead of gathering their rows. The optimizer gets them
    as sparse gradients again.

    ``process_set``: the ranks that take part. Any other rank steps with its own gradients and waits for no rank.

    ``bucket_cap_mb``: the maximum size of a bucket in MiB. Each bucket is sent as soon as it is full. The default is
    ``HVDLITE_FUSION_THRESHOLD`` in bytes (0: one bucket for each parameter), or else 16 MiB, 17 with a codec.

    ``autotune``: choose the bucket size by measuring, for about a second at most in the first step. All ranks use the
    same size from then on, and rank 0 logs it at level info. `HVDLITE_AUTOTUNE=1` does this for every optimizer without
    ``bucket_cap_mb``. ``autotune=True`` with ``hvd.Adasum``, or with a given size, is a ValueError.

    ``step_on_arrival``: let ``step()`` update the parameters of a bucket as soon as its averages arrive, while other
    buckets are still being sent. The results are bit-identical, but for frozen parameters whose gradients would stay
    zeros with ``zero_grad(set_to_none=False)``. After ``step()`` every ``param.grad`` is None. The optimizer must
    update each parameter independently. The step is taken as a whole if all averages have arrived before it (after
    `synchronize` or with GradScaler), or if a step hook is registered. A step that fails midway, since another rank has
    crashed, may have updated some of the parameters. It supports neither closures nor Adasum.

    ``exchange``: your own way to combine gradients, in place of an all-reduce: a class derived from `Exchange`, or a
    function without arguments that returns an instance. It replaces ``op``, ``compression``,
    ``gradient_predivide_factor`` and ``autotune``, which must be left out. ``state_dict()`` has its state under the key
    ``"hvdlite"``, by rank as above. Sparse gradients are gathered, unless ``sparse_as_dense``.

    ``max_norm``: clip the averages in ``step()`` by their global 2-norm, with the bits of
    `torch.nn.utils.clip_grad_norm_` over the parameters in the order of ``named_parameters``, also for sparse
    gradients. `grad_norm` is the norm before. A GradScaler has unscaled the gradients by then. It costs no collective.
    It does not work with Adasum or ``step_on_arrival``.

    ``outer``: `LocalSGD` or `DiLoCo`, for hosts that train apart for several steps. Gradients are then averaged only
    over the ranks of a host (of each rank alone where hosts have different numbers of ranks). Use `averaged` to
    evaluate and to save the model. ``state_dict()`` has this rank's part of the state under ``["hvdlite"]["outer"]``:
    save and load it on every rank. Each call of ``step()`` counts, also one in which GradScaler skips the update. A
    single host trains as without it.

    ``shard``: ``"world"`` or ``"host"``, to divide the optimizer's work and state among all ranks, or among those of
    each host: each rank updates its part of the parameters, and all gather them in ``step()``. On one host the results
    are bit-identical. ``optimizer`` stays as it is, but its state has this rank's part alone. Optimizers that update
    each element by itself (most of torch.optim, or a class with ``updates_elementwise = True``) are divided anywhere;
    of all others, such as Muon, each parameter belongs to one rank. After ``step()`` every ``param.grad`` is None.
    `consolidate_state_dict` makes a state that any number of ranks can load, with any ``shard`` or none. `join`, sparse
    gradients, Adasum, ``outer``, ``step_on_arrival`` and ``autotune`` do not work with it, and raise an error. With
    ``--survive`` a loss goes back to the last commit; all optimizers need it then.

    ``master``: with ``shard``, update parameters of float16 and bfloat16 in float32: each rank has its part of them and
    the state in float32, and the parameters are these, rounded. Checkpoints have them in the state of their parameter,
    under the key ``"master"``. Where a program writes the parameters itself, as it does to load a model, they follow.
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
        exchange: Callable[[], Exchange] | None = None,
        max_norm: float | None = None,
        outer: AnyOuter | None = None,
        shard: str | None = None,
        master: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is a DistributedOptimizer already: wrap the original one, once")
        forks.require_rank("hvd.DistributedOptimizer")
        super().__init__(check_optimizer(optimizer))
        # A process set may be used without a world.
        environment = current_world().environment if is_initialized() else Environment()
        op = check_op(op)
        predivide = check_predivide(gradient_predivide_factor, op)
        travels, codec = check_codec(compression, op)
        exchange = check_exchange(exchange, op, codec or travels, predivide)
        default_cap = DEFAULT_BUCKET_CAP_BYTES if codec is None else _ENCODED_BUCKET_CAP_BYTES
        settings = Settings(
            travels,
            op,
            predivide,
            check_cap(bucket_cap_mb, environment.fusion_threshold_bytes, default_cap),
            check_sparse_as_dense(sparse_as_dense),
            check_step_on_arrival(step_on_arrival, op),
            exchange,
            codec,
            check_max_norm(max_norm, op, step_on_arrival=step_on_arrival),
        )
        settings = replace(settings, outer=check_outer(outer, settings))
        tunes = check_autotune(autotune, bucket_cap_mb, settings, shard, environment)
        settings = replace(settings, shard=check_shard(shard, master, settings, optimizer))
        if shard is not None and not is_plain_optimizer(optimizer):
            raise ValueError(
                f"shard={shard!r}: {type(optimizer).__name__} has its own state_dict or load_state_dict, and may keep "
                "state elsewhere, of which other ranks would have no part: leave shard out"
            )
        self.shard = shard
        survival = current_world().survival if is_initialized() else None
        if survival is not None:
            has_all_ranks = process_set is global_process_set
            check_survivable(settings, has_all_ranks=has_all_ranks, others_share=survival.optimizers_share)
        self._given_settings, self._given_compression, self._given_process_set = settings, compression, process_set
        passes = check_positive_int(backward_passes_per_step, "backward_passes_per_step")
        named = check_trained(check_named_parameters(optimizer, named_parameters))
        named_groups = check_groups(groups_of(num_groups, groups), named)
        describe = partial(_describe, passes, named_groups, process_set if tunes else None)
        reducer = Reducer(partial(_connection_of, process_set, settings), describe, passes)
        try:
            with reducer.engine.only_one_thread():
                self._connect(reducer, named, named_groups, claims=True)
        except BaseException:
            reducer.close()
            raise
        if survival is not None:
            survival.optimizers_share = shard is not None
        if survival is not None and shard is not None and reducer.engine.ranks.rank == 0:
            log.warning(
                "survive: steps of %s (%s, shard=%r) do not go on without a lost rank, since its part of the "
                "optimizer's state is lost with it: all ranks go back to the last commit of hvd.elastic.run, and a "
                "program without it ends", reducer.name, type(optimizer).__name__, shard,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self._reducer.engine.ranks.size} ranks of\n{self._optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        if self._given_settings.shard is not None:
            raise TypeError("a DistributedOptimizer with shard= cannot be pickled or copied: pickle state_dict()")
        if self._given_process_set is not global_process_set:
            raise TypeError(
                "a DistributedOptimizer with a process_set of its own cannot be pickled: pickle state_dict()"
            )
        named, shared = self._groups.for_copy()
        gone = self._groups.gone()
        place_of = {param: place for place, param in enumerate(params_of(self._optimizer))}
        return {
            "optimizer": self._optimizer,
            "named_places": [(name, place_of[param]) for name, param in named],
            "groups": shared,
            "settings": self._reducer.settings,
            "compression": self._given_compression,
            "backward_passes_per_step": self._reducer.state.passes_per_step,
            # False once autotune has run: the chosen cap is in the settings.
            "autotune": self._reducer.is_still_to_tune,
            "exchange_state": self._reducer.exchange_state.state_dict(gone),
            "loss_scale": self._reducer.exchange_state.scale,
            "weight_reference": self._reducer.exchange_state.reference,
            "outer_state": self._reducer.step.state_dict(),
        }

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Wraps the unpickled optimizer for the current world. Communicates with no other rank and takes no number.

        So a single rank may unpickle one to inspect it. At its first step it takes the next number.
        """
        super().__init__(pickled["optimizer"])
        self._given_settings, self._given_compression = pickled["settings"], pickled["compression"]
        self._given_process_set = global_process_set
        params = params_of(self._optimizer)
        named = [(name, params[place]) for name, place in pickled["named_places"]]
        connect = partial(_connection_of, global_process_set, pickled["settings"])
        passes = pickled["backward_passes_per_step"]
        describe = partial(_describe, passes, pickled["groups"], global_process_set if pickled["autotune"] else None)
        reducer = Reducer(connect, describe, passes)
        self._connect(reducer, named, pickled["groups"], claims=False)
        # The last two are not there in what earlier versions have pickled.
        reference = pickled.get("weight_reference", FIRST_REFERENCE)
        numels = reducer.step.plan.layout.numels()
        reducer.exchange_state.load(pickled["exchange_state"], pickled.get("loss_scale"), reference, numels)
        reducer.step.load_state_dict(pickled["outer_state"])


def _describe(
    passes: int,
    groups: Sequence[Sequence[str]],
    tuned: ProcessSet | None,
    settings: Settings,
    exchange: Exchange,
) -> tuple[Arguments, Callable[..., int] | None]:
    """Returns the arguments that the ranks of a world compare when they open the engine, and autotune, or None."""
    tunes = tuned is not None and _is_member(tuned)
    arguments = {
        **settings.compared(exchange),
        "backward_passes_per_step": repr(passes),
        "groups": repr(groups),
        "autotune": repr(tunes),
    }
    if not tunes:
        return arguments, None
    environment = current_world().environment if is_initialized() else Environment()
    return arguments, partial(tuned_cap, settings=settings, groups=groups, path=environment.autotune_log)


def _is_member(process_set: object) -> bool:
    """Whether this rank is in the process set. Also True for an object of another type, on which `group_of` raises."""
    return not isinstance(process_set, ProcessSet) or process_set.membership().group is not None


def _connection_of(process_set: ProcessSet, settings: Settings) -> Connection:
    """Returns the connection to the set's ranks in the current world. On a rank outside the set: to itself alone."""
    # A process set may be used without a world.
    world = current_world() if is_initialized() else None
    check = Environment().check_parameters if world is None else world.environment.check_parameters
    ranks = None if world is None else world.group
    if not _is_member(process_set):
        world = current_world()
        return Connection(world.group.alone(), world.generation, settings.for_nonmember(), check, ranks)
    submit = None if world is None else world.controller.submit
    # With a lost rank its part of a divided state is lost, so that nobody goes on.
    survival = None if world is None or settings.shard is not None else world.survival
    group = group_of(process_set, "hvd.DistributedOptimizer")
    return Connection(group, process_set.membership().generation, settings, check, ranks, submit, survival)


keep_outside_graphs(globals())
