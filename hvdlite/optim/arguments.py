"""
Checks the arguments of `DistributedOptimizer`: numbers, names of parameters, groups of parameters.

`optimizer` calls these functions when it constructs an optimizer. They communicate with no other rank. They raise
ValueError or TypeError, with Horovod's message where Horovod has one.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..buckets.exchange import Exchange
from ..buckets.flags import MOST_PER_STEP
from ..buckets.settings import AnyOuter, DiLoCo, LocalSGD, Settings
from ..buckets.shares import Sharing, master_dtype
from ..comm.reduce_op import Adasum, Average, ReduceOp, Sum
from ..compression.approximations import Encoding, EncodingTypes
from ..compression.casts import Compression, ResolvedCompression, check_compression
from ..compression.codecs import Codec, check_blocks
from ..environment import Environment
from ..errors import WrongTypeError
from ..log import log
from ..ops.reduction import DTYPES
from ..ops.sendable import check_sendable, check_writable
from ..values import MOST, real_number, shown, whole_number

Named = list[tuple[str, Tensor]]


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Returns the optimizer. Raises TypeError if it is no `torch.optim.Optimizer`, and ValueError if it is LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "torch.optim.LBFGS cannot be wrapped: it calls its closure a varying number of times per step, and "
            "every call would have to be averaged on all ranks; use SGD, AdamW or another first-order optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"hvd.DistributedOptimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer: pass one, "
            "such as torch.optim.SGD"
        )
    return optimizer


def check_op(op: object) -> ReduceOp:
    """Returns the operation as a `ReduceOp`. Raises ValueError unless it is Average, Sum or Adasum."""
    number = whole_number(op)
    for known in (Average, Sum, Adasum):
        if number == known:
            return known
    raise ValueError(f"op={shown(op)} cannot combine gradients: use hvd.Average, hvd.Sum or hvd.Adasum")


def check_predivide(factor: object, op: ReduceOp) -> float:
    """Returns the factor. It must be positive and finite, and 1.0 if ``op`` is not Average; else a ValueError."""
    number = real_number(factor)
    if number is None or not (0 < number < math.inf):
        raise ValueError(f"gradient_predivide_factor={shown(factor)} is not a positive number, such as 2.0")
    if number != 1.0 and op != Average:
        # Horovod's words.
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    return number


def _refuse_beside(given: str, others: Mapping[str, bool]) -> None:
    """Raises ValueError if one of the others, whose words say why, is given beside an argument."""
    for what, is_given in others.items():
        if is_given:
            raise ValueError(f"{given} does not work with {what}: leave one of them out")


def check_codec(compression: object, op: ReduceOp) -> tuple[ResolvedCompression, Encoding | None]:
    """Returns the compression, or none and the codec that was given in its place; ValueError for that with Adasum."""
    if not isinstance(compression, EncodingTypes):
        own = ".none, .fp16, .bf16, .int8, .int4, .topk() or .powersgd()"
        return check_compression(compression, own), None
    why = "op=hvd.Adasum, which needs all ranks' steps as they are"
    _refuse_beside(f"compression={compression!r}", {why: op == Adasum})
    if isinstance(compression, Codec):
        check_blocks(compression)
    return Compression.none, compression


def _check_bool(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{argument}={shown(value)} is neither True nor False")
    return value


def check_sparse_as_dense(wanted: object) -> bool:
    """Returns the argument as a bool. The numbers 0 and 1 are accepted too, as in Horovod."""
    if real_number(wanted) not in (0.0, 1.0):
        raise ValueError(f"sparse_as_dense={shown(wanted)} is neither True nor False")
    return bool(wanted)


_ADASUM = "op=hvd.Adasum, which combines what each rank's step has changed"


def check_step_on_arrival(wanted: object, op: ReduceOp) -> bool:
    """Returns the argument. Raises ValueError with Adasum, which has no averages before the step."""
    wanted = _check_bool("step_on_arrival", wanted)
    _refuse_beside("step_on_arrival=True", {_ADASUM: wanted and op == Adasum})
    return wanted


def check_outer(outer: object, settings: Settings) -> AnyOuter | None:
    """Returns the argument. Raises TypeError for another type, and ValueError with what does not work beside it."""
    if outer is None:
        return None
    if not isinstance(outer, LocalSGD | DiLoCo):
        raise TypeError(
            f"outer={shown(outer)} is neither an hvd.LocalSGD nor an hvd.DiLoCo: pass one, such as "
            "hvd.LocalSGD(sync_every=8)"
        )
    own_compression = "no gradients go between hosts (DiLoCo has a compression= of its own)"
    others = {
        _ADASUM: settings.op == Adasum,
        "step_on_arrival=True, since no averages arrive from other hosts": settings.step_on_arrival,
        "exchange=, which decides itself what is sent": settings.exchange is not None,
        f"compression={settings.codec!r}, since {own_compression}": settings.codec is not None,
    }
    _refuse_beside(f"outer={outer!r}", others)
    return outer


def check_shard(shard: object, master: object, settings: Settings, optimizer: torch.optim.Optimizer) -> Sharing | None:
    """Returns how ranks share the optimizer's work. Raises ValueError with what does not work beside it."""
    master = _check_bool("master", master)
    if shard is None:
        if master:
            raise ValueError('master=True works with shard= alone: pass shard="world" or "host", too')
        return None
    if shard not in ("world", "host"):
        raise ValueError(
            f'shard={shown(shard)} is neither "world", for all ranks to share the optimizer\'s state, nor "host", for '
            "those of each host: pass one of them, or leave it out"
        )
    others = {
        "op=hvd.Adasum, for which each rank steps with its own gradients": settings.op == Adasum,
        f"outer={settings.outer!r}, since hosts that train apart have different states": settings.outer is not None,
        "step_on_arrival=True, which updates whole buckets": settings.step_on_arrival,
    }
    _refuse_beside(f"shard={shard!r}", others)
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    if master and all(master_dtype(dtype) == dtype for dtype in dtypes):
        raise ValueError(
            "master=True: this optimizer has no parameter of float16 or bfloat16, and others are updated as they are: "
            "leave it out"
        )
    return Sharing.of(str(shard), optimizer, master=master)


