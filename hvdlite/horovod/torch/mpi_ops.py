"""`horovod.torch.mpi_ops`: the collectives, and `init`, `rank`, `size` and so on."""

from hvdlite import is_homogeneous
from hvdlite import torch as names
from hvdlite.torch import *  # noqa: F403  # its __all__ is the list

# In place of hvdlite.torch's.
from ..beginning import init  # noqa: F401

__all__ = [*names.__all__, "is_homogeneous"]  # noqa: PLE0604  # every item is a str
