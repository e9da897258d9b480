"""`horovod.common.exceptions`."""

from hvdlite.torch import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """What elastic training raises when hosts come or go. Nothing here raises it: programs name it to catch it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