def check_max_norm(max_norm: object, op: ReduceOp, *, step_on_arrival: bool) -> float | None:
    """Returns the argument as a float, or None. Raises ValueError where the norm of the averages is known too late."""
    if max_norm is None:
        return None
    number = None if isinstance(max_norm, bool) else real_number(max_norm)
    if number is None or not number > 0:
        raise ValueError(f"max_norm={shown(max_norm)} is not a positive number, such as 1.0: pass one, or leave it out")
    too_early = "step_on_arrival=True, which steps before the norm of all averages is known"
    _refuse_beside(f"max_norm={number}", {_ADASUM: op == Adasum, too_early: step_on_arrival})
    return number


def check_weighted(loss: object, n: object, settings: Settings) -> tuple[Tensor, int]:
    """Returns the arguments of `weighted`. Raises TypeError or ValueError where there is no weighted average."""
    what = "optimizer.weighted(loss, n)"
    if not isinstance(loss, Tensor):
        raise TypeError(f"{what}: the loss is {shown(loss)}, and not a tensor")
    number, real = whole_number(n), None if isinstance(n, bool) else real_number(n)
    if number is None and real is not None and real.is_integer():
        # The sum of a mask of floats.
        number = int(real)
    if number is None or not 0 <= number <= MOST_PER_STEP:
        raise ValueError(
            f"{what}: n={shown(n)} is not a number of samples or tokens: pass a whole number from 0 to {MOST_PER_STEP}"
        )
    others = {
        f"op=hvd.{settings.op.name}, which does not average by n": settings.op != Average,
        f"exchange={settings.exchange!r}, which may compute something else": settings.exchange is not None,
        f"outer={settings.outer!r}, which averages hosts with equal weights": settings.outer is not None,
    }
    _refuse_beside(what, others)
    return loss, number


def check_survivable(settings: Settings, *, has_all_ranks: bool, others_share: bool | None = None) -> None:
    """Raises ValueError for what cannot go on in the step in which a rank is lost (``--survive``).

    ``others_share``: whether earlier optimizers have ``shard=``, whose loss takes all back; None if there are none.
    """
    others = {
        "step_on_arrival=True, whose step is taken before all ranks have all averages": settings.step_on_arrival,
        "op=hvd.Adasum, whose step is taken before ranks combine it": settings.op == Adasum,
        "an exchange= of your own, whose state would change twice in such a step": settings.exchange is not None,
        f"outer={settings.outer!r}, whose outer steps would be taken twice": settings.outer is not None,
        "optimizers with shard= and others without, since a lost rank takes its part of the state of those with it "
        "along, and steps of the others would go on": others_share not in (None, settings.shard is not None),
        "a process_set, whose ranks are those of a world that may end": not has_all_ranks,
    }
    _refuse_beside("hvdlite-run --survive, or hvd.init(survive=True),", others)


