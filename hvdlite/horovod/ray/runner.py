"""`horovod.ray.runner`: where some programs import `RayExecutor` from."""

from __future__ import annotations

from . import RayExecutor

__all__ = ["RayExecutor"]
