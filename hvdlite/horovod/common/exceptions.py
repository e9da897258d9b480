"""`horovod.common.exceptions`: the exceptions that programs catch."""

from hvdlite.elastic import HostsUpdatedInterrupt
from hvdlite.torch import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Never raised: Horovod raises it where its compiled extension is of another framework's version."""
