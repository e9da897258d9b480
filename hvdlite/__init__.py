"""
hvdlite trains a PyTorch model on several ranks: it averages the gradients of an optimizer over all of them.

    import hvdlite as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

This module re-exports the public names of the packages below. Packages and modules import only what stands before
them, and within a package its own docstring has the order:

    errors < forks < values < files < faults < signing < ignored < environment < log < outside_graphs < rendezvous
           < comm < shm < control < timeline < compression < runtime < ops < buckets < exchanges < steps < optim
           < elastic < round_trips < communicator < signal_saver < chaos < lightning < ray < worker

A name is imported when the program first uses it: `import hvdlite` itself loads none of these packages.

Only `worker.run_in_workers` imports hvdlite_launcher, when `run` is called. Three more modules import this one:
`torch`, which has the same functions with Horovod's signatures; `horovod`, with which programs can import them as
`horovod.torch`; and `bench`, the benchmarks.
"""

import atexit
import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as _dist

if TYPE_CHECKING:
    from . import elastic
    from .buckets.exchange import Exchange, ExchangeWork, Gradients, Links
    from .buckets.outer import DiLoCo, LocalSGD
    from .comm.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
    from .compression.casts import Compression, Compressor
    from .compression.codecs import Codec
    from .control.handle import Handle
    from .errors import (
        CommunicationError,
        GradientError,
        HvdliteError,
        LaunchEnvironmentError,
        MismatchError,
        NotInitializedError,
        PeerLostError,
    )
    from .ops.api import (
        allgather,
        allgather_async,
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
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        poll,
        reducescatter,
        reducescatter_async,
        sparse_allreduce_async,
        synchronize,
    )
    from .ops.batch_norm import SyncBatchNorm
    from .ops.broadcast import allgather_object, broadcast_object, broadcast_parameters
    from .ops.join import join
    from .optim.checkpoint import load_checkpoint, save_checkpoint
    from .optim.optimizer import DistributedOptimizer
    from .optim.optimizer_state import broadcast_optimizer_state
    from .runtime.built import (
        ccl_built,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
    )
    from .runtime.process_set_functions import ProcessSet, add_process_set, global_process_set, remove_process_set
    from .runtime.straggler_functions import RankPace, stragglers
    from .runtime.timeline_functions import start_timeline, stop_timeline
    from .runtime.world import (
        cross_rank,
        cross_size,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from .signal_saver import save_on_signal
    from .worker.run_in_workers import run

__all__ = [
    "Adasum",
    "Average",
    "Codec",
    "CommunicationError",
    "Compression",
    "Compressor",
    "DiLoCo",
    "DistributedOptimizer",
    "Exchange",
    "ExchangeWork",
    "GradientError",
    "Gradients",
    "Handle",
    "HvdliteError",
    "LaunchEnvironmentError",
    "Links",
    "LocalSGD",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RankPace",
    "ReduceOp",
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
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_checkpoint",
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
    "save_checkpoint",
    "save_on_signal",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "stragglers",
    "synchronize",
]

# The module that each public name is imported from.
_NAMES_OF = {
    "comm.reduce_op": "Adasum Average Max Min Product ReduceOp Sum",
    "compression.casts": "Compression Compressor",
    "compression.codecs": "Codec",
    "control.handle": "Handle",
    "errors": (
        "CommunicationError GradientError HvdliteError LaunchEnvironmentError MismatchError "
        "NotInitializedError PeerLostError"
    ),
    "ops.batch_norm": "SyncBatchNorm",
    "ops.broadcast": "allgather_object broadcast_object broadcast_parameters",
    "ops.join": "join",
    "ops.api": (
        "allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall "
        "alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather "
        "grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async poll reducescatter "
        "reducescatter_async sparse_allreduce_async synchronize"
    ),
    "optim.checkpoint": "load_checkpoint save_checkpoint",
    "buckets.exchange": "Exchange ExchangeWork Gradients Links",
    "buckets.outer": "DiLoCo LocalSGD",
    "optim.optimizer": "DistributedOptimizer",
    "optim.optimizer_state": "broadcast_optimizer_state",
    "worker.run_in_workers": "run",
    "runtime.built": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled mpi_threads_supported "
        "nccl_built rocm_built"
    ),
    "runtime.process_set_functions": "ProcessSet add_process_set global_process_set remove_process_set",
    "runtime.straggler_functions": "RankPace stragglers",
    "runtime.timeline_functions": "start_timeline stop_timeline",
    "runtime.world": (
        "cross_rank cross_size init is_homogeneous is_initialized local_rank local_size rank shutdown size"
    ),
    "signal_saver": "save_on_signal",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


__version__: str


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used, so that programs load only the packages that they use."""
        if name == "__version__":
            return importlib.metadata.version("hvdlite")
        if name == "elastic":
            return importlib.import_module(".elastic", __name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        return value


def _make_shm_process_group(*args: Any) -> Any:
    from .shm.backend import ShmProcessGroup  # noqa: PLC0415  # when a program makes one

    return ShmProcessGroup(*args)


def _end_of_program() -> None:
    if world := sys.modules.get(f"{__name__}.runtime.world"):
        world.end_of_program()


# Here, so that after `import hvdlite` a program can pass the backend's name to torch.distributed.
if _dist.is_available() and not hasattr(_dist.Backend, "HVDSHM"):
    _dist.Backend.register_backend("hvdshm", _make_shm_process_group, devices=["cpu"])

# Registered here and not in init(): exit handlers run in reverse order, so this runs after those of the program.
atexit.register(_end_of_program)
