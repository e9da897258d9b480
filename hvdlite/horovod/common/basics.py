"""`horovod.common.basics`: `HorovodBasics`, whose methods are `init`, `rank`, `size` and the other functions."""

from __future__ import annotations

from typing import Any

from hvdlite import torch as names
from hvdlite.horovod.beginning import init

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's class with `init`, `rank`, `size` and so on as methods; each is the function of `hvdlite.torch`."""

    def __init__(self, *_: object) -> None:
        """Ignores Horovod's arguments, which locate its compiled library; hvdlite has none."""

    # In place of hvdlite.torch's.
    init = staticmethod(init)

    def __getattr__(self, name: str) -> Any:
        return getattr(names, name)
