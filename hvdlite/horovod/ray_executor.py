"""`RayExecutor` of `horovod.ray`, whose workers find `horovod` too. The class is `hvdlite.ray`'s."""

from __future__ import annotations

import hvdlite.ray

from .finder import install


class RayExecutor(hvdlite.ray.RayExecutor):
    """`hvdlite.ray.RayExecutor`; ``import horovod`` in its workers imports the shim."""

    _prepare = staticmethod(install)
