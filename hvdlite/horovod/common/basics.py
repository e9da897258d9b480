"""`horovod.common.basics`: `init`, `rank`, `size` and the rest, as the methods of an object."""

from __future__ import annotations

from typing import Any

from hvdlite import torch as names

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's object with `init`, `rank`, `size` and the rest; here they are the functions of `hvdlite.torch`."""

    def __init__(self, *_: object) -> None:
        """Horovod's arguments are where its compiled library lies; here there is none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(names, name)
