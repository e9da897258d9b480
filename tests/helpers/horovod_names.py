"""Every name of Horovod 0.28.1 for PyTorch programs: functions, modules, arguments, flags and variables."""

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

# Names that hvdlite does not have, by decision.
NOT_THERE: set[str] = set()

# The modules that programs import, and the names that they import from them.
MODULES = {
    "horovod": ["run", "__version__"],
    "horovod.common": [],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.elastic": ["ObjectState", "State", "run_fn"],
    "horovod.common.exceptions": ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"],
    "horovod.common.process_sets": ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"],
    "horovod.common.util": [
        "ccl_built", "check_extension", "cuda_built", "ddl_built", "env", "extension_available", "gloo_built",
        "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built",
        "num_rank_is_power_2", "rocm_built", "split_list",
    ],
    "horovod.runner": ["run"],
    "horovod.torch": TORCH,
    "horovod.torch.compression": ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"],
    "horovod.torch.elastic": ["ElasticSampler", "TorchState", "run", "sampler", "state"],
    "horovod.torch.elastic.sampler": ["ElasticSampler"],
    "horovod.torch.elastic.state": [
        "ElasticSampler", "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler",
        "TorchState", "get_handler_registry", "set_handler_registry",
    ],
    "horovod.data": ["AsyncDataLoaderMixin", "BaseDataLoader"],
    "horovod.data.data_loader_base": ["AsyncDataLoaderMixin", "BaseDataLoader"],
    "horovod.torch.functions": [
        "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    ],
    "horovod.torch.mpi_ops": [
        "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather_async", "allreduce_async_", "broadcast_async_",
        "is_homogeneous", "join", "local_rank", "poll", "rank", "size", "synchronize",
    ],
    "horovod.spark": ["run"],
    "horovod.spark.runner": ["run"],
    "horovod.torch.optimizer": ["DistributedOptimizer"],
    "horovod.torch.sync_batch_norm": ["SyncBatchNorm"],
}  # fmt: skip

# Those that need another package; tests/integrations imports them.
OPTIONAL_MODULES = {
    "horovod.ray": ["RayExecutor"],
    "horovod.ray.runner": ["RayExecutor"],
    "sparkdl": ["HorovodRunner"],
}

NOT_THERE_MODULES = [
    "horovod.keras", "horovod.mxnet", "horovod.tensorflow",
]  # fmt: skip

OPTIMIZER_ARGUMENTS = """
    optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups
    sparse_as_dense process_set
""".split()  # noqa: SIM905  # a list to be read

OPTIMIZER_METHODS = """
    load_state_dict set_backward_passes_per_step skip_synchronize state_dict step synchronize zero_grad
""".split()  # noqa: SIM905  # a list to be read

RUN_ARGUMENTS = """
    func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
    host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo
    use_mpi mpi_args network_interface network_interfaces executable np min_np max_np
""".split()  # noqa: SIM905  # a list to be read

FLAGS = """
    -v --version -cb --check-build -np --num-proc --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
    --reset-limit --blacklist-cooldown-range --host-discovery-script --timeline-filename --timeline-mark-cycles
    --no-timeline-mark-cycles --stall-check --no-stall-check --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
    --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp
    --log-hide-timestamp --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile
    --hostfile --gloo --mpi --jsrun
""".split()  # noqa: SIM905  # a list to be read

VARIABLES = [
    f"HOROVOD_{name}"
    for name in """
    ADASUM_MPI_CHUNK_SIZE AUTOTUNE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE AUTOTUNE_LOG
    AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_WARMUP_SAMPLES BATCH_D2D_MEMCOPIES CACHE_CAPACITY CCL_CACHE CONTROLLER
    CPU_OPERATIONS CROSS_RANK CROSS_SIZE CYCLE_TIME DISABLE_GROUP_FUSION DISABLE_NVTX_RANGES DYNAMIC_PROCESS_SETS
    ELASTIC ELASTIC_TIMEOUT ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS FUSION_THRESHOLD GLOO_IFACE GLOO_RENDEZVOUS_ADDR
    GLOO_RENDEZVOUS_PORT GLOO_TIMEOUT_SECONDS GPU_OPERATIONS HIERARCHICAL_ALLGATHER HIERARCHICAL_ALLREDUCE HOSTNAME
    LOCAL_RANK LOCAL_SIZE LOG_HIDE_TIME LOG_LEVEL MPI_THREADS_DISABLE NUM_NCCL_STREAMS RANK SIZE SPARK_START_TIMEOUT
    STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS START_TIMEOUT THREAD_AFFINITY TIMELINE
    TIMELINE_MARK_CYCLES TORUS_ALLREDUCE WITH_PYTORCH
    """.split()  # noqa: SIM905  # a list to be read
]
