"""
Checks the arguments of DistributedOptimizer: numbers, names of parameters, groups of them.

Pure functions of their arguments; errors are ValueErrors, in Horovod's words where it has them.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..comm.reduce_op import Adasum, Average, ReduceOp, Sum
from ..compression.casts import Compression, ResolvedCompression
from ..environment import Environment
from ..errors import WrongTypeError
from ..log import log
from ..ops.reduction import DTYPES
from ..ops.sendable import check_sendable, check_writable
from ..values import MOST, real_number, shown, whole_number
from .exchange import Exchange

MEBIBYTE = 2**20

Named = list[tuple[str, Tensor]]


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer, if it is one whose gradients can be averaged."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "torch.optim.LBFGS cannot be wrapped: it calls its closure a varying number of times per step, and "
            "every call would have to be averaged on all ranks; use SGD, AdamW or another first-order optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"hvd.DistributedOptimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer: pass one of "
            "torch.optim's, such as SGD"
        )
    return optimizer


def check_op(op: object) -> ReduceOp:
    """The operation, if gradients can be combined by it."""
    number = whole_number(op)
    for known in (Average, Sum, Adasum):
        if number == known:
            return known
    raise ValueError(
        f"op={shown(op)} is not one that gradients can be combined by: use hvd.Average, hvd.Sum or hvd.Adasum"
    )


def check_predivide(factor: object, op: ReduceOp) -> float:
    """The factor, if it is positive and there is an average to divide."""
    number = real_number(factor)
    if number is None or not (0 < number < math.inf):
        raise ValueError(f"gradient_predivide_factor={shown(factor)} is not a positive number, such as 2.0")
    if number != 1.0 and op != Average:
        # Horovod's words.
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    return number


def check_sparse_as_dense(wanted: object) -> bool:
    """Whether it is wanted; numbers will do, as for Horovod."""
    if real_number(wanted) not in (0.0, 1.0):
        raise ValueError(f"sparse_as_dense={shown(wanted)} is neither True nor False")
    return bool(wanted)


def check_step_on_arrival(wanted: object, op: ReduceOp) -> bool:
    """Whether it is wanted, if averages arrive before the step."""
    if not isinstance(wanted, bool):
        raise ValueError(f"step_on_arrival={shown(wanted)} is neither True nor False")
    if wanted and op == Adasum:
        raise ValueError(
            "step_on_arrival=True with op=hvd.Adasum: the step comes first there, and what it changed travels after "
            "it; leave one of them out"
        )
    return wanted


def check_cap(bucket_cap_mb: float | None, threshold_bytes: int | None, default_bytes: int) -> int:
    """The cap in bytes: the argument's, or the environment's, or the default."""
    if bucket_cap_mb is None:
        return default_bytes if threshold_bytes is None else threshold_bytes
    number = None if isinstance(bucket_cap_mb, bool) else real_number(bucket_cap_mb)
    if number is None or not (0 < number <= MOST):
        raise ValueError(
            f"bucket_cap_mb={shown(bucket_cap_mb)} is not a positive number of MiB: pass one, such as 16, of {MOST} at "
            "most"
        )
    return max(1, int(number * MEBIBYTE))


def check_exchange(
    exchange: object, op: ReduceOp, compression: ResolvedCompression, predivide: float
) -> Callable[[], Exchange] | None:
    """What makes the exchange, if the user has given one, which then says by itself how gradients are combined."""
    if exchange is None:
        return None
    if isinstance(exchange, Exchange) or not callable(exchange):
        hint = ", not an object of it" if isinstance(exchange, Exchange) else ""
        raise TypeError(
            f"exchange={shown(exchange)} makes no exchange: pass a class derived from hvd.Exchange{hint}, or a "
            "function that makes an object of one and takes no argument"
        )
    given = {
        f"op=hvd.{op.name}": op != Average,
        "compression": compression is not Compression.none,
        f"gradient_predivide_factor={predivide}": predivide != 1.0,
    }
    for argument, is_given in given.items():
        if is_given:
            raise ValueError(
                f"exchange={shown(exchange)} says by itself how gradients travel and are combined: leave out {argument}"
            )
    return exchange


def check_autotune(
    autotune: object,
    bucket_cap_mb: float | None,
    op: ReduceOp,
    environment: Environment,
    exchange: Callable[[], Exchange] | None = None,
) -> bool:
    """Whether the cap is to be measured. An argument beats the environment, which is said in the log."""
    if not isinstance(autotune, bool):
        raise ValueError(f"autotune={shown(autotune)} is neither True nor False")
    if bucket_cap_mb is not None:
        obstacle = f"bucket_cap_mb={shown(bucket_cap_mb)} says already how large buckets are: give one of the two"
    elif environment.fusion_threshold_bytes is not None:
        size = environment.fusion_threshold_bytes
        obstacle = f"HVDLITE_FUSION_THRESHOLD={size} says already how large buckets are: give one of the two"
    elif op == Adasum:
        obstacle = "with op=hvd.Adasum nothing travels during backward, so that the size of buckets decides nothing"
    elif exchange is not None:
        obstacle = f"it measures all-reduces, and exchange={shown(exchange)} is another way: give bucket_cap_mb"
    else:
        return autotune or environment.autotune
    if autotune:
        raise ValueError(f"autotune=True: {obstacle}")
    if environment.autotune:
        log.info("HVDLITE_AUTOTUNE=1 measures nothing for this optimizer: %s", obstacle)
    return False


def check_positive_int(value: object, argument: str) -> int:
    """The number, or a ValueError unless it is a whole one of at least 1."""
    number = whole_number(value)
    if number is None or not 1 <= number <= MOST:
        raise ValueError(f"{argument} must be > 0: {shown(value)} is not a whole number of at least 1, {MOST} at most")
    return number


def check_named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> Named:
    """The optimizer's parameters with their names, in the order of the names.

    Names of parameters that the optimizer does not have are left out; a parameter under several names has
    the first.
    """
    if named_parameters is None:
        return _own_names(optimizer, set())
    pairs = _check_pairs(named_parameters)
    name_of: dict[Tensor, str] = {}
    for name, param in pairs:
        name_of.setdefault(param, name)
    members = {param for entry in optimizer.param_groups for param in entry["params"]}
    _require_all_named(optimizer, name_of)
    return [(name, param) for param, name in name_of.items() if param in members]


def check_trained(named: Named) -> Named:
    """The parameters; a TypeError or ValueError for one whose gradients could not travel."""
    for name, param in named:
        what = "hvd.DistributedOptimizer"
        # Whole numbers, as frozen and quantized layers have them, never have one.
        if not nn.parameter.is_lazy(param) and not (param.is_floating_point() or param.is_complex()):
            continue
        check_sendable(param, what, f"parameter {name!r}")
        check_writable(param, what, f"parameter {name!r}")
        if param.dtype not in DTYPES:
            raise ValueError(
                f"{what}: gradients of {param.dtype}, as those of {name!r}, cannot be averaged: use a wider dtype"
            )
    return named


def names_of_added_group(optimizer: torch.optim.Optimizer, taken: Sequence[str]) -> Named:
    """The parameters of the last parameter group, with names that are not among those taken."""
    number = len(optimizer.param_groups) - 1
    return _names_of_group(optimizer, number, set(taken))


def groups_of(
    num_groups: int, groups: int | Sequence[Sequence[Tensor]] | None
) -> int | Sequence[Sequence[Tensor]] | None:
    """The groups, where they may also be said in Horovod's older way, a number of them or 0; ``groups`` counts more."""
    number = 0 if num_groups is False else whole_number(num_groups)
    if number is None or number < 0:
        raise ValueError(f"num_groups={shown(num_groups)} is not a number of groups: give one, or lists as groups")
    if number == 0:
        return groups
    warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
    return number if groups is None else groups


