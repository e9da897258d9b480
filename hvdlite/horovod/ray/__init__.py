"""`horovod.ray`: `RayExecutor`, whose workers find `horovod` too. The class is `hvdlite.ray`'s."""

from __future__ import annotations

from typing import NoReturn

import hvdlite.ray

from ..finder import install

__all__ = ["RayExecutor"]


class RayExecutor(hvdlite.ray.RayExecutor):
    """`hvdlite.ray.RayExecutor`; ``import horovod`` in its workers imports the shim."""

    _prepare = staticmethod(install)


def __getattr__(name: str) -> NoReturn:
    if name == "ElasticRayExecutor":
        raise ImportError(
            "horovod.ray.ElasticRayExecutor: hvdlite's RayExecutor has a fixed number of ranks: use hvdlite-run "
            "--min-np, or horovod.run()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
