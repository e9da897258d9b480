"""
The shim: programs written for Horovod run on hvdlite, and not one line of them is changed.

    python -m hvdlite.horovod train.py --epochs 10
    hvdlite-run -np 4 python -m hvdlite.horovod train.py --epochs 10

`install` is what both come to: from then on ``import horovod`` is this package, and ``import horovod.torch`` its
`torch`, in this process and those that it starts. Nothing named horovod is installed, and one that is installed is not
touched.

    finder     the names, found in this package          path/      what child processes find them by
    program    a program run as Python would run it      torch/, common/, runner/    Horovod's own modules
"""

from __future__ import annotations

from . import common  # noqa: F401  # programs reach for it without importing it
from .finder import install
from .runner import run

# What programs compare is Horovod's last release, which this is like.
__version__ = "0.28.1+hvdlite"

__all__ = ["__version__", "install", "run"]
