"""A training program as plain data: parameters, optimizers, and what is done with them, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Ranks that do something; None: all of them.
Ranks = tuple[int, ...] | None


@dataclass(frozen=True)
class Param:
    """``kind`` is plain, sparse (an embedding's rows), channels_last, transposed or complex."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    kind: str = "plain"
    frozen: bool = False


@dataclass(frozen=True)
class Wrapped:
    """An optimizer of torch.optim or of the prelude, and the options of its DistributedOptimizer.

    ``groups`` has the names of the parameters of each group. ``options`` are written as they are, except ``groups``,
    lists of names, and ``exchange``, the name of a class of the prelude.
    """

    kind: str
    arguments: tuple[tuple[str, Any], ...]
    groups: tuple[tuple[str, ...], ...]
    options: tuple[tuple[str, Any], ...] = ()
    # The initial scale, if there is a GradScaler.
    scaler: float | None = None
    # The factor of a StepLR over the wrapper.
    schedule: float | None = None

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    def sharers(self, hosts: Sequence[str]) -> int:
        """Returns how many ranks divide its work; ``hosts`` are those of all its ranks."""
        counts = Counter(hosts)
        if self.option("shard") == "world" or len(counts) == 1:
            return len(hosts) if self.option("shard") else 1
        return counts[hosts[0]] if self.option("shard") and len(set(counts.values())) == 1 else 1


@dataclass(frozen=True)
class Term:
    """A summand of a loss: a parameter used ``times`` times on each rank's part of the batch ``batch``."""

    param: str
    batch: int
    ranks: Ranks = None
    times: int = 1
    # "inf" or "nan" on the first of `ranks`, or on all.
    factor: str | None = None


@dataclass(frozen=True)
class Backward:
    """One backward pass; ranks without a term have none."""

    terms: tuple[Term, ...]
    no_sync: tuple[int, ...] = ()
    # The optimizer whose GradScaler scales the loss.
    scaled: int | None = None
    # The optimizer whose `weighted` is called, and n of each rank.
    weighted: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Step:
    """A step of an optimizer.

    ``how`` is plain, synchronize, synchronize and clip, closure, or scaler, unscale, unscale and clip.
    """

    of: int
    how: str = "plain"
    # With closure: the pass that it computes.
    inside: Backward | None = None


@dataclass(frozen=True)
class ZeroGrad:
    """``of``: an optimizer's number, or None for the parameters, as `Module.zero_grad` does."""

    of: int | None
    to_none: bool = True
    ranks: Ranks = None


@dataclass(frozen=True)
class Freeze:
    param: str
    frozen: bool
    ranks: Ranks = None


@dataclass(frozen=True)
class SetGrad:
    """Sets a gradient by hand: to a new tensor, to the values of one in place, or to None."""

    param: str
    batch: int
    how: str = "replace"
    ranks: Ranks = None


@dataclass(frozen=True)
class AddParam:
    """A parameter that joins an optimizer.

    ``how`` is wrapper or inner (add_param_group), append (to the first group's list), group (to the list of groups), or
    replace (the first parameter of the first group, which leaves).
    """

    of: int
    param: Param
    how: str = "wrapper"


@dataclass(frozen=True)
class Reload:
    """``how`` is state (its own state_dict is loaded), deepcopy or pickle (the copy goes on)."""

    of: int
    how: str = "state"


@dataclass(frozen=True)
class Consolidate:
    """The optimizer's whole state is gathered on all ranks, to be compared, and then loaded if ``loads``."""

    of: int
    loads: bool = False


@dataclass(frozen=True)
class Read:
    """Something that is local: ``what`` is groups, state, repr or state_dict."""

    of: int
    what: str = "groups"
    ranks: Ranks = None


@dataclass(frozen=True)
class SetRate:
    """Multiplies the learning rates by a half, through the wrapper or the inner optimizer."""

    of: int
    through: str = "wrapper"


@dataclass(frozen=True)
class Collective:
    """An all-reduce of the program's own."""

    batch: int


@dataclass(frozen=True)
class Join:
    """The end of a program: each rank takes so many more steps, and joins."""

    of: int
    param: str
    batch: int
    steps: tuple[int, ...]
    average: str = "all"


Action = (
    Backward | Step | ZeroGrad | Freeze | SetGrad | AddParam | Reload | Consolidate | Read | SetRate | Collective | Join
)


@dataclass(frozen=True)
class Program:
    """``members`` are the ranks of the optimizers' process set; None: the global one."""

    size: int
    params: tuple[Param, ...]
    optimizers: tuple[Wrapped, ...]
    actions: tuple[Action, ...]
    members: tuple[int, ...] | None = None
    seed: int | None = field(default=None, compare=False)

    def all_params(self) -> dict[str, Param]:
        """Those of the beginning, and those that are added."""
        added = [action.param for action in self.actions if isinstance(action, AddParam)]
        return {param.name: param for param in (*self.params, *added)}
