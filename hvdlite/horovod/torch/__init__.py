"""`horovod.torch`: the names of `hvdlite.torch`, and Horovod's submodules."""

from typing import Any

from hvdlite import torch as names
from hvdlite.torch import *  # noqa: F403  # its __all__ is the list

# Programs reach for hvd.mpi_ops without importing it.
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401

__all__ = names.__all__


def __getattr__(name: str) -> Any:
    return getattr(names, name)
