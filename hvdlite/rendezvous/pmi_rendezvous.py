"""
Makes rank 0's address known to the ranks of an MPI or a Slurm job, whose launcher sets no address.

    all on one host       rank 0's address by a Unix socket that is named after the job
    MPI is initialised    ... by MPI's own broadcast (mpi4py)
    PMIx, PMI-1           ... by the launcher's exchange (OpenMPI, srun --mpi=pmix; MPICH, srun --mpi=pmi2)
    plain srun            no exchange: the step's first host, and a port that Slurm has reserved or the job's id gives

Rank 0 serves a TCPStore on a port that the system chooses (but for plain srun on several hosts), on the address
that the other hosts reach it by; on loopback where there is no other.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ..errors import LaunchEnvironmentError
from .host_address import ELSEWHERE, LOOPBACK, interface_of, own_address
from .launchers import MPICH, SLURM
from .local_exchange import ask_local_rank_0, give_to_local_ranks
from .nodelist import expand_nodelist
from .placement import Placement
from .pmi import exchange_by_pmi, finalize_pmi, open_connection
from .pmix import exchange_by_pmix
from .process_state import ProcessState
from .secret import new_secret

# Below the ports that Linux gives out by itself (from 32768), above those of well-known services.
_FIRST_PORT = 12000
_PORTS = 20000

Exchange = Callable[[str, str | None], str]


def rendezvous_by_pmi(
    placement: Placement, environ: Mapping[str, str], process: ProcessState, timeout: timedelta
) -> tuple[Store, bytes | None]:
    """A store that all ranks share, for this meeting alone. Waits for all.

    With it, a secret that rank 0 has told the others by the launcher's own exchange; None where there is no such.

    Unless the user has chosen, gloo is told the interface that the address belongs to
    (``GLOO_SOCKET_IFNAME``): by itself it would depend on how each host resolves its own name.
    """
    name = f"init{process.next_meeting((placement.launcher, _name_of_job(placement, environ)))}"
    exchange = _choose_exchange(placement, environ, process, timeout.total_seconds())
    secret = None
    if exchange is None:
        store, own = _store_of_step(placement, environ, process, timeout)
    else:
        store, own, secret = _store_by(exchange, placement, environ, name, timeout)
    process.choose_interface(None if own is None else interface_of(own))
    store.set_timeout(timeout)
    return PrefixStore(name, store), secret


def _choose_exchange(
    placement: Placement, environ: Mapping[str, str], process: ProcessState, timeout_s: float
) -> Exchange | None:
    job = _name_of_job(placement, environ)
    if placement.one_host and job is not None:
        return functools.partial(_exchange_on_host, placement, job, timeout_s)
    mpi = _running_mpi()
    if mpi is not None and (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()) == (placement.rank, placement.size):
        return lambda _, value: str(mpi.COMM_WORLD.bcast(value))
    if "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        return lambda key, value: exchange_by_pmix(environ, key, value, timeout_s)
    if "PMI_FD" in environ or placement.launcher == MPICH:
        inherited = environ.get("PMI_FD", "")
        connection = process.keep("PMI", inherited, lambda: PmiConnection(inherited), PmiConnection.close).fd
        return lambda key, value: exchange_by_pmi(connection, key, value, timeout_s)
    if placement.launcher == SLURM:
        return None
    raise LaunchEnvironmentError(
        f"{placement.launcher} has set neither PMIX_RANK and PMIX_NAMESPACE nor PMI_FD, by which its ranks could meet: "
        "set MASTER_ADDR and MASTER_PORT for every rank (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
    )


def _name_of_job(placement: Placement, environ: Mapping[str, str]) -> str | None:
    """What no other job of this host has at the same time; None where the launcher tells no such thing."""
    if placement.launcher == SLURM:
        return f"{os.getuid()}/slurm/{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    if "PMIX_NAMESPACE" in environ and "PMIX_SERVER_URI2" in environ:
        # The address of the job's server is its alone while it runs; the namespace alone may come again.
        server = environ["PMIX_SERVER_URI2"].rpartition("/")[2]
        return f"{os.getuid()}/pmix/{environ['PMIX_NAMESPACE'][-40:]}/{server}"
    return None


def _exchange_on_host(placement: Placement, job: str, timeout_s: float, key: str, value: str | None) -> str:
    if value is None:
        return ask_local_rank_0(f"{job}/{key}", placement.rank, timeout_s)
    give_to_local_ranks(f"{job}/{key}", value, placement.size, timeout_s)
    return value


class PmiConnection:
    """The connection of one PMI_FD, for all meetings that the launcher behind it arranges."""

    def __init__(self, inherited: str) -> None:
        self.fd = open_connection(inherited)
        self._pid = os.getpid()
        atexit.register(self._finalize)

    def close(self) -> None:
        """Tell the launcher that this process asks nothing more: it belongs to another one now."""
        atexit.unregister(self._finalize)
        self._finalize()
        os.close(self.fd)

    def _finalize(self) -> None:
        # An MPI that runs at the end of the program takes its own leave, after Python's exit handlers.
        if os.getpid() == self._pid and _running_mpi() is None:
            finalize_pmi(self.fd)


def _running_mpi() -> Any:
    """mpi4py's module, if the program has imported it and MPI is up; never imported here."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _store_by(
    exchange: Exchange, placement: Placement, environ: Mapping[str, str], name: str, timeout: timedelta
) -> tuple[Store, str | None, bytes]:
    """The store, this host's own address on the way to it, and a secret of rank 0's."""
    key = f"hvdlite.{name}"
    if placement.rank != 0:
        address, told_port, secret = exchange(key, None).split("/")
        store = TCPStore(
            address, int(told_port), placement.size, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return store, LOOPBACK if placement.one_host else own_address([address]), secret.encode()
    own = LOOPBACK if placement.one_host else own_address(_outward(placement, environ))
    if own is None:
        raise LaunchEnvironmentError(
            f"no address is found by which other hosts could reach {placement.host}, where rank 0 is: set MASTER_ADDR "
            "and MASTER_PORT for every rank"
        )
    store = _serve_store(own, 0, placement.size, timeout)
    secret = new_secret()
    exchange(key, f"{own}/{store.port}/{secret}")  # no space nor equals sign, which PMI could not carry
    return store, own, secret.encode()


def _outward(placement: Placement, environ: Mapping[str, str]) -> list[str]:
    """Whom rank 0 would reach where the other ranks are, best first."""
    if placement.launcher == SLURM:
        others = expand_nodelist(environ["SLURM_STEP_NODELIST"])[-1:]
    else:
        # OpenMPI's mpirun tells its own addresses: "...;tcp://10.0.0.1,10.1.0.1:4000;tcp6://[fd00::1]:4001".
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        others = [one for group in re.findall(r"tcp6?://\[?([0-9a-fA-F:.,]+?)\]?:\d+", uri) for one in group.split(",")]
    return [*others, *ELSEWHERE, placement.host]


def _store_of_step(
    placement: Placement, environ: Mapping[str, str], process: ProcessState, timeout: timedelta
) -> tuple[Store, str | None]:
    """Where Slurm starts the tasks and connects them by nothing."""
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    if placement.rank == 0 and placement.node != "0":
        raise LaunchEnvironmentError(
            f"rank 0 is not on {hosts[0]}, the first host of SLURM_STEP_NODELIST, where the others look for it: set "
            "MASTER_ADDR and MASTER_PORT for every rank, or use srun --mpi=pmix"
        )
    port, is_master = port_of_step(environ), placement.rank == 0
    try:
        # Kept: at a later init() a rank would otherwise find a server that is just closing.
        store = process.keep(
            "store",
            (tuple(hosts), port) if is_master else (tuple(hosts), port, placement.rank, placement.size),
            lambda: _store_at(hosts, port, placement.size, is_master, timeout),
        )
    except (RuntimeError, OSError) as error:
        if placement.rank != 0:
            raise  # rank 0 has not come
        raise LaunchEnvironmentError(
            f"rank 0 cannot listen on port {port} of {placement.host}, which the step's id gives: set "
            f"MASTER_ADDR and another MASTER_PORT for every rank, or use srun --mpi=pmix or --resv-ports ({error})"
        ) from error
    # Of two jobs that have chosen the same port, the second one's ranks find the first one's store: but not its keys.
    step = PrefixStore(f"slurm.{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}", store)
    return step, own_address([hosts[-1] if placement.rank == 0 else hosts[0]])


def _store_at(hosts: Sequence[str], port: int, size: int, is_master: bool, timeout: timedelta) -> Store:
    if not is_master:
        return TCPStore(hosts[0], port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    own = own_address([hosts[-1]])
    # On the interface in use alone, if that is what the others look the name up to: here it may mean something else.
    if own is None or not _is_name_of(hosts[0], own):
        return TCPStore(hosts[0], port, size, is_master=True, timeout=timeout, wait_for_workers=False)
    return _serve_store(own, port, size, timeout)


def _is_name_of(host: str, address: str) -> bool:
    try:
        return any(found[4][0] == address for found in socket.getaddrinfo(host, None))
    except OSError:
        return False


def _serve_store(own: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    """Rank 0's store on one address of this host's; port 0 is one that the system chooses."""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, port), family=family, backlog=max(128, size))
    return TCPStore(
        own,
        listener.getsockname()[1],
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def port_of_step(environ: Mapping[str, str]) -> int:
    """The port that all tasks of a Slurm step agree on without a word: a reserved one, or one made from its ids."""
    reserved = re.match(r"[0-9]{1,5}", environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return int(reserved[0])
    job, step = (re.sub(r"[^0-9]", "", environ.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # Steps of one job lie far apart from those of the next: 7919 is a prime.
    return _FIRST_PORT + (int(job) + 7919 * int(step)) % _PORTS