def check_groups(groups: int | Sequence[Sequence[Tensor]] | None, named: Named) -> list[list[str]]:
    """The names of each group's parameters; as many even chunks of neighbours where a number is given."""
    if groups is None:
        return []
    number = None if isinstance(groups, Tensor) else whole_number(groups)
    if number is not None and number > 0:
        count = min(number, len(named))
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
    return _names_of_groups(groups, {param: name for name, param in named})


def _names_of_groups(groups: Sequence[Sequence[Tensor]], name_of: dict[Tensor, str]) -> list[list[str]]:
    seen: set[Tensor] = set()
    result = []
    for number, members in enumerate(groups):
        if not isinstance(members, (list, tuple)):
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor. Entry "
                f"{number} is {type(members).__name__}"
            )
        names = []
        for member in members:
            if not isinstance(member, Tensor):
                raise ValueError(f"groups must consist of torch.Tensor. Group {number} holds {shown(member)}")
            name = name_of.get(member)
            if member in seen:
                which = f"A tensor of shape {tuple(member.shape)}" if name is None else repr(name)
                raise ValueError(f"A parameter can only appear once in groups. {which} appears again in group {number}")
            seen.add(member)
            if name is not None:
                # Others are another optimizer's, and are left out, as in Horovod.
                names.append(name)
        result.append(names)
    return result


def _check_pairs(named_parameters: Iterable[tuple[str, Tensor]]) -> Named:
    if isinstance(named_parameters, nn.Module):
        raise WrongTypeError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            f"model.named_parameters(). Found the module {type(named_parameters).__name__}: pass "
            "named_parameters=model.named_parameters()"
        )
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    for item in pairs:
        if not (
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)
        ):
            found = f"{type(item).__name__} of shape {tuple(item.shape)}" if isinstance(item, Tensor) else shown(item)
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                f"model.named_parameters(). Found {found}"
            )
    counts = Counter(name for name, _ in pairs)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ValueError("Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(repeated))
    return pairs


def _require_all_named(optimizer: torch.optim.Optimizer, name_of: dict[Tensor, str]) -> None:
    missing = [
        f"{own_name!r}, shape {tuple(param.shape)}"
        for own_name, param in _own_names(optimizer, set())
        if param not in name_of
    ]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Without a name: "
            + "; ".join(missing)
            + ". Pass the named_parameters() of every module that the optimizer trains"
        )


def _own_names(optimizer: torch.optim.Optimizer, taken: set[str]) -> Named:
    named: Named = []
    for number in range(len(optimizer.param_groups)):
        named += _names_of_group(optimizer, number, taken | {name for name, _ in named})
    return named


def _names_of_group(optimizer: torch.optim.Optimizer, number: int, taken: set[str]) -> Named:
    """By the names that the optimizer was built with, if it was, else by their places."""
    entry = optimizer.param_groups[number]
    places = [f"param_groups[{number}]['params'][{place}]" for place in range(len(entry["params"]))]
    names = [
        place if name in taken else name for name, place in zip(entry.get("param_names", places), places, strict=True)
    ]
    return list(zip(names, entry["params"], strict=True))
