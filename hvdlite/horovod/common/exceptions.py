"""`horovod.common.exceptions`: the two exceptions that programs catch."""

from hvdlite.elastic import HostsUpdatedInterrupt
from hvdlite.torch import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
