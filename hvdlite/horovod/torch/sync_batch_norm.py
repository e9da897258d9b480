"""`horovod.torch.sync_batch_norm`."""

from hvdlite.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
