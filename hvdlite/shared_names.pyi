"""The public names that `hvdlite` and `hvdlite.torch` share, and where each is from: both read this file."""

from . import elastic as elastic
from .comm.reduce_op import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from .ops.api import (
    allgather as allgather,
    allgather_async as allgather_async,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    poll as poll,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
    sparse_allreduce_async as sparse_allreduce_async,
    synchronize as synchronize,
)
from .ops.batch_norm import SyncBatchNorm as SyncBatchNorm
from .ops.broadcast import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_parameters as broadcast_parameters,
)
from .ops.join import join as join
from .optim.optimizer import DistributedOptimizer as DistributedOptimizer
from .optim.optimizer_state import broadcast_optimizer_state as broadcast_optimizer_state
from .runtime.functions import (
    ccl_built as ccl_built,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rocm_built as rocm_built,
)
from .runtime.functions import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    global_process_set as global_process_set,
    remove_process_set as remove_process_set,
)
from .runtime.functions import start_timeline as start_timeline, stop_timeline as stop_timeline
from .runtime.world import (
    cross_rank as cross_rank,
    cross_size as cross_size,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    shutdown as shutdown,
    size as size,
)
from .worker.functions import run as run
