"""
Where this process stands among the others: ranks, local ranks, cross ranks.

    launcher's variables ── Placement (what one process knows) ── all placements together ── Topology

Pure values and functions: nothing here talks to another process or to torch.

``rank`` is global, ``local_rank`` counts within a host, ``cross_rank`` among the hosts that have this
local rank.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import LaunchEnvironmentError


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place in the job, the name of every rank's host (for messages), and whether all have as many ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]
    is_homogeneous: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """What one process knows of its own place before it has spoken to any other.

    ``node`` tells apart what counts as different hosts: usually the host's name, under torchrun the
    number of the agent, since two agents may share a machine.

    ``launcher`` is one that has told the place but no address: the ranks meet by its own means, or, with
    ``one_host``, without it. None where there is an address to meet at.
    """

    rank: int
    size: int
    node: str
    host: str
    local_rank: int | None = None
    store_url: str | None = None
    launcher: str | None = None
    one_host: bool = False


OPENMPI = "OpenMPI's mpirun"
MPICH = "MPICH's mpirun"
SLURM = "Slurm's srun"


def read_placement(environ: Mapping[str, str]) -> Placement | None:
    """This process's placement as its launcher tells it; None where no launcher did.

    hvdlite-run's variables come first, and torchrun's next: a program may be started by them from within an
    MPI or a Slurm job. MPI's come before Slurm's, since ``mpirun`` starts its own daemons by Slurm. But what a
    worker of hvdlite-run starts by another launcher has that one's place, not the worker's.
    """
    host = environ.get("HVDLITE_HOST") or socket.gethostname()
    if "HVDLITE_RANK" in environ and not _is_within_a_worker(environ):
        read = _Reader(environ, "hvdlite-run")
        return Placement(
            rank=read.number("HVDLITE_RANK", below="HVDLITE_SIZE"),
            size=read.number("HVDLITE_SIZE"),
            node=host,
            host=host,
            local_rank=read.number("HVDLITE_LOCAL_RANK", below="HVDLITE_LOCAL_SIZE"),
            store_url=read.text("HVDLITE_STORE"),
        )
    if "RANK" in environ and "WORLD_SIZE" in environ and not _names_an_mpi_rank(environ):
        read = _Reader(environ, "torchrun (or another launcher that sets RANK and WORLD_SIZE)")
        read.text("MASTER_ADDR")
        read.number("MASTER_PORT")
        local_rank = read.number("LOCAL_RANK") if "LOCAL_RANK" in environ else None
        return Placement(
            rank=read.number("RANK", below="WORLD_SIZE"),
            size=read.number("WORLD_SIZE"),
            node=environ.get("GROUP_RANK", host),
            host=host,
            local_rank=local_rank,
        )
    # A PMI rank comes from Slurm as well, but local ranks beside it only from MPICH's mpirun.
    if "OMPI_COMM_WORLD_RANK" in environ:
        placement = _placement_of_openmpi(_Reader(environ, OPENMPI), host)
    elif "MPI_LOCALRANKID" in environ or ("PMI_RANK" in environ and "SLURM_STEP_ID" not in environ):
        placement = _placement_of_mpich(_Reader(environ, f"{MPICH} (or another that sets PMI_RANK)"), host)
    # The shell of salloc or sbatch is no step, whatever number of tasks its job is to have.
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        placement = _placement_of_slurm(_Reader(environ, SLURM), host)
    else:
        return None
    # What hvdlite-run sets of MASTER_ADDR and MASTER_PORT is for its own workers.
    within_a_worker = "HVDLITE_RANK" in environ
    return None if placement.size == 1 else placement if within_a_worker else _with_given_address(placement, environ)


def refuse_place_of_horovods(environ: Mapping[str, str]) -> None:
    """Raise where there is a place by Horovod's variables alone, which say nowhere to meet.

    To be called where `read_placement` has found none: a worker of hvdlite-run has these variables, and others besides.
    """
    size = environ.get("HOROVOD_SIZE", "")
    if "HVDLITE_RANK" in environ or "HOROVOD_RANK" not in environ or not (size.isascii() and size.isdigit()):
        return
    if int(size) > 1:
        raise LaunchEnvironmentError(
            f"HOROVOD_RANK={environ['HOROVOD_RANK']} and HOROVOD_SIZE={size} are set, as by Horovod's launcher, and "
            "say nowhere to meet: start the program with hvdlite-run, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT for every rank; unset HOROVOD_SIZE for a single process"
        )


def _is_within_a_worker(environ: Mapping[str, str]) -> bool:
    """Whether a further launcher has been at work since hvdlite-run, which sets both of these, and leaves no third."""
    twins = ("HVDLITE_RANK", "RANK"), ("HVDLITE_SIZE", "WORLD_SIZE")
    differ = any(ours in environ and environ[ours] != environ.get(theirs, environ[ours]) for ours, theirs in twins)
    return differ or _names_an_mpi_rank(environ)


def _names_an_mpi_rank(environ: Mapping[str, str]) -> bool:
    return "HVDLITE_RANK" in environ and ("OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ)


def _placement_of_openmpi(read: _Reader, host: str) -> Placement:
    size = read.number("OMPI_COMM_WORLD_SIZE")
    return Placement(
        rank=read.number("OMPI_COMM_WORLD_RANK", below="OMPI_COMM_WORLD_SIZE"),
        size=size,
        # One daemon for each of its hosts, at an address of its own.
        node=read.environ.get("PMIX_SERVER_URI2", host),
        host=host,
        local_rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK", below="OMPI_COMM_WORLD_LOCAL_SIZE"),
        launcher=OPENMPI,
        one_host=read.number("OMPI_COMM_WORLD_LOCAL_SIZE") == size,
    )


def _placement_of_mpich(read: _Reader, host: str) -> Placement:
    size = read.number("PMI_SIZE")
    is_local_told = "MPI_LOCALRANKID" in read.environ
    return Placement(
        rank=read.number("PMI_RANK", below="PMI_SIZE"),
        size=size,
        node=read.environ.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", host),
        host=host,
        local_rank=read.number("MPI_LOCALRANKID", below="MPI_LOCALNRANKS") if is_local_told else None,
        launcher=MPICH,
        one_host=is_local_told and read.number("MPI_LOCALNRANKS") == size,
    )


def _placement_of_slurm(read: _Reader, host: str) -> Placement:
    return Placement(
        rank=read.number("SLURM_PROCID", below="SLURM_STEP_NUM_TASKS"),
        size=read.number("SLURM_STEP_NUM_TASKS"),
        node=str(read.number("SLURM_NODEID", below="SLURM_STEP_NUM_NODES")),
        host=host,
        local_rank=read.number("SLURM_LOCALID"),
        launcher=SLURM,
        one_host=read.number("SLURM_STEP_NUM_NODES") == 1,
    )


def _with_given_address(placement: Placement, environ: Mapping[str, str]) -> Placement:
    """The placement, to meet at the user's own MASTER_ADDR and MASTER_PORT where there are such."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ]
    if not given:
        return placement
    if len(given) == 1:
        raise LaunchEnvironmentError(
            f"of MASTER_ADDR and MASTER_PORT only {given[0]} is set: under {placement.launcher} set both for every rank, "
            "or neither"
        )
    _Reader(environ, f"whoever started {placement.launcher}").number("MASTER_PORT")
    return replace(placement, launcher=None)


