"""
hvdlite with the names and signatures of `horovod.torch`: a Horovod program needs only this import.

    import hvdlite.torch as hvd

Most names are imported from `hvdlite`. Two differ: `init` also takes Horovod's argument ``comm``, and `Compression` has
Horovod's classes, whose methods take one tensor. `HorovodInternalError` and `check_extension` exist only here. Inside
this package ``import torch`` still imports PyTorch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .errors import HvdliteError
from .outside_graphs import outside_graphs

if TYPE_CHECKING:
    from .compression.custom import Compression as Compression  # noqa: PLC0414  # it is public
    from .environment import CheckParameters
    from .shared_names import *  # noqa: F403  # the list of names
    from .shared_names import ProcessSet

# All of hvdlite's errors derive from this class, so programs that catch Horovod's class catch them.
HorovodInternalError = HvdliteError


@outside_graphs
def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet] | str | None = None,
    *,
    timeout_s: float | None = None,
    check_parameters: CheckParameters | None = None,
) -> None:
    """Does what `hvdlite.init` does; also takes Horovod's first argument.

    ``comm``: None, the list of all ranks, or mpi4py's COMM_WORLD; each of these means every rank of the job. A
    communicator of fewer ranks is a ValueError, which says to use process sets.
    """
    # Imported here, so that the import of this module takes little time.
    from . import init as init_hvdlite  # noqa: PLC0415
    from . import is_initialized  # noqa: PLC0415

    if comm is not None and not is_initialized():
        check_comm(comm, _size_to_be())
    init_hvdlite(timeout_s, process_sets=process_sets, check_parameters=check_parameters)


def check_extension(*_: object) -> None:
    """Does nothing. Horovod checks here that its compiled extension is installed; hvdlite has none."""


def check_comm(comm: Any, size: int) -> None:
    """Raises a ValueError unless ``comm`` means all ``size`` ranks: None, [], a list of all, or mpi4py's COMM_WORLD."""
    from .values import shown, whole_number  # noqa: PLC0415  # as above

    given = range(comm.Get_size()) if hasattr(comm, "Get_size") else comm
    is_list = isinstance(given, (list, tuple, range))
    if given is None or (is_list and [whole_number(rank) for rank in given] in ([], list(range(size)))):
        return
    raise ValueError(
        f"hvd.init(comm={shown(comm)}): these are not all ranks of the job, 0 to {size - 1} in this order. Leave comm "
        "out, and start the program with mpirun or srun if MPI is to place its ranks. To use some of them, call "
        "hvd.init(process_sets=[hvd.ProcessSet([...])]) on every rank, and pass that set to the optimizer and the "
        "collectives as process_set"
    )


def _size_to_be() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    from .rendezvous.launchers import read_placement  # noqa: PLC0415  # as above

    placement = read_placement(os.environ)
    return 1 if placement is None else placement.size


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    _OWN_NAMES = "Compression", "HorovodInternalError", "check_extension", "init"
    __all__ = sorted([*importlib.import_module("hvdlite").SHARED_NAMES, *_OWN_NAMES])  # noqa: PLE0605  # as in hvdlite

    def __dir__() -> list[str]:
        return [*__all__, *(name for name in globals() if name.startswith("__"))]

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used, as `hvdlite` does."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Compression":
            from .compression.custom import Compression as value  # noqa: PLC0415, N813
        else:
            value = getattr(importlib.import_module("hvdlite"), name)
        globals()[name] = value
        return value
