"""`horovod.torch`: the names of `hvdlite.torch`, and Horovod's submodules."""

import importlib
from typing import Any

from hvdlite import torch as names
from hvdlite.torch import *  # noqa: F403  # its __all__ is the list

# Programs use hvd.mpi_ops without importing it.
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401

# In place of hvdlite.torch's.
from .functions import broadcast_optimizer_state  # noqa: F401
from .mpi_ops import init  # noqa: F401

__all__ = names.__all__

# Its own module of that name, which has submodules; `from . import` would find hvdlite's, imported above.
importlib.import_module(".elastic", __name__)


def __getattr__(name: str) -> Any:
    return getattr(names, name)
