"""
The table of supported launchers, with the environment variables that give a process its rank.

    environ ── the launcher that started this process ── its entry in LAUNCHERS ── Placement

`read_placement` reads the variables. To support a new launcher, add one entry. Its ranks then connect at MASTER_ADDR
and MASTER_PORT, or through PMIx or PMI if the launcher offers these (`rank0_stores`). hvdlite-run itself may run
under such a launcher: launcher/plan/worker_environment.py has patterns of the variables that it must not send to other
hosts, and tests/e2e/test_contract.py compares these patterns with this table.

`runtime.bootstrap` calls this module. The functions here only read the environment; they do not communicate.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from hvdlite_wire import job_contract
from hvdlite_wire.store_requests import RankAssignment

from ..environment import PLACE_TAKEN
from ..errors import LaunchEnvironmentError
from .placement import Placement

OPENMPI = "OpenMPI's mpirun"
MPICH = "MPICH's mpirun"
SLURM = "Slurm's srun"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher, and the names of the variables that it sets.

    A process was started by this launcher if all ``signs`` are set. ``local_size`` is the number of ranks on this host.
    ``node`` has another value on each host; with a ``node_count`` it is the host's number, from 0. Only variables in
    ``optional`` may be missing. Without a local rank, the ranks of a host are numbered in the order of their ranks.
    Without a node, the host's name is used.

    ``worker`` is a number that identifies the process while its rank may change. ``store`` is the URL of a store that
    all ranks share. ``address`` and ``port`` say where rank 0 serves a store. If a launcher sets neither,
    `rank0_stores` uses the following. The ``job_id`` variables together identify a job. ``nodelist`` lists the job's
    hosts in Slurm's notation; rank 0 is on the first. ``reserved_ports`` are reserved for the job. ``own_addresses``:
    those on which the launcher itself listens. ``is_asked_by_pmi``: PMI is its only way to exchange an address between
    ranks.

    ``hidden_from_workers``: hvdlite-run removes its variables from the environment of its workers. A process that has
    these and a worker's variables was started by that launcher from within the worker. ``others``, for error messages:
    other launchers that set the same variables.
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
    worker: str | None = None
    store: str | None = None
    address: str | None = None
    port: str | None = None
    job_id: tuple[str, ...] = ()
    nodelist: str | None = None
    reserved_ports: str | None = None
    own_addresses: str | None = None
    is_asked_by_pmi: bool = False
    hidden_from_workers: bool = False
    others: str = ""

    @property
    def gives_store_address(self) -> bool:
        return self.store is not None or self.address is not None

    def told(self, name: str | None, environ: Mapping[str, str]) -> str | None:
        """Returns ``name`` if the variable must be read; None if it is None, or optional and not set."""
        return None if name is None or (name in self.optional and name not in environ) else name


OURS = Launcher(
    "hvdlite-run",
    signs=(job_contract.RANK,),
    rank=job_contract.RANK,
    size=job_contract.SIZE,
    local_rank=job_contract.LOCAL_RANK,
    local_size=job_contract.LOCAL_SIZE,
    worker=job_contract.WORKER,
    store=job_contract.STORE,
)
# The rank and size are not in the environment: `read_placement` takes them from the assignment. The local rank is the
# slot on the host, which may be beyond the ranks that there are on it now.
ELASTIC = replace(OURS, signs=(job_contract.ELASTIC, job_contract.WORKER), local_size=None)
TORCHRUN = Launcher(
    "torchrun",
    signs=("RANK", "WORLD_SIZE"),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    # The rank of torchrun's agent: two agents may run on one machine.
    node="GROUP_RANK",
    optional=("LOCAL_RANK", "GROUP_RANK"),
    address="MASTER_ADDR",
    port="MASTER_PORT",
    others="another launcher that sets RANK and WORLD_SIZE",
)
_BY_PMI = Launcher(
    MPICH,
    signs=("PMI_RANK",),
    rank="PMI_RANK",
    size="PMI_SIZE",
    node="MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
    optional=("MPIR_CVAR_CH3_INTERFACE_HOSTNAME",),
    is_asked_by_pmi=True,
    hidden_from_workers=True,
    others="another that sets PMI_RANK",
)
# Where RANK counts nodes, one of these is the number of processes of each; "auto" and "gpu" are torchrun's words.
_PROCESSES_OF_A_NODE = ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "PET_NPROC_PER_NODE")

LAUNCHERS = (
    OURS,
    # Before MPI and Slurm: torchrun may run within their jobs.
    TORCHRUN,
    ELASTIC,
    # MPI before Slurm: mpirun starts its daemons by srun.
    Launcher(
        OPENMPI,
        signs=("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        # The address of this host's daemon: mpirun starts one daemon on each host.
        node="PMIX_SERVER_URI2",
        optional=("PMIX_SERVER_URI2",),
        own_addresses="OMPI_MCA_orte_hnp_uri",
        hidden_from_workers=True,
    ),
    replace(_BY_PMI, signs=("MPI_LOCALRANKID",), local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"),
    # SLURM_STEP_ID is not set in the shell of salloc or sbatch: a program started there is a single process.
    Launcher(
        SLURM,
        signs=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        node_count="SLURM_STEP_NUM_NODES",
        job_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        nodelist="SLURM_STEP_NODELIST",
        reserved_ports="SLURM_STEP_RESV_PORTS",
    ),
    # After Slurm, which sets PMI_RANK too.
    _BY_PMI,
)
"""All launchers, in the order of precedence: the first one whose signs are set counts."""


@dataclass(frozen=True, slots=True)
class ElasticWorker:
    """A worker of an elastic job: its number, and the URL of the store that gives it a rank in each generation."""

    number: int
    store_url: str


def read_elastic_worker(environ: Mapping[str, str]) -> ElasticWorker | None:
    """Returns what hvdlite-run has told a worker of an elastic job; None for any other process."""
    if _find_launcher(environ) is not ELASTIC:
        return None
    read = _Reader(environ, ELASTIC.name)
    assert ELASTIC.worker is not None
    assert ELASTIC.store is not None
    return ElasticWorker(read.number(ELASTIC.worker), read.text(ELASTIC.store))


def read_placement(environ: Mapping[str, str], assignment: RankAssignment | None = None) -> Placement | None:
    """Returns this process's placement from its launcher's variables; None for a single process.

    ``assignment`` is that of a worker of an elastic job, whose variables have no rank. Raises a LaunchEnvironmentError
    if the variables are incomplete or contradict each other.
    """
    launcher = _find_launcher(environ)
    if launcher is None:
        return None
    if launcher is ELASTIC:
        if assignment is None:
            raise LaunchEnvironmentError(
                "in an elastic job (hvdlite-run --min-np) a worker has no rank before hvd.init(): call it first"
            )
        environ = {**environ, ELASTIC.rank: str(assignment.rank), ELASTIC.size: str(assignment.size)}
    if launcher is TORCHRUN:
        _refuse_ranks_of_nodes(environ)
    placement = _read_placement_of(launcher, environ)
    if launcher.gives_store_address:
        return placement
    if placement.size == 1:
        return None
    # Within a worker of hvdlite-run, MASTER_ADDR and MASTER_PORT belong to the worker's job, and not to this one.
    return placement if _is_within_worker(environ) else _with_given_address(placement, environ)


def launcher_named(name: str) -> Launcher:
    """Returns the launcher of this name. Entries of one name differ only in their signs and their rank variables."""
    return next(each for each in LAUNCHERS if each.name == name)


def refuse_horovod_rank(environ: Mapping[str, str]) -> None:
    """Raises a LaunchEnvironmentError if only Horovod's variables give this process a rank.

    They say nothing about where the ranks connect. Call it if `read_placement` returned None: a worker of hvdlite-run
    has these variables too.
    """
    size = environ.get("HOROVOD_SIZE", "")
    if job_contract.RANK in environ or "HOROVOD_RANK" not in environ or not (size.isascii() and size.isdigit()):
        return
    if int(size) > 1:
        raise LaunchEnvironmentError(
            f"HOROVOD_RANK={environ['HOROVOD_RANK']} and HOROVOD_SIZE={size} are set, as by Horovod's launcher, and "
            "give no address at which the ranks can connect: start the program with hvdlite-run, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank; unset HOROVOD_SIZE for a single process"
        )


def _refuse_ranks_of_nodes(environ: Mapping[str, str]) -> None:
    """Raises a LaunchEnvironmentError if RANK and WORLD_SIZE count nodes that are to run several processes each.

    Alibaba PAI and Kubeflow's PyTorchJob set them so, for torchrun's --node-rank and --nnodes, and no LOCAL_RANK.
    """
    if "LOCAL_RANK" in environ:
        return
    for name in _PROCESSES_OF_A_NODE:
        count = environ.get(name, "")
        if count and count != "1":
            raise LaunchEnvironmentError(
                f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} seem to count nodes, as on Alibaba PAI "
                f"or in Kubeflow's PyTorchJob: {name}={count} says how many processes each is to run, and LOCAL_RANK "
                "is not set. Start the program with torchrun --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node "
                f"${name} --master-addr $MASTER_ADDR --master-port $MASTER_PORT; or unset {name} if each node is one "
                "rank"
            )


def _find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    stale: tuple[Launcher, ...] = ()  # of nested launchers, the innermost counts
    if _is_within_worker(environ):
        if any(each.hidden_from_workers and each.rank in environ for each in LAUNCHERS):
            # A worker has started an MPI job. The worker also passes on torchrun's variables, which hvdlite-run sets.
            stale = (OURS, ELASTIC, TORCHRUN)
        elif any(
            {ours, torchruns} <= environ.keys() and environ[ours] != environ[torchruns]
            for ours, torchruns in ((OURS.rank, TORCHRUN.rank), (OURS.size, TORCHRUN.size))
        ):
            # hvdlite-run sets both to the same value, so torchrun was started within the worker.
            stale = (OURS,)
    found = (each for each in LAUNCHERS if each not in stale and all(sign in environ for sign in each.signs))
    return next(found, None)


def _is_within_worker(environ: Mapping[str, str]) -> bool:
    """Whether this process is a worker of hvdlite-run, or was started by one."""
    return OURS.rank in environ or all(sign in environ for sign in ELASTIC.signs)


def _read_placement_of(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    read = _Reader(environ, launcher.name + (f" (or {launcher.others})" if launcher.others else ""))
    size = read.number(launcher.size)
    host = node = environ.get(job_contract.HOST) or socket.gethostname()
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
        worker=None if launcher.worker is None else read.number(launcher.worker),
        store_url=None if launcher.store is None else read.text(launcher.store),
        launcher=None if launcher.gives_store_address else launcher.name,
        one_host=one_host and not launcher.gives_store_address,
    )


def _with_given_address(placement: Placement, environ: Mapping[str, str]) -> Placement:
    """Returns the placement, without a launcher if the user has set MASTER_ADDR and MASTER_PORT."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ]
    if not given:
        return placement
    if len(given) == 1:
        raise LaunchEnvironmentError(
            f"of MASTER_ADDR and MASTER_PORT, only {given[0]} is set: under {placement.launcher} set both for every "
            "rank, or neither"
        )
    _Reader(environ, f"whoever started {placement.launcher}").number("MASTER_PORT")
    return replace(placement, launcher=None)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one launcher's variables; raises a LaunchEnvironmentError that names a wrong variable and the launcher."""

    environ: Mapping[str, str]
    launcher: str

    def text(self, name: str) -> str:
        try:
            return self.environ[name]
        except KeyError:
            raise LaunchEnvironmentError(
                f"{name} is not set, although this process seems to have been started by {self.launcher}: "
                "start it through the launcher, or unset the launcher's variables"
            ) from None

    def number(self, name: str, *, below: str | None = None) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdigit():
            raise LaunchEnvironmentError(
                f"{name}={text!r} is not a number; {self.launcher} sets it, so something has changed it since"
            )
        value = int(text)
        if below is not None and value >= self.number(below):
            raise LaunchEnvironmentError(
                f"{name}={value} is not below {below}={self.environ[below]}: "
                f"both are set by {self.launcher}, so something has changed one of them since"
            )
        return value


