"""Every name that Horovod 0.28.1 has for PyTorch programs, its command line's and its environment's included."""

from __future__ import annotations

TORCH = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min Product ProcessSet Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
    alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
    broadcast_optimizer_state broadcast_parameters ccl_built check_extension cross_rank cross_size cuda_built ddl_built
    elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
    size sparse_allreduce_async start_timeline stop_timeline synchronize
""".split()  # noqa: SIM905  # a list to be read

# What is not there, by decision.
NOT_THERE = {"elastic"}

# The modules that programs import, and what they import from them.
MODULES = {
    "horovod": ["run", "__version__"],
    "horovod.common": [],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.exceptions": ["HorovodInternalError", "HostsUpdatedInterrupt"],
    "horovod.common.process_sets": ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"],
    "horovod.common.util": ["check_extension", "gpu_available", "num_rank_is_power_2", "split_list"],
    "horovod.runner": ["run"],
    "horovod.torch": TORCH,
    "horovod.torch.compression": ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"],
    "horovod.torch.functions": [
        "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    ],
    "horovod.torch.mpi_ops": [
        "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather_async", "allreduce_async_", "broadcast_async_",
        "is_homogeneous", "join", "local_rank", "poll", "rank", "size", "synchronize",
    ],
    "horovod.torch.optimizer": ["DistributedOptimizer"],
    "horovod.torch.sync_batch_norm": ["SyncBatchNorm"],
}  # fmt: skip
