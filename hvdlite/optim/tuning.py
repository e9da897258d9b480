"""
`Tuning`: what the ranks compare of an optimizer's arguments, and the bucket cap that autotune has chosen.

    settings and exchange of a world ── describe ── arguments, which `Opening` compares
                                                 └─ autotune, which `Opening` calls ── the cap, for these hosts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from ..buckets.exchange import Exchange
from ..buckets.settings import Settings
from ..comm.group import Group
from ..steps.step_world import Added
from .opening import Arguments, Tune


class TuneNamed(Protocol):
    """Autotune's function that chooses the cap, in bytes, for these parameters. It waits for all ranks."""

    def __call__(self, group: Group, /, *, named: Sequence[tuple[str, Tensor]]) -> int: ...


# Returns, for a world's settings and exchange, the arguments that the ranks compare, and autotune, or None.
Describe = Callable[[Settings, Exchange], tuple[Arguments, TuneNamed | None]]


class Tuning:
    """One optimizer's arguments as the ranks of a world compare them, and autotune's choice, in all worlds."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self.arguments: Arguments = {}
        """What the ranks of this world compare."""
        self._tune: TuneNamed | None = None
        # The hosts of the ranks that the cap was last chosen for.
        self._tuned_for: tuple[str, ...] | None = None

    def enter(self, settings: Settings, exchange: Exchange) -> None:
        """Describes a world: a rank that was outside the process set may be in it now."""
        self.arguments, self._tune = self._describe(settings, exchange)

    @property
    def is_due(self) -> bool:
        """Whether autotune is on and has not chosen a cap yet."""
        return self._tune is not None and self._tuned_for is None

    def tune(self, added: Iterable[Added], hosts: tuple[str, ...], cap_bytes: int) -> Tune | None:
        """Returns autotune for these parameters, or None if it is off.

        It knows ``cap_bytes``, that of this or an earlier world, if it was chosen for ranks on these ``hosts``.
        """
        named = [pair for each in added for pair in each.params.items()]
        known = cap_bytes if self._tuned_for == hosts else None
        return None if self._tune is None else Tune(partial(self._tune, named=named), known)

    def note_choice(self, hosts: tuple[str, ...]) -> None:
        """Notes that the cap was chosen for ranks on these hosts."""
        self._tuned_for = hosts
