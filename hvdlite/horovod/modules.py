"""
The table of Horovod's modules whose names are all hvdlite's, and the import hook that makes them.

    import hvdlite.horovod.torch.mpi_ops ── Finder ── a module with the names of its row, imported from where they are

`finder` gives these and the other modules of this package Horovod's names. `refusal` says why some are not there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __package__ + "."
_BUILDS = "ccl_built cuda_built ddl_built gloo_built mpi_built nccl_built rocm_built"

# By Horovod's module, without ``horovod.``: the names that it has from each module of hvdlite's. Later ones replace
# earlier ones. "*": all public names. A module is a package if others are in it, which are imported with it.
MODULES: dict[str, dict[str, str]] = {
    "common": {},
    "common.basics": {"hvdlite.horovod.beginning": "HorovodBasics"},
    "common.elastic": {"hvdlite.elastic": "ObjectState State run_fn"},
    "common.exceptions": {
        "hvdlite.torch": "HorovodInternalError",
        "hvdlite.horovod.helpers": "HorovodVersionMismatchError",
        "hvdlite.elastic": "HostsUpdatedInterrupt",
    },
    "common.process_sets": {"hvdlite.torch": "ProcessSet add_process_set global_process_set remove_process_set"},
    "common.util": {
        "hvdlite.torch": "check_extension",
        "hvdlite.horovod.helpers": (
            f"{_BUILDS} env extension_available gpu_available is_iterable is_version_greater_equal_than "
            "num_rank_is_power_2 split_list"
        ),
    },
    "data": {"hvdlite.horovod.data_loaders": "*"},
    "data.data_loader_base": {"hvdlite.horovod.data_loaders": "*"},
    "ray": {"hvdlite.horovod.ray_executor": "RayExecutor"},
    "ray.runner": {"hvdlite.horovod.ray_executor": "RayExecutor"},
    # Found, so that ``python -m`` says what to use instead; its import raises an error that says so too.
    "runner.launch": {},
    "torch": {"hvdlite.torch": "*", "hvdlite.horovod.beginning": "broadcast_optimizer_state init"},
    "torch.compression": {
        "hvdlite.compression.horovod_compressors": (
            "BF16Compressor Compression Compressor FP16Compressor NoneCompressor"
        )
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
        "hvdlite.horovod.beginning": "broadcast_optimizer_state",
    },
    "torch.mpi_ops": {"hvdlite.torch": "*", "hvdlite": "is_homogeneous", "hvdlite.horovod.beginning": "init"},
    "torch.optimizer": {"hvdlite.torch": "DistributedOptimizer"},
    "torch.sync_batch_norm": {"hvdlite.torch": "SyncBatchNorm"},
}


_OTHER_FRAMEWORKS = ("tensorflow", "keras", "_keras", "mxnet")
_OF_ELASTIC_RAY = ("elastic", "elastic_v2", "ElasticRayExecutor")


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
        if name == fullname or name not in MODULES:
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
    _, *parts = fullname.split(".")
    if parts == ["runner", "launch"]:
        return f"{fullname}: hvdlite has no horovodrun: use hvdlite-run --horovod, with its flags, or horovod.run()"
    if parts[:1] == ["run"]:
        return f"{fullname}: it is a function, not a module: from horovod import run"
    if parts and parts[0] in _OTHER_FRAMEWORKS:
        return f"{fullname}: hvdlite supports only PyTorch: use horovod.torch"
    if parts[:1] == ["ray"] and len(parts) > 1 and parts[1] in _OF_ELASTIC_RAY:
        return (
            f"{fullname}: hvdlite's RayExecutor has a fixed number of ranks: use hvdlite-run --min-np, or horovod.run()"
        )
    if parts[:1] == ["spark"]:
        return f"{fullname}: hvdlite does not support spark: start PyTorch programs with hvdlite-run or horovod.run()"
    return None
