"""
hvdlite with the names and signatures of `horovod.torch`: a Horovod program needs only this import.

    import hvdlite.torch as hvd

Most names are imported from `hvdlite`. Two differ: `init` also takes Horovod's argument ``comm``, and `Compression` has
Horovod's classes, whose methods take one tensor. `HorovodInternalError` and `check_extension` exist only here. Inside
this package ``import torch`` still imports PyTorch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .errors import HvdliteError
from .outside_graphs import outside_graphs

if TYPE_CHECKING:
    from . import (
        Adasum,
        Average,
        DistributedOptimizer,
        Max,
        Min,
        ProcessSet,
        Product,
        Sum,
        SyncBatchNorm,
        add_process_set,
        allgather,
        allgather_async,
        allgather_object,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        elastic,
        global_process_set,
        gloo_built,
        gloo_enabled,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        is_initialized,
        join,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        poll,
        rank,
        reducescatter,
        reducescatter_async,
        remove_process_set,
        rocm_built,
        run,
        shutdown,
        size,
        sparse_allreduce_async,
        start_timeline,
        stop_timeline,
        synchronize,
    )
    from .compression.horovod_compressors import Compression
    from .environment import CheckParameters

# All of hvdlite's errors derive from this class, so programs that catch Horovod's class catch them.
HorovodInternalError = HvdliteError

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


@outside_graphs
def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet] | str | None = None,
    *,
    timeout_s: float | None = None,
    check_parameters: CheckParameters | None = None,
) -> None:
    """Does what `hvdlite.init` does; also takes Horovod's first argument.

    ``comm``: None, the list of all ranks, or mpi4py's COMM_WORLD; each of these means every rank of the job. A
    communicator of fewer ranks is a ValueError, which says to use process sets.
    """
    # Imported here, so that the import of this module takes little time.
    from . import init as init_hvdlite  # noqa: PLC0415
    from . import is_initialized  # noqa: PLC0415
    from .communicator import check_comm  # noqa: PLC0415

    if comm is not None and not is_initialized():
        check_comm(comm, _size_to_be())
    init_hvdlite(timeout_s, process_sets=process_sets, check_parameters=check_parameters)


def check_extension(*_: object) -> None:
    """Does nothing. Horovod checks here that its compiled extension is installed; hvdlite has none."""


def _size_to_be() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    from .rendezvous.launchers import read_placement  # noqa: PLC0415  # as above

    placement = read_placement(os.environ)
    return 1 if placement is None else placement.size


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used, as `hvdlite` does."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Compression":
            from .compression.horovod_compressors import Compression as value  # noqa: PLC0415, N813
        else:
            value = getattr(importlib.import_module("hvdlite"), name)
        globals()[name] = value
        return value
