"""
Checks the ``comm`` argument of Horovod's `init`: a list of ranks, or a communicator of mpi4py's.

`hvdlite.torch.init` calls it. hvdlite gets the ranks from the launcher and not from ``comm`` (see `rendezvous`), so
``comm`` must mean all of them.
"""

from __future__ import annotations

from typing import Any

from .values import shown, whole_number


def check_comm(comm: Any, size: int) -> None:
    """Raises a ValueError unless ``comm`` means all ``size`` ranks: None, [], a list of all, or mpi4py's COMM_WORLD."""
    if comm is None:
        return
    if hasattr(comm, "Get_size"):
        if comm.Get_size() != size:
            raise ValueError(
                f"hvd.init(comm={shown(comm)}): that communicator has {comm.Get_size()} ranks and the job has {size}. "
                "Start the program with mpirun or srun if MPI is to place its ranks; hvd.init() without comm takes all "
                "ranks"
            )
        return
    ranks = [whole_number(rank) for rank in comm] if isinstance(comm, (list, tuple)) else [None]
    if None in ranks:
        raise ValueError(f"hvd.init(comm={shown(comm)}): not a list of ranks, nor an mpi4py communicator")
    if ranks and ranks != list(range(size)):
        raise ValueError(
            f"hvd.init(comm={shown(comm)}): hvdlite initialises all ranks of the job, 0 to {size - 1}, in this order. "
            "To use some of them, call hvd.init(process_sets=[hvd.ProcessSet([...])]) on every rank, and pass that set "
            "to the optimizer and the collectives as process_set"
        )
