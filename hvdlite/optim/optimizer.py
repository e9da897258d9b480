"""
`DistributedOptimizer`: checks its arguments, compares them on all ranks, and makes its reducer; also from a pickle.

    optimizer, arguments ── checked, compared between the ranks ── Reducer ── DistributedOptimizer

What it does then is in `averaging_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp
from ..compression.casts import AnyCompression, Compression, check_compression
from ..environment import Environment
from ..ops.base import require_equal
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import global_process_set, group_of
from ..runtime.world import current_world, is_initialized
from .arguments import (
    check_autotune,
    check_cap,
    check_exchange,
    check_groups,
    check_named_parameters,
    check_op,
    check_optimizer,
    check_positive_int,
    check_predivide,
    check_sparse_as_dense,
    check_step_on_arrival,
    check_trained,
    groups_of,
)
from .autotune import tuned_cap
from .averaging_optimizer import AveragingOptimizer
from .exchange import Exchange
from .reducer import Connection, Reducer
from .settings import Settings

# Measured with two ranks over gloo, from 1 to 64 MiB, on a 25 M-parameter MLP and on a ResNet of many small
# tensors: fastest, by a few per cent, on both.
DEFAULT_BUCKET_CAP_BYTES = 16 * 2**20


class DistributedOptimizer(AveragingOptimizer):
    """Wraps an optimizer so that ``step()`` uses gradients averaged over all ranks.

    Every rank must construct it, with the same arguments and a model of the same shapes (a `MismatchError`
    names the first parameter that differs), and must call ``step()`` equally often. Of several, all ranks construct
    one after the other, in the same order: two threads at once are a RuntimeError.

    ``optimizer``: any of `torch.optim` but LBFGS, or a subclass of `torch.optim.Optimizer`. It is wrapped,
    not copied: its state, its LR schedulers and its hooks go on working.

    ``named_parameters``: ``model.named_parameters()``; names make messages readable and must be unique.

    ``compression``: what travels, see `Compression`. Parameters and optimizer state keep their dtype. One of your own
    sees gradients and nothing else: in hvdlite's manner (see `Compressor`) those of a bucket, in Horovod's each alone,
    in its shape. The wires that it makes are summed and divided. They travel in ``step()``, not during backward; and
    what goes wrong in it is an error on every rank.

    ``backward_passes_per_step``: how many backward passes add to a gradient before it is averaged. They
    are summed, not averaged, as in Horovod. A ``step()`` that comes early, at the end of an epoch, averages
    what there is.

    ``op``: ``hvd.Average``, ``hvd.Sum``, or ``hvd.Adasum`` (arXiv 2006.02924). With Adasum each rank takes the wrapped
    optimizer's step with its own gradients, and what the steps changed is combined; the state of the optimizer, and a
    GradScaler's scale, are each rank's own. `synchronize` does nothing then, and `skip_synchronize` is an error.

    ``gradient_predivide_factor``: f scales by 1/f before the sum and by f/size after it; only for
    ``Average``. With 1.0 the sum is divided by size: the average of equal gradients is that very gradient. What travels
    in 16 bits is then scaled by 1/size before the sum, so that it overflows no sooner than its terms.

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
    None. (Memory that ranks share stays theirs.) For optimizers that update each parameter by itself, as all that may
    be wrapped of `torch.optim` do. A step that comes after all averages (after `synchronize` or GradScaler), or that a
    step hook watches, is taken as a whole. One that fails on the way, with a rank that has gone, may have updated some
    parameters. Neither closures nor Adasum.

    ``exchange``: what happens to gradients between the ranks, in place of an all-reduce: a class of your own derived
    from `Exchange`, or a function without arguments that makes an object of one. It says by itself how gradients travel
    and are combined, so that ``op``, ``compression`` and ``gradient_predivide_factor`` are left out, and ``autotune``.
    What it keeps, ``state_dict()`` has under the key ``"exchange"``: each rank's own, to be saved and loaded on every
    rank. Sparse gradients are gathered, unless ``sparse_as_dense``.

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
        exchange: Callable[[], Exchange] | None = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is a DistributedOptimizer already: wrap the original one, once")
        super().__init__(check_optimizer(optimizer))
        # A process set may be used without a world.
        environment = current_world().environment if is_initialized() else Environment()
        op = check_op(op)
        predivide = check_predivide(gradient_predivide_factor, op)
        travels = check_compression(compression)
        exchange = check_exchange(exchange, op, travels, predivide)
        tunes = check_autotune(autotune, bucket_cap_mb, op, environment, exchange)
        settings = Settings(
            travels,
            op,
            predivide,
            check_cap(bucket_cap_mb, environment.fusion_threshold_bytes, DEFAULT_BUCKET_CAP_BYTES),
            check_sparse_as_dense(sparse_as_dense),
            check_step_on_arrival(step_on_arrival, op),
            exchange,
        )
        self._given_settings, self._given_compression, self._given_process_set = settings, compression, process_set
        passes = check_positive_int(backward_passes_per_step, "backward_passes_per_step")
        named = check_trained(check_named_parameters(optimizer, named_parameters))
        named_groups = check_groups(groups_of(num_groups, groups), named)
        reducer = Reducer(partial(_connection_of, process_set, settings), passes)
        group, settings = reducer.ranks, reducer.settings
        tunes = tunes and _is_member(process_set)
        try:
            with reducer.only_one_thread():
                require_equal(
                    group,
                    (*settings.signature(reducer.exchange), passes, named_groups, tunes),
                    "hvd.DistributedOptimizer",
                    f"({'compression' if exchange is None else 'exchange'}, op, predivide, bucket cap in bytes, "
                    "sparse_as_dense, step_on_arrival, passes per step, groups, autotune)",
                )
                if tunes:
                    path = environment.autotune_log
                    reducer.set_cap(tuned_cap(reducer.meet(), settings, named, named_groups, path=path))
                self._connect(reducer, named, named_groups)
                reducer.meet()
        except BaseException:
            reducer.close()
            raise

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self._reducer.size} ranks of\n{self._optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        if self._given_process_set is not global_process_set:
            raise TypeError(
                "a DistributedOptimizer with a process_set of its own cannot be pickled: pickle state_dict()"
            )
        place_of = {param: place for place, param in enumerate(self._params())}
        return {
            "optimizer": self._optimizer,
            "named_places": [(name, place_of[param]) for name, param in self._named],
            "groups": self._named_groups,
            "settings": self._reducer.settings,
            "compression": self._given_compression,
            "backward_passes_per_step": self._reducer.backward_passes_per_step,
            "exchange_state": self._reducer.exchange.state_dict(),
        }

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Wrap the unpickled optimizer anew, in the world as it is now.

        Talks to no other rank: where one alone unpickles, to look at it, nothing hangs. The ranks compare
        their models at the first gradient.
        """
        super().__init__(pickled["optimizer"])
        self._given_settings, self._given_compression = pickled["settings"], pickled["compression"]
        self._given_process_set = global_process_set
        params = self._params()
        named = [(name, params[place]) for name, place in pickled["named_places"]]
        connect = partial(_connection_of, global_process_set, pickled["settings"])
        reducer = Reducer(connect, pickled["backward_passes_per_step"])
        reducer.exchange.load_state_dict(pickled["exchange_state"])
        self._connect(reducer, named, pickled["groups"])

    def _params(self) -> list[Tensor]:
        return [param for entry in self._optimizer.param_groups for param in entry["params"]]


def _is_member(process_set: object) -> bool:
    """Whether this rank is one of the set's; also where it is no set, of which `group_of` has more to say."""
    return not isinstance(process_set, ProcessSet) or process_set.membership().group is not None


def _connection_of(process_set: ProcessSet, settings: Settings) -> Connection:
    """The ranks of the set in the world of the time. One that is no member trains by itself."""
    # A process set may be used without a world.
    world = current_world() if is_initialized() else None
    check = Environment().check_parameters if world is None else world.environment.check_parameters
    ranks = None if world is None else world.group
    if not _is_member(process_set):
        world = current_world()
        return Connection(world.group.alone(), world.generation, settings.of_bystander(), check, ranks)
    group = group_of(process_set, "hvd.DistributedOptimizer")
    return Connection(group, process_set.membership().generation, settings, check, ranks)
