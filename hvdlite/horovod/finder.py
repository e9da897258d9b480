"""
The import hook that makes ``import horovod.x`` import ``hvdlite.horovod.x``: one module under two names.

`install` adds it to ``sys.meta_path``. In a child process, the package in ``path/`` calls `install`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .modules import refusal

NAME = "horovod"
_OWN_PREFIX = "hvdlite."
# A directory that contains only a package `horovod`.
CHILDREN_PATH = str(Path(__file__).with_name("path"))


def install() -> None:
    """Make ``import horovod`` mean hvdlite, in this process and in those that it starts from now on.

    Adds a directory with a package `horovod` to ``PYTHONPATH`` and ``sys.path``, by which child processes find it
    before a `horovod` that is installed. Does nothing on a second call. Raises a RuntimeError if the process has
    already imported another `horovod`.
    """
    known = sys.modules.get(NAME)
    if known is not None and known.__name__ == NAME and not _is_own(known):
        raise RuntimeError(
            f"horovod has been imported from {known.__file__} already: call hvdlite.horovod.install() before, or start "
            "the program with python -m hvdlite.horovod"
        )
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    if CHILDREN_PATH not in sys.path:
        # After the program's own directory, where Python puts PYTHONPATH too.
        sys.path.insert(1, CHILDREN_PATH)
    for_children = os.environ.get("PYTHONPATH", "")
    if CHILDREN_PATH not in for_children.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN_PATH, for_children]))


def _is_own(horovod: ModuleType) -> bool:
    # The directory may have several names: a link in the PYTHONPATH of a parent process, for example.
    return Path(CHILDREN_PATH).resolve() in Path(horovod.__file__ or "").resolve().parents


class Finder(MetaPathFinder):
    """Finds the package `horovod` and its modules; raises for modules of Horovod's that hvdlite does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the module in this package.

        If there is none, an import raises a ModuleNotFoundError that says why; `importlib.util.find_spec` gets None.
        """
        if fullname.startswith(_OWN_PREFIX + NAME + ".") and (reason := refusal(fullname.removeprefix(_OWN_PREFIX))):
            # `from horovod import x` looks the module up under this name.
            _refuse_import(reason)
            return None
        if fullname != NAME and not fullname.startswith(NAME + "."):
            return None
        own = importlib.util.find_spec(_OWN_PREFIX + fullname) if _is_package_of(fullname) else None
        if own is None:
            _refuse_import(_why_not(fullname))
            return None
        spec = ModuleSpec(fullname, AliasLoader(own.name), origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec


class AliasLoader(Loader):
    """Loads a module by importing it under its own name, ``own_name``."""

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own_name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has already been executed under its own name. Its relative imports and reloading need its own spec.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> NoReturn:
        """Raises an ImportError; ``python -m horovod...`` calls this and prints its message."""
        name = fullname.removesuffix(".__main__")
        raise ImportError(f"{name} is not a program in hvdlite: use hvdlite-run --horovod -np 4 python train.py")


def _refuse_import(why: str) -> None:
    """Raises ``why`` if the caller is an import statement; returns if it is `importlib.util.find_spec`."""
    # Both call a finder through the same function of importlib's; only that function's caller tells them apart.
    asker = sys._getframe(2).f_back
    if asker is None or asker.f_globals.get("__name__") != "importlib.util":
        # Without the argument `name`: with it, `from horovod import x` would replace the message.
        raise ModuleNotFoundError(why)


def _is_package_of(fullname: str) -> bool:
    parent = fullname.rpartition(".")[0]
    return not parent or importlib.util.find_spec(_OWN_PREFIX + parent) is not None


def _why_not(fullname: str) -> str:
    has = "it has horovod.torch, horovod.common and horovod.runner"
    return refusal(fullname) or f"{fullname}: hvdlite does not have this module of Horovod; {has}"
