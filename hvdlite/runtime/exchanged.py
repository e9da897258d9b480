"""
`Exchanged`: whether this process has exchanged anything with other ranks since it has connected to them.

    init ── begin ── ... operations, optimizers, the default process group ... ── end ── shutdown

Ranks that train without each other end with a model each, and without an error. Under hvdlite-run each worker notes it
at its end (`launcher.host.worker_hooks`), and hvdlite-run warns once. Under other launchers rank 0 does it here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ..calls.handle import next_number
from ..log import log

# `_uses_of_default_group` once it is open.
_UNUSED = 1


class Exchanged:
    """Compares what was counted when a world began and ended, for all worlds of a process."""

    def __init__(self) -> None:
        self.has_met: bool | None = None
        """Whether anything was exchanged; None before the process was in a world with other ranks."""
        self._size = 0
        self._warns = False
        self._begun_at: tuple[int, int | None] | None = None

    def begin(self, rank: int, size: int, *, is_adopted: bool, warns: bool) -> None:
        """Counts from now on, in a world of several ranks. ``is_adopted``: in the program's own default group.

        ``warns``: `warn_at_end` may warn.
        """
        self._size, self._warns = size, warns and rank == 0
        self.has_met = bool(self.has_met)
        # The program may have used its own group before.
        uses = _UNUSED if is_adopted else _uses_of_default_group()
        self._begun_at = None if self.has_met else (next_number(), uses)

    def end(self) -> None:
        """Counts no longer; to be called before anything is closed."""
        if self._begun_at is None:
            return
        (number, uses), self._begun_at = self._begun_at, None
        # One more than the last number, if no operation has taken any.
        now = _uses_of_default_group()
        self.has_met = next_number() > number + 1 or now is None or now != uses

    def warn_at_end(self) -> None:
        """Warns, on rank 0, if the process has trained and exchanged nothing. Not where its program has failed."""
        has_failed = getattr(sys, "last_value", None) is not None
        if not self._warns or self.has_met or has_failed or not _has_trained():
            return
        log.warning(
            "rank 0 of %d made an optimizer, and exchanged nothing with other ranks: if all have trained so, there are "
            "%d models. To train one, wrap the optimizer: hvd.DistributedOptimizer(optimizer, "
            "named_parameters=model.named_parameters()). If this is meant, set HVDLITE_INDEPENDENT=1",
            self._size,
            self._size,
        )


def _uses_of_default_group() -> int | None:
    """Returns a number that grows with each collective of the default process group, and each new group.

    None if its backend, such as one that is not PyTorch's, does not count.
    """
    group = dist.group.WORLD
    if group is None:
        return 0
    try:
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]  # torch's stubs lack much
        return dist.get_pg_count() + sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except (AttributeError, RuntimeError):
        return None


def _has_trained() -> bool:
    """Whether an optimizer was made: the first of each class marks its class's ``step``."""
    return any(getattr(vars(each).get("step"), "hooked", False) for each in _with_subclasses(Optimizer))


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for each in base.__subclasses__():
        yield from _with_subclasses(each)