def placements_to_topology(rank: int, placements: Sequence[Placement]) -> Topology:
    """The topology of ``rank``, given the placements of all ranks in rank order.

    A placement without a local rank is counted off among the ranks of its node.
    """
    local_ranks: list[int] = []
    members: dict[str, int] = {}
    for placement in placements:
        counted = members.get(placement.node, 0)
        members[placement.node] = counted + 1
        local_ranks.append(counted if placement.local_rank is None else placement.local_rank)
    mine = placements[rank]
    # Hosts in the order of their first rank, as the launcher numbers them.
    nodes_with_my_local_rank = list(
        dict.fromkeys(
            placement.node
            for placement, local in zip(placements, local_ranks, strict=True)
            if local == local_ranks[rank]
        )
    )
    return Topology(
        rank=rank,
        size=len(placements),
        local_rank=local_ranks[rank],
        local_size=members[mine.node],
        cross_rank=nodes_with_my_local_rank.index(mine.node),
        cross_size=len(nodes_with_my_local_rank),
        hosts=tuple(placement.host for placement in placements),
        is_homogeneous=len(set(members.values())) == 1,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one launcher's variables, and names the variable and the launcher where one is wrong."""

    environ: Mapping[str, str]
    launcher: str

    def text(self, name: str) -> str:
        try:
            return self.environ[name]
        except KeyError:
            raise LaunchEnvironmentError(
                f"{name} is not set, although this process seems to be started by {self.launcher}: "
                "start it through the launcher, or unset the launcher's variables"
            ) from None

    def number(self, name: str, *, below: str | None = None) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdigit():
            raise LaunchEnvironmentError(
                f"{name}={text!r} is not a number; {self.launcher} sets it, so it was changed on the way here"
            )
        value = int(text)
        if below is not None and value >= self.number(below):
            raise LaunchEnvironmentError(
                f"{name}={value} is not below {below}={self.environ[below]}: "
                f"both are set by {self.launcher}, so one of them was changed on the way here"
            )
        return value
