"""`horovod.torch.functions`: functions that broadcast or gather objects, parameters and optimizer states."""

from hvdlite.horovod.beginning import broadcast_optimizer_state
from hvdlite.torch import allgather_object, broadcast_object, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
