"""
Checks the ``comm`` argument of Horovod's `init`: a list of ranks, or a communicator of mpi4py's.

hvdlite finds the ranks by itself (see `world`); the argument must mean the same ones.
"""

from __future__ import annotations

from typing import Any

from .values import shown, whole_number


def check_comm(comm: Any, size: int) -> None:
    """Raise a ValueError unless ``comm`` stands for all ``size`` ranks: None, [], a list of all, mpi4py's world."""
    if comm is None:
        return
    if hasattr(comm, "Get_size"):
        if comm.Get_size() != size:
            raise ValueError(
                f"hvd.init(comm={shown(comm)}): that communicator has {comm.Get_size()} ranks and the job has {size}. "
                "Start the program with mpirun or srun if MPI is to place its ranks; hvd.init() alone takes all of them"
            )
        return
    ranks = [whole_number(rank) for rank in comm] if isinstance(comm, (list, tuple)) else [None]
    if None in ranks:
        raise ValueError(f"hvd.init(comm={shown(comm)}): not a list of ranks, nor a communicator of mpi4py's")
    if ranks and ranks != list(range(size)):
        raise ValueError(
            f"hvd.init(comm={shown(comm)}): the job has the ranks 0 to {size - 1}, and all of them are initialised, in "
            "this order. For some of them call hvd.init(process_sets=[hvd.ProcessSet([...])]) on every rank, and give "
            "that set to the optimizer and to the collectives as process_set"
        )
