"""
`join`: a rank with fewer batches than others takes part in their steps with nothing to add, until all have joined.

    join ── all-reduces of the others: stand in, by the controller          ──┐
         ── steps of the others: one thread for each optimizer sits them out ┴─ until all have joined

The ranks agree on which optimizers these are (`control.joined_steps`): those that live on all ranks of their set. When
the garbage collector comes to one that nobody refers to any more differs by rank.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..control.controller import StandIn
from ..control.handle import Handle
from ..control.operation import Execution, Kind, Run
from ..control.reducer_registry import SitsOut
from ..runtime.world import current_world
from ..values import shown, whole_number
from .allreduce import stand_in

_OF_ALL, _OF_ACTIVE = "all", "active"


def join(device: int = -1, average: str = _OF_ALL) -> int:
    """Say that this rank has no more batches; wait until all ranks say so, and return the last one's rank.

    Meanwhile the others may call ``step()`` of their optimizers and the all-reduces, in which this rank has zeros to
    give (to a minimum, maximum or product: nothing). Other collectives raise an error on the ranks that call them.
    When all have joined, all may go on; gradients of this rank are gone then.

    ``average``: with ``"all"``, as in Horovod, averages are over all ranks, those that joined counting as zero; with
    ``"active"`` they are over the others alone, so that late batches weigh as much as early ones. All ranks pass the
    same.

    ``device``: the GPU for what this rank gives to all-reduces of CUDA tensors; -1 is the current one.
    """
    if not isinstance(average, str) or average not in (_OF_ALL, _OF_ACTIVE):
        raise ValueError(f"join: average={shown(average)} is neither {_OF_ALL!r} nor {_OF_ACTIVE!r}")
    device = _check_device(device)
    world = current_world()
    sitting = _Sitting(average_of_active=average == _OF_ACTIVE)
    handle = world.controller.join(
        average_of_active=sitting.average_of_active, stand_in=_stand_in_on(device), sit_out=sitting.begin
    )
    try:
        last_rank: int = handle.wait()
    except Exception as error:
        sitting.spoil(error)
        raise
    for thread in sitting.members:
        thread.join()
    # What has gone wrong in one of them, if anything.
    handle.wait()
    return last_rank


def _check_device(device: object) -> int:
    number = whole_number(device)
    if number is None:
        raise TypeError(f"join: device={shown(device)} is not the number of a GPU, nor -1 for the current one")
    gpus = torch.cuda.device_count()
    if gpus and number >= gpus:
        raise ValueError(f"join: device={shown(device)} is none of this process's {gpus} GPUs, 0 to {gpus - 1}")
    return number


class _Sitting:
    """Sits out steps, one thread for each optimizer."""

    def __init__(self, *, average_of_active: bool) -> None:
        self.average_of_active = average_of_active
        self.members: dict[threading.Thread, SitsOut] = {}

    def begin(self, member: SitsOut, handle: Handle) -> None:
        """Sit out the steps of one optimizer until all ranks do; what goes wrong is the handle's error."""
        # Its own pin: others end with the join, which may be before the last step is through.
        member.pin()
        thread = threading.Thread(target=self._run, args=(member, handle), name="hvdlite-join", daemon=True)
        self.members[thread] = member
        thread.start()

    def spoil(self, error: Exception) -> None:
        """The join has failed: who waits in a step of other ranks does so for ever, or until they are gone."""
        for thread, member in list(self.members.items()):
            if thread.is_alive():
                member.spoil(
                    "this rank was sitting out a step of the others when hvd.join() failed, and they may have gone on: "
                    f"make it anew on every rank. ({error})"
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
    """`allreduce.stand_in` on a GPU, -1 being the current one here: the controller's thread has another current one."""
    if device < 0 and torch.cuda.is_available():
        device = torch.cuda.current_device()

    def on_device(kind: Kind, same: Mapping[str, Any]) -> Run:
        def run(execution: Execution) -> None:
            with torch.cuda.device(device):
                stand_in(kind, same)(execution)

        return run

    return on_device
