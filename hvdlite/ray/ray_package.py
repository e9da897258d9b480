"""Imports Ray, which need not be installed where hvdlite is, and says how to install it."""

from __future__ import annotations

import importlib
from typing import Any


def import_ray(module: str, extra: str = "") -> Any:
    """Returns a module of Ray's, such as ``ray.util``; an ImportError with pip's command if it is not installed.

    ``extra`` is the part of Ray that has it, such as ``[train]``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # `ray.train` without its extra raises this for one of the packages that it needs.
        if error.name == "ray" or extra:
            raise ImportError(
                f"hvdlite.ray needs {module}, which is not installed: pip install 'ray{extra}'"
            ) from error
        raise
