"""`horovod.torch.sync_batch_norm`: `SyncBatchNorm`, from `hvdlite.torch`."""

from hvdlite.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