def check_cap(bucket_cap_mb: float | None, threshold_bytes: int | None, default_bytes: int) -> int:
    """Returns the bucket cap in bytes: the argument (in MiB), else ``threshold_bytes``, else the default."""
    if bucket_cap_mb is None:
        return default_bytes if threshold_bytes is None else threshold_bytes
    number = None if isinstance(bucket_cap_mb, bool) else real_number(bucket_cap_mb)
    if number is None or not (0 < number <= MOST):
        raise ValueError(
            f"bucket_cap_mb={shown(bucket_cap_mb)} is not a positive number of MiB: pass one, such as 16, of {MOST} at "
            "most"
        )
    return max(1, int(number * 2**20))


def check_exchange(
    exchange: object, op: ReduceOp, compression: ResolvedCompression | Encoding, predivide: float
) -> Callable[[], Exchange] | None:
    """Returns the user's factory of exchanges, or None. Raises TypeError if it is not callable.

    Raises ValueError if ``op``, ``compression`` or ``predivide`` is given too: it decides itself how to combine.
    """
    if exchange is None:
        return None
    if isinstance(exchange, Exchange) or not callable(exchange):
        raise TypeError(
            f"exchange={shown(exchange)} does not make an exchange: pass a class derived from hvd.Exchange, not an "
            "object of it, or a function without arguments that returns one"
        )
    given = {
        f"op=hvd.{op.name}": op != Average,
        "compression": compression is not Compression.none,
        f"gradient_predivide_factor={predivide}": predivide != 1.0,
    }
    for argument, is_given in given.items():
        if is_given:
            raise ValueError(
                f"exchange={shown(exchange)} decides how gradients are sent and combined: leave out {argument}"
            )
    return exchange


def check_autotune(
    autotune: object, bucket_cap_mb: float | None, settings: Settings, shard: object, environment: Environment
) -> bool:
    """Returns whether autotune is to choose the bucket cap.

    Where it cannot, ``autotune=True`` is a ValueError, and HVDLITE_AUTOTUNE=1 only a line in the log.
    """
    autotune = _check_bool("autotune", autotune)
    size, sets = environment.fusion_threshold_bytes, "already sets the size of the buckets: leave out one of the two"
    measures, way_out = "it measures all-reduces", "replaces: pass bucket_cap_mb"
    obstacles = {
        f"bucket_cap_mb={shown(bucket_cap_mb)} {sets}": bucket_cap_mb is not None,
        f"HVDLITE_FUSION_THRESHOLD={size} {sets}": size is not None,
        "with op=hvd.Adasum nothing is sent during backward, so the size of the buckets makes no difference": (
            settings.op == Adasum
        ),
        f"{measures}, which exchange={shown(settings.exchange)} {way_out}": settings.exchange is not None,
        f"{measures}, which compression={settings.codec!r} {way_out}": settings.codec is not None,
        f"{measures}, which outer={shown(settings.outer)} {way_out}": settings.outer is not None,
        f"{measures}, which shard={shown(shard)} {way_out}": shard is not None,
    }
    obstacle = next((words for words, is_there in obstacles.items() if is_there), None)
    if obstacle is None:
        return autotune or environment.autotune
    if autotune:
        raise ValueError(f"autotune=True: {obstacle}")
    if environment.autotune:
        log.info("HVDLITE_AUTOTUNE=1 has no effect on this optimizer: %s", obstacle)
    return False


def check_positive_int(value: object, argument: str) -> int:
    """Returns the value as an int. Raises ValueError unless it is a whole number of at least 1."""
    number = whole_number(value)
    if number is None or not 1 <= number <= MOST:
        raise ValueError(f"{argument} must be > 0: {shown(value)} is not a whole number of at least 1, {MOST} at most")
    return number


def check_named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> Named:
    """Returns the optimizer's parameters as (name, parameter), in the order of ``named_parameters``.

    Others are left out, and one with several names gets the first. Without them the names are those of `names_of_new`.
    """
    if named_parameters is None:
        return names_of_new(optimizer, [])
    name_of: dict[Tensor, str] = {}
    for name, param in _check_pairs(named_parameters):
        name_of.setdefault(param, name)
    members = {param: name for name, param in names_of_new(optimizer, [])}
    missing = [f"{name!r}, shape {tuple(param.shape)}" for param, name in members.items() if param not in name_of]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Without a name: "
            f"{'; '.join(missing)}. Pass the named_parameters() of every module that the optimizer trains"
        )
    return [(name, param) for param, name in name_of.items() if param in members]


