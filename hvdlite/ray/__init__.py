"""
Ranks as Ray's workers: `RayExecutor`, with Horovod's methods, and `HvdliteConfig`, for Ray Train.

    RayExecutor    actors of its own in a placement group ─┐
    HvdliteConfig  the workers that a trainer has started ─┴─ each takes a place ── hvd.init() connects the ranks

Ranks find each other through an actor that has their store (`places`); hvdlite opens no port for it. Needs Ray,
which is imported with this package; `HvdliteConfig` needs ``ray[train]`` too, which is imported when it is first used.

Modules import only what stands before them:

    places < executor < train
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .executor import ExecutorSettings, RayExecutor

if TYPE_CHECKING:
    from .train import HvdliteConfig

__all__ = ["ExecutorSettings", "HvdliteConfig", "RayExecutor"]


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name != "HvdliteConfig":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(".train", __name__).HvdliteConfig
