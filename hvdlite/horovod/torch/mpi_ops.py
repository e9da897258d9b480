"""`horovod.torch.mpi_ops`: the collectives, and who and where one is."""

from hvdlite import torch as names
from hvdlite.torch import *  # noqa: F403  # its __all__ is the list

__all__ = names.__all__