def check_trained(named: Named) -> Named:
    """Returns the parameters. Raises TypeError or ValueError if the gradients of one cannot be sent."""
    for name, param in named:
        what = "hvd.DistributedOptimizer"
        # Parameters of integers, as in frozen or quantized layers, never have a gradient.
        if not nn.parameter.is_lazy(param) and not (param.is_floating_point() or param.is_complex()):
            continue
        check_sendable(param, what, f"parameter {name!r}")
        check_writable(param, what, f"parameter {name!r}")
        if param.dtype not in DTYPES:
            raise ValueError(
                f"{what}: gradients of {param.dtype}, as those of {name!r}, cannot be averaged: use a wider dtype"
            )
    return named


def names_of_new(optimizer: torch.optim.Optimizer, named: Named) -> Named:
    """Returns the optimizer's parameters that are not in ``named``, by new names: their group's, or their places."""
    known, taken = {id(param) for _, param in named}, {name for name, _ in named}
    found: Named = []
    for number, entry in enumerate(optimizer.param_groups):
        params, names = entry["params"], entry.get("param_names", [])
        for place, param in enumerate(params):
            if id(param) not in known:
                position = f"param_groups[{number}]['params'][{place}]"
                # A program that changes the list of parameters may leave the names as they were.
                own = [names[place]] if len(names) == len(params) else []
                again = (f"{position} ({count})" for count in itertools.count(2))
                name = next(name for name in itertools.chain(own, [position], again) if name not in taken)
                known.add(id(param))
                taken.add(name)
                found.append((name, param))
    return found


def groups_of(
    num_groups: int, groups: int | Sequence[Sequence[Tensor]] | None
) -> int | Sequence[Sequence[Tensor]] | None:
    """Returns ``groups``, or ``num_groups`` (Horovod's older name for a number of groups) if only that is given."""
    number = 0 if num_groups is False else whole_number(num_groups)
    if number is None or number < 0:
        raise ValueError(f"num_groups={shown(num_groups)} is not a number of groups: give one, or lists as groups")
    if number == 0:
        return groups
    warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
    return number if groups is None else groups


def check_groups(groups: int | Sequence[Sequence[Tensor]] | None, named: Named) -> list[list[str]]:
    """Returns the parameter names of each group. A number of groups splits the parameters into even runs."""
    if groups is None:
        return []
    number = None if isinstance(groups, Tensor) else whole_number(groups)
    if number is not None and number > 0:
        count = max(1, min(number, len(named)))
        names = [name for name, _ in named]
        bounds = [len(names) * number // count for number in range(count + 1)]
        return [names[start:stop] for start, stop in pairwise(bounds)]
    if number is not None or isinstance(groups, (str, int)) or not isinstance(groups, Sequence):
        # Horovod's words, for 0 too.
        kind = ValueError if number is not None else WrongTypeError
        raise kind(
            f"groups should be a non-negative integer or a list of list of torch.Tensor. Not {shown(groups)}; leave it "
            "out to have gradients grouped by size"
        )
    name_of = {param: name for name, param in named}
    seen: set[Tensor] = set()
    result: list[list[str]] = []
    for number, members in enumerate(groups):
        if not isinstance(members, (list, tuple)):
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor. Entry "
                f"{number} is {type(members).__name__}"
            )
        for member in members:
            if not isinstance(member, Tensor):
                raise ValueError(f"groups must consist of torch.Tensor. Group {number} holds {shown(member)}")
            if member in seen:
                which = repr(name_of[member]) if member in name_of else f"A tensor of shape {tuple(member.shape)}"
                raise ValueError(f"A parameter can only appear once in groups. {which} appears again in group {number}")
            seen.add(member)
        # Parameters of another optimizer are left out, as in Horovod.
        result.append([name_of[member] for member in members if member in name_of])
    return result


def _check_pairs(named_parameters: Iterable[tuple[str, Tensor]]) -> Named:
    should = (
        "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
        "model.named_parameters(). Found"
    )
    if isinstance(named_parameters, nn.Module):
        kind = type(named_parameters).__name__
        raise WrongTypeError(f"{should} the module {kind}: pass named_parameters=model.named_parameters()")
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    for item in pairs:
        is_pair = isinstance(item, tuple) and len(item) == 2
        if not (is_pair and isinstance(item[0], str) and isinstance(item[1], Tensor)):
            found = f"{type(item).__name__} of shape {tuple(item.shape)}" if isinstance(item, Tensor) else shown(item)
            raise ValueError(f"{should} {found}")
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError("Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(repeated))
    return pairs
