"""`horovod.torch.optimizer`."""

from hvdlite.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
