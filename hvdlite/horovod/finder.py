"""
The import hooks of the shim: ``import horovod.x`` imports ``hvdlite.horovod.x``, one module under two names.

    import horovod.torch.mpi_ops ── Finder ── hvdlite.horovod.torch.mpi_ops ── TableFinder ── its row of `MODULES`

`install` adds `Finder` to ``sys.meta_path``; `TableFinder` is there once this package is imported. In a child process,
the package in ``path/`` calls `install`. `refusal` says why some of Horovod's modules are not there.
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
# A directory that contains only a package `horovod`.
CHILDREN_PATH = str(Path(__file__).with_name("path"))

_PACKAGE = __package__ + "."
_BUILDS = "ccl_built cuda_built ddl_built gloo_built mpi_built nccl_built rocm_built"

# By Horovod's module, without ``horovod.``: the names that it has from each module of hvdlite's. Later ones replace
# earlier ones. "*": all public names. A module is a package if others are in it, which are imported with it.
MODULES: dict[str, dict[str, str]] = {
    "common": {},
    "common.basics": {"hvdlite.horovod.names": "HorovodBasics"},
    "common.elastic": {"hvdlite.elastic": "ObjectState State run_fn"},
    "common.exceptions": {
        "hvdlite.torch": "HorovodInternalError",
        "hvdlite.horovod.names": "HorovodVersionMismatchError",
        "hvdlite.elastic": "HostsUpdatedInterrupt",
    },
    "common.process_sets": {"hvdlite.torch": "ProcessSet add_process_set global_process_set remove_process_set"},
    "common.util": {
        "hvdlite.torch": "check_extension",
        "hvdlite.horovod.names": (
            f"{_BUILDS} env extension_available gpu_available is_iterable is_version_greater_equal_than "
            "num_rank_is_power_2 split_list"
        ),
    },
    "data": {"hvdlite.horovod.names": "AsyncDataLoaderMixin BaseDataLoader"},
    "data.data_loader_base": {"hvdlite.horovod.names": "AsyncDataLoaderMixin BaseDataLoader"},
    "ray": {"hvdlite.ray": "RayExecutor"},
    "ray.runner": {"hvdlite.ray": "RayExecutor"},
    "runner": {"hvdlite.horovod.names": "run"},
    "spark": {"hvdlite.spark": "run"},
    "spark.runner": {"hvdlite.spark": "run"},
    # Databricks' own package, which is found under this name unless it is installed.
    "sparkdl": {"hvdlite.spark": "HorovodRunner"},
    # Found, so that ``python -m`` says what to use instead; its import raises an error that says so too.
    "runner.launch": {},
    "torch": {"hvdlite.torch": "*", "hvdlite.horovod.names": "broadcast_optimizer_state init"},
    "torch.compression": {
        "hvdlite.compression.custom": ("BF16Compressor Compression Compressor FP16Compressor NoneCompressor")
    },
    "torch.elastic": {"hvdlite.elastic": "ElasticSampler ObjectState State TorchState run"},
    "torch.elastic.sampler": {"hvdlite.elastic": "ElasticSampler"},
    "torch.elastic.state": {
        "hvdlite.elastic": "ElasticSampler ObjectState TorchState",
        "hvdlite.elastic.torch_state": (
            "ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler get_handler_registry "
            "set_handler_registry"
        ),
    },
    "torch.functions": {
        "hvdlite.torch": "allgather_object broadcast_object broadcast_parameters",
        "hvdlite.horovod.names": "broadcast_optimizer_state",
    },
    "torch.mpi_ops": {"hvdlite.torch": "*", "hvdlite": "is_homogeneous", "hvdlite.horovod.names": "init"},
    "torch.optimizer": {"hvdlite.torch": "DistributedOptimizer"},
    "torch.sync_batch_norm": {"hvdlite.torch": "SyncBatchNorm"},
}

_REFUSED = {
    "run": "it is a function, not a module: from horovod import run",
    "runner.launch": "hvdlite has no horovodrun: use hvdlite-run --horovod, with its flags, or horovod.run()",
    **dict.fromkeys(
        ("spark.common", "spark.keras", "spark.lightning", "spark.torch", "spark.run_elastic", "spark.elastic"),
        "hvdlite has neither estimators nor elastic jobs on Spark: use horovod.spark.run()",
    ),
    **dict.fromkeys(
        ("tensorflow", "keras", "_keras", "mxnet"),
        "hvdlite supports only PyTorch: use horovod.torch",
    ),
    **dict.fromkeys(
        ("ray.elastic", "ray.elastic_v2", "ray.ElasticRayExecutor"),
        "hvdlite's RayExecutor has a fixed number of ranks: use hvdlite-run --min-np, or horovod.run()",
    ),
}


def make_importable() -> None:
    """Make the modules of the table importable as modules of this package. Does nothing on a second call."""
    if not any(isinstance(finder, TableFinder) for finder in sys.meta_path):
        sys.meta_path.append(TableFinder())


class TableFinder(MetaPathFinder):
    """Finds the modules of the table, by their names in this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_PACKAGE)
        if (name == fullname != "sparkdl") or name not in MODULES:
            return None
        return ModuleSpec(fullname, _TableLoader(name), is_package=bool(_modules_in(name)))


class _TableLoader(Loader):
    """Fills a module with the names of its row."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns nothing: the import system makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        if (reason := refusal(f"horovod.{self._name}")) is not None:
            raise ModuleNotFoundError(reason)
        public: dict[str, object] = {}
        for origin, names in MODULES[self._name].items():
            found = importlib.import_module(origin)
            public |= {name: getattr(found, name) for name in (found.__all__ if names == "*" else names.split())}
        module.__dict__.update(public, __all__=list(public), __getattr__=self._missing)
        for name in _modules_in(self._name):
            if refusal(f"horovod.{name}") is None:
                importlib.import_module(_PACKAGE + name)

    def _missing(self, name: str) -> object:
        """Raises the error for a name that the module does not have."""
        if (reason := refusal(f"horovod.{self._name}.{name}")) is not None:
            raise ImportError(reason)
        raise AttributeError(f"module {_PACKAGE + self._name!r} has no attribute {name!r}")


def _modules_in(package: str) -> list[str]:
    return [name for name in MODULES if name.rpartition(".")[0] == package]


def refusal(fullname: str) -> str | None:
    """Returns why hvdlite does not have this module of Horovod's; None without a known reason."""
    parts = fullname.split(".")[1:]
    reasons = (_REFUSED.get(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return next((f"{fullname}: {reason}" for reason in reasons if reason is not None), None)


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
        own = importlib.util.find_spec(_OWN_PREFIX + fullname)
        if own is None:
            has = "it has horovod.torch, horovod.common and horovod.runner"
            _refuse_import(refusal(fullname) or f"{fullname}: hvdlite does not have this module of Horovod; {has}")
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
