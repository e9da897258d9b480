"""
Makes ``import horovod.x`` import ``hvdlite.horovod.x``: one module under two names.

Installed by `install`, which in a child process the package in ``path/`` calls.
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

NAME = "horovod"
_OWN_PREFIX = "hvdlite."
# A directory in which there is a package `horovod`, and nothing else.
CHILDREN_PATH = str(Path(__file__).with_name("path"))

_PROGRAM = "use hvdlite-run --horovod -np 4 python train.py"
_OTHER_FRAMEWORKS = ("tensorflow", "keras", "_keras", "mxnet")
_OTHER_LAUNCHERS = ("spark", "ray", "data")


def install() -> None:
    """Make ``import horovod`` mean hvdlite, in this process and in those that it starts from now on.

    Child processes find it by ``sys.path`` and ``PYTHONPATH``, which get a directory in front of a `horovod` that is
    installed. Does nothing where it has been called already; a RuntimeError where another `horovod` is imported.
    """
    known = sys.modules.get(NAME)
    if known is not None and known.__name__ == NAME and CHILDREN_PATH not in (known.__file__ or ""):
        raise RuntimeError(
            f"horovod has been imported from {known.__file__} already: call hvdlite.horovod.install() before, or start "
            "the program with python -m hvdlite.horovod"
        )
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    if CHILDREN_PATH not in sys.path:
        # After the program's own directory, as PYTHONPATH is.
        sys.path.insert(1, CHILDREN_PATH)
    for_children = os.environ.get("PYTHONPATH", "")
    if CHILDREN_PATH not in for_children.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN_PATH, for_children]))


class Finder(MetaPathFinder):
    """Finds `horovod` and all that is in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of this package. An import of what it has not is a ModuleNotFoundError that says why."""
        if fullname.startswith(_OWN_PREFIX + NAME + ".") and (reason := _refusal(fullname.removeprefix(_OWN_PREFIX))):
            # `from horovod import x` asks for it under this name.
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
    """Gives the module of another name."""

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own_name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name, by which its relative imports and reloading go.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> NoReturn:
        """For who runs it with ``python -m``, who shows the words of an ImportError."""
        raise ImportError(f"{fullname.removesuffix('.__main__')} is no program here: {_PROGRAM}")


def _refuse_import(why: str) -> None:
    """Raise ``why`` for an import, but not for `importlib.util.find_spec`, which asks if there is one."""
    # Both ask a finder with the same words, by the same function of importlib's. Who called that tells them apart.
    asker = sys._getframe(2).f_back
    if asker is None or asker.f_globals.get("__name__") != "importlib.util":
        # Without its name: `from horovod import x` would swallow the words otherwise.
        raise ModuleNotFoundError(why)


def _is_package_of(fullname: str) -> bool:
    parent = fullname.rpartition(".")[0]
    return not parent or importlib.util.find_spec(_OWN_PREFIX + parent) is not None


def _why_not(fullname: str) -> str:
    has = "what it has is horovod.torch, horovod.common and horovod.runner"
    return _refusal(fullname) or f"{fullname}: hvdlite has no such module of Horovod's; {has}"


def _refusal(fullname: str) -> str | None:
    """Why hvdlite has none of Horovod's modules of this name, where that is known."""
    _, *parts = fullname.split(".")
    if "elastic" in parts:
        return f"{fullname}: elastic training is not in hvdlite yet; checkpoint, and start the job anew"
    if parts[:1] == ["run"]:
        return f"{fullname}: it is a function, and no module: from horovod import run"
    if parts and parts[0] in _OTHER_FRAMEWORKS:
        return f"{fullname}: hvdlite is for PyTorch; there is horovod.torch"
    if parts and parts[0] in _OTHER_LAUNCHERS:
        return (
            f"{fullname}: hvdlite is for PyTorch, started by hvdlite-run or horovod.run(); it has no {parts[0]} in it"
        )
    return None
