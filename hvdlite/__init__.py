"""
hvdlite: two lines around an optimizer, and its gradients are averaged over all ranks.

    import hvdlite as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

What is public is here, and made elsewhere; modules import only what stands before them:

    errors < environment < log < launch < client < call < store < topology < address < nodelist < neighbours < pmi
           < pmix < rendezvous < plan < bucket < codec < compression < engine < collective < handle < request
           < conductor < in_order < mailbox < mismatch < negotiation < coordinator < negotiator < connect
           < farewell < world < operations < replicate < sparse < layout < wire < reducer < arguments < proxy
           < optimizer < links < communicator

None of them imports hvdlite_launcher, but for `launch`, when `run` is called. Above them stand `torch`, the same under
Horovod's names, and `horovod`, which makes programs find it under these.
"""

from .collective import Average, ReduceOp, Sum
from .compression import Compression, Compressor
from .errors import (
    CommunicationError,
    GradientError,
    HvdliteError,
    LaunchEnvironmentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from .launch import run
from .operations import allgather, allreduce, barrier, broadcast
from .optimizer import DistributedOptimizer
from .replicate import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "CommunicationError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "GradientError",
    "HvdliteError",
    "LaunchEnvironmentError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shutdown",
    "size",
]