# Where launchers name the job, which a placement does not.
_OF_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT"),
)


def place_in(environ: MutableMapping[str, str]) -> ElasticWorker | Placement | None:
    """Returns the place in a job that these variables give to a process; None if they give none that is whole.

    A process whose group was made before `hvd.init`, as Ray's are, may have some of a launcher's variables.
    """
    try:
        return read_elastic_worker(environ) or read_placement(environ)
    except LaunchEnvironmentError:
        return None


def mark_taken(environ: MutableMapping[str, str] = os.environ) -> None:
    """Notes that this process has the place in ``environ``, unless it is the only one of its job.

    The programs that it starts inherit its environment, and are no ranks: their data would come between its own and
    those of the other ranks. A job that it starts has other places.
    """
    place = place_in(environ)
    if place is None or (isinstance(place, Placement) and place.size == 1):
        return
    environ[PLACE_TAKEN] = f"{os.getpid()} {_digest(place, environ)}"


def require_free(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raises a LaunchEnvironmentError if another process has the place in ``environ``, and has started this one."""
    pid, _, digest = environ.get(PLACE_TAKEN, "").partition(" ")
    if not digest or pid == str(os.getpid()):
        return
    place = place_in(environ)
    if place is not None and _digest(place, environ) == digest:
        raise LaunchEnvironmentError(
            f"hvd.init(): this process (pid {os.getpid()}) was started by a rank of the job (pid {pid}), and has "
            "that rank's place by its environment: leave hvd.init() out here; or start it with an environment without "
            "the launcher's variables, to be the only rank of a job of its own"
        )


def _digest(place: ElasticWorker | Placement, environ: MutableMapping[str, str]) -> str:
    named = [environ.get(name) for name in _OF_JOB]
    return hashlib.sha256(repr((place, named)).encode()).hexdigest()[:16]
