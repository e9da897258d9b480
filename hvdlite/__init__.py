"""
hvdlite: two lines around an optimizer, and its gradients are averaged over all ranks.

    import hvdlite as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

What is public is here, and made elsewhere; modules import only what stands before them:

    errors < environment < log < launch < client < call < store < topology < address < nodelist < neighbours < pmi
           < pmix < rendezvous < plan < bucket < compression < engine < collective < handle < request < conductor
           < in_order < mailbox < mismatch < negotiation < coordinator < negotiator < connect < process_set
           < registry < farewell < world
           < operations < replicate < sparse < layout < wire < reducer < arguments < proxy < optimizer < links

None of them imports hvdlite_launcher, but for `launch`, when `run` is called.
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
from .process_set import ProcessSet
from .replicate import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .world import (
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
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
    "ProcessSet",
    "ReduceOp",
    "Sum",
    "add_process_set",
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
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
]
