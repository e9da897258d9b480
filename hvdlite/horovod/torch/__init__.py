"""`horovod.torch`: what `hvdlite.torch` has."""

from typing import NoReturn

from hvdlite import torch as names
from hvdlite.torch import *  # noqa: F403  # its __all__ is the list

__all__ = names.__all__


def __getattr__(name: str) -> NoReturn:
    names.__getattr__(name)
