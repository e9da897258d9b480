"""
The shim: runs programs written for Horovod on hvdlite without changing a line of them.

    python -m hvdlite.horovod train.py --epochs 10
    hvdlite-run -np 4 python -m hvdlite.horovod train.py --epochs 10

Both call `install`. From then on, ``import horovod`` imports this package, and ``import horovod.torch`` its `torch`, in
this process and in those that it starts. The shim installs no package named horovod and changes none that is installed.

    finder    makes `import horovod.x` find hvdlite.horovod.x, which are made from a table
    names     what has another form under Horovod's names
    path/     a directory with a package `horovod`, for the PYTHONPATH of child processes
"""

from __future__ import annotations

import importlib

from .finder import install, make_importable
from .names import run

# Programs compare it with Horovod's versions: this is Horovod's last release, whose behaviour hvdlite has.
__version__ = "0.28.1+hvdlite"

__all__ = ["__version__", "install", "run"]

make_importable()

# Programs use horovod.common without importing it.
importlib.import_module(".common", __name__)
