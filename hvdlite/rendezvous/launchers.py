"""
The table of launchers: the variables by which each of them tells a process its place.

    environ ── which launcher's variables count ── its entry in LAUNCHERS ── Placement

A new launcher is one entry. Its ranks then meet at MASTER_ADDR and MASTER_PORT, or by PMIx or PMI where it offers these
(`pmi_rendezvous`). hvdlite-run may be started by that launcher, too: launcher/plan/exported_variables.py has patterns
of the variables that it does not send to other hosts, and tests/e2e/test_contract.py compares them with this table.

Pure: nothing here talks to another process or to torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import LaunchEnvironmentError
from .placement import Placement

OPENMPI = "OpenMPI's mpirun"
MPICH = "MPICH's mpirun"
SLURM = "Slurm's srun"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher, and the names of its variables.

    It has started the process where all ``signs`` are set. ``local_size`` is the number of ranks on this host. ``node``
    tells hosts apart, and is a number below ``node_count`` where there is one. Only those in ``optional`` may be
    missing. Without a local rank the ranks of a host are counted off; without a node the host's name takes its place.

    ``store`` is the URL of a store where the ranks meet, ``address`` and ``port`` say where rank 0 serves one. A
    launcher that sets neither tells places alone.

    hvdlite-run hides the variables of some launchers from its workers (``hidden_from_workers``): a process that has
    them beside a worker's was started by that launcher from within the worker. ``others`` is for messages: who else
    sets the same variables.
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node: str | None = None
    node_count: str | None = None
    optional: tuple[str, ...] = ()
    store: str | None = None
    address: str | None = None
    port: str | None = None
    hidden_from_workers: bool = False
    others: str = ""

    @property
    def tells_where_to_meet(self) -> bool:
        return self.store is not None or self.address is not None

    def told(self, name: str | None, environ: Mapping[str, str]) -> str | None:
        """``name`` if that variable is to be read; None where there is no such one, or it is optional and not set."""
        return None if name is None or (name in self.optional and name not in environ) else name


OURS = Launcher(
    "hvdlite-run",
    signs=("HVDLITE_RANK",),
    rank="HVDLITE_RANK",
    size="HVDLITE_SIZE",
    local_rank="HVDLITE_LOCAL_RANK",
    local_size="HVDLITE_LOCAL_SIZE",
    store="HVDLITE_STORE",
)
TORCHRUN = Launcher(
    "torchrun",
    signs=("RANK", "WORLD_SIZE"),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    # The number of the agent: two agents may share a machine.
    node="GROUP_RANK",
    optional=("LOCAL_RANK", "GROUP_RANK"),
    address="MASTER_ADDR",
    port="MASTER_PORT",
    others="another launcher that sets RANK and WORLD_SIZE",
)
LAUNCHERS = (
    OURS,
    # Before MPI and Slurm: a program may be started by torchrun from within their jobs.
    TORCHRUN,
    # MPI's before Slurm's: mpirun starts its own daemons by srun.
    Launcher(
        OPENMPI,
        signs=("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        # One daemon for each of its hosts, at an address of its own.
        node="PMIX_SERVER_URI2",
        optional=("PMIX_SERVER_URI2",),
        hidden_from_workers=True,
    ),
    Launcher(
        MPICH,
        signs=("MPI_LOCALRANKID",),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        node="MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
        optional=("MPIR_CVAR_CH3_INTERFACE_HOSTNAME",),
        hidden_from_workers=True,
        others="another that sets PMI_RANK",
    ),
    # The shell of salloc or sbatch is no step, whatever number of tasks its job is to have.
    Launcher(
        SLURM,
        signs=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        node_count="SLURM_STEP_NUM_NODES",
    ),
    # After Slurm's, which sets a PMI rank as well.
    Launcher(
        MPICH,
        signs=("PMI_RANK",),
        rank="PMI_RANK",
        size="PMI_SIZE",
        node="MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
        optional=("MPIR_CVAR_CH3_INTERFACE_HOSTNAME",),
        hidden_from_workers=True,
        others="another that sets PMI_RANK",
    ),
)
"""The first one whose signs are there counts."""


def read_placement(environ: Mapping[str, str]) -> Placement | None:
    """This process's placement as its launcher tells it; None for a single process."""
    launcher = _find_launcher(environ)
    if launcher is None:
        return None
    placement = _read_placement_of(launcher, environ)
    if launcher.tells_where_to_meet:
        return placement
    if placement.size == 1:
        return None
    # In a worker of hvdlite-run MASTER_ADDR and MASTER_PORT are those of its own job.
    return placement if OURS.rank in environ else _with_given_address(placement, environ)


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


def _find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process; of several, one within another's job, the innermost."""
    stale: tuple[Launcher, ...] = ()
    if OURS.rank in environ:
        if any(each.hidden_from_workers and each.rank in environ for each in LAUNCHERS):
            # A worker has started an MPI job. hvdlite-run sets torchrun's variables too, and these are the worker's.
            stale = (OURS, TORCHRUN)
        elif _differ(environ, OURS.rank, TORCHRUN.rank) or _differ(environ, OURS.size, TORCHRUN.size):
            # hvdlite-run sets both alike: torchrun has been at work since.
            stale = (OURS,)
    found = (each for each in LAUNCHERS if each not in stale and all(sign in environ for sign in each.signs))
    return next(found, None)


def _differ(environ: Mapping[str, str], one: str, other: str) -> bool:
    return one in environ and other in environ and environ[one] != environ[other]


def _read_placement_of(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    read = _Reader(environ, launcher.name + (f" (or {launcher.others})" if launcher.others else ""))
    size = read.number(launcher.size)
    host = node = environ.get("HVDLITE_HOST") or socket.gethostname()
    local_rank, one_host = None, False
    if name := launcher.told(launcher.local_rank, environ):
        local_rank = read.number(name, below=launcher.local_size)
    if launcher.local_size is not None:
        one_host = read.number(launcher.local_size) == size
    if name := launcher.told(launcher.node, environ):
        node = read.text(name)
        if launcher.node_count is not None:
            node = str(read.number(name, below=launcher.node_count))
            one_host = read.number(launcher.node_count) == 1
    if launcher.address is not None and launcher.port is not None:
        read.text(launcher.address)
        read.number(launcher.port)
    return Placement(
        rank=read.number(launcher.rank, below=launcher.size),
        size=size,
        node=node,
        host=host,
        local_rank=local_rank,
        store_url=None if launcher.store is None else read.text(launcher.store),
        launcher=None if launcher.tells_where_to_meet else launcher.name,
        one_host=one_host and not launcher.tells_where_to_meet,
    )


def _with_given_address(placement: Placement, environ: Mapping[str, str]) -> Placement:
    """The placement, to meet at the user's own MASTER_ADDR and MASTER_PORT where there are such."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ]
    if not given:
        return placement
    if len(given) == 1:
        raise LaunchEnvironmentError(
            f"of MASTER_ADDR and MASTER_PORT only {given[0]} is set: under {placement.launcher} set both for every "
            "rank, or neither"
        )
    _Reader(environ, f"whoever started {placement.launcher}").number("MASTER_PORT")
    return replace(placement, launcher=None)


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
