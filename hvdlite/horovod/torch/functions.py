"""`horovod.torch.functions`: values and states from one rank to the others."""

from hvdlite.torch import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
