"""
`hvd.elastic`: training that goes on when workers are lost, added or removed, with Horovod's names and behaviour.

    run(train)(state) ── sync ── train ── commit ... ── a rank is lost: restore ──┐ shutdown, init, reset callbacks
                           ▲                         ── hosts have changed ───────┤
                           └──────────────────────────────────────────────────────┘

A `State` holds what must be equal on all ranks, and a copy of it from the last commit. hvdlite-run decides which
workers there are (``--min-np``). Modules import only what stands before them:

    state < ledger < sampler < handover < torch_state < runner
"""

from ..errors import StateLostError, WorkerRemovedError
from .runner import run, run_fn
from .sampler import ElasticSampler
from .state import HostsUpdatedInterrupt, HostUpdates, ObjectState, State
from .torch_state import TorchState

__all__ = [
    "ElasticSampler",
    "HostUpdates",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateLostError",
    "TorchState",
    "WorkerRemovedError",
    "run",
    "run_fn",
]
