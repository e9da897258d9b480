"""
`join`: a rank with fewer batches than others takes part in their steps with nothing to add, until all have joined.

    join ── all-reduces of the others: stand in, by the controller          ──┐
         ── steps of the others: one thread for each optimizer sits them out ┴─ until all have joined

The ranks agree on these optimizers (`coordinator.scene`): those alive on all ranks of their set. An unreferenced
optimizer may be collected earlier on one rank than on another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..calls.generation import SitsOut
from ..calls.handle import Handle
from ..calls.operation import Execution, Kind, Run, StandIn
from ..errors import CommunicationError
from ..outside_graphs import keep_outside_graphs
from ..runtime.world import current_world
from ..values import shown, whole_number
from .allreduce import stand_in

_OF_ALL, _OF_ACTIVE = "all", "active"


def join(device: int = -1, average: str = _OF_ALL) -> int:
    """Declares that this rank has no more batches; waits until all ranks have joined, and returns the last one's rank.

    Meanwhile the others may call ``step()`` of their optimizers and the all-reduces. This rank gives zeros to them, and
    does not affect a minimum, maximum or product. Other collectives raise an error on the ranks that call them. When
    all ranks have joined, all may continue; this rank's gradients are then cleared.

    ``average``: with ``"all"``, as in Horovod, averages are over all ranks, and those that have joined count as zero.
    With ``"active"`` averages are over the other ranks only, so that late batches weigh the same as early ones. All
    ranks must pass the same.

    ``device``: the GPU for what this rank gives to all-reduces of CUDA tensors; -1 is the current one.
    """
    if not isinstance(average, str) or average not in (_OF_ALL, _OF_ACTIVE):
        raise ValueError(f"join: average={shown(average)} is neither {_OF_ALL!r} nor {_OF_ACTIVE!r}")
    device = _check_device(device)
    world = current_world()
    if world.survival is not None:
        raise ValueError(
            "hvd.join() does not work with hvdlite-run --survive, or hvd.init(survive=True): a rank that has joined "
            "has no step that it could finish when another is lost. Leave one of them out"
        )
    sitting = _SittingThreads(average_of_active=average == _OF_ACTIVE)
    try:
        handle = world.controller.join(
            average_of_active=sitting.average_of_active, stand_in=_stand_in_on(device), sit_out=sitting.begin
        )
        last_rank: int = handle.wait()
        for thread in sitting.members:
            thread.join()
        # Raises the error of a thread, if one has failed.
        handle.wait()
    except Exception as error:
        sitting.spoil(error)
        if isinstance(error, CommunicationError):
            # Another rank may have raised this, and left, before this rank came here.
            world.generation.reducers.check_join()
        raise
    return last_rank


def _check_device(device: object) -> int:
    number = whole_number(device)
    if number is None:
        raise TypeError(f"join: device={shown(device)} is not the number of a GPU, nor -1 for the current one")
    gpus = torch.cuda.device_count()
    if gpus and number >= gpus:
        raise ValueError(f"join: device={shown(device)} is none of this process's {gpus} GPUs, 0 to {gpus - 1}")
    return number


class _SittingThreads:
    """Sits out steps, one thread for each optimizer."""

    def __init__(self, *, average_of_active: bool) -> None:
        self.average_of_active = average_of_active
        self.members: dict[threading.Thread, SitsOut] = {}

    def begin(self, member: SitsOut, handle: Handle) -> None:
        """Sits out the steps of one optimizer, on a new thread, until all ranks do; an error becomes the handle's."""
        # Its own pin: the join's pins end with the join, which may be before the last step has ended.
        member.pin()
        thread = threading.Thread(target=self._run, args=(member, handle), name="hvdlite-join", daemon=True)
        self.members[thread] = member
        thread.start()

    def spoil(self, error: Exception) -> None:
        """Forbids further steps of optimizers whose threads still sit out a step: the join has failed."""
        for thread, member in list(self.members.items()):
            if thread.is_alive():
                member.spoil(
                    "this rank, which had joined, was taking part in a step of the others when hvd.join() failed: make "
                    f"a new optimizer on every rank. ({error})"
                )

    def _run(self, member: SitsOut, handle: Handle) -> None:
        try:
            while member.sit_out(self.average_of_active):
                pass
        except Exception as error:  # noqa: BLE001 - it is raised by join
            handle.fail(error)
        finally:
            member.unpin()


def _stand_in_on(device: int) -> StandIn:
    """Returns `allreduce.stand_in` for a GPU; -1 is the calling thread's current one, not the controller's."""
    if device < 0 and torch.cuda.is_available():
        device = torch.cuda.current_device()

    def on_device(kind: Kind, same: Mapping[str, Any]) -> Run:
        def run(execution: Execution) -> None:
            with torch.cuda.device(device):
                stand_in(kind, same)(execution)

        return run

    return on_device


keep_outside_graphs(globals())
