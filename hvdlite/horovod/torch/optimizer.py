"""`horovod.torch.optimizer`: `DistributedOptimizer`, from `hvdlite.torch`."""

from hvdlite.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
