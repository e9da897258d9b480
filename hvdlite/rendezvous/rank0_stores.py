"""
Opens the store that rank 0 serves: at MASTER_ADDR and MASTER_PORT, or where an MPI or Slurm job has none of these.

`runtime.connect_ranks` calls `store_at_given_address`, or else `rendezvous_by_pmi`. In that every rank finds the
address of rank 0's store in the first of these ways that its environment offers:

    all on one host     rank 0 sends it over a Unix socket that is named after the job
    MPI is initialised  by the program, with mpi4py: rank 0 sends it by MPI's broadcast
    PMIx, PMI-1         rank 0 sends it by the launcher's key-value exchange: PMIx from OpenMPI and srun --mpi=pmix,
                        PMI-1 from MPICH and srun --mpi=pmi2
    plain srun          every rank computes it: the job step's first host, where rank 0 is, and a port that Slurm has
                        reserved or that follows from the job's id

The store is then a TCPStore that listens on the address by which other hosts reach rank 0, or on loopback if all ranks
are on one host; except under plain srun, the kernel chooses the port.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hvdlite_wire.linux import ELSEWHERE, LOOPBACK, interface_with
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..errors import CommunicationError, LaunchEnvironmentError
from ..log import log
from .host_address import own_address
from .launchers import Launcher, launcher_named
from .line_exchange import (
    ask_local_rank_0,
    exchange_by_pmi,
    exchange_by_pmix,
    finalize_pmi,
    give_to_local_ranks,
    open_connection,
)
from .placement import Placement
from .process_state import ProcessState
from .rank_info import new_secret

_SLACK_S = 2.0  # PyTorch's own timeout ends first: its error says more
_WARN_AFTER_S = 30.0


def store_at_given_address(
    process: ProcessState, rank: int, size: int, address: str, port: str, timeout: timedelta
) -> Store:
    """Returns the store at ``address`` and ``port``; rank 0 serves it. Every rank must call it, and waits for rank 0.

    ``process`` keeps the store for later calls of `init`: else a rank could connect to a server that is just closing.
    Rank 0 keeps its server even if the number of ranks changes; another rank then connects anew, because another
    process may serve there now. Raises a `CommunicationError` if the ranks have not connected within the timeout.
    """
    key = (address, port) if rank == 0 else (address, port, rank, size)
    try:
        return process.keep("store", key, lambda: _meet(rank, size, address, port, timeout))
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        raise CommunicationError(
            f"hvd.init() failed on rank {rank} ({socket.gethostname()}): {size} ranks did not meet at "
            f"MASTER_ADDR={address!r}, MASTER_PORT={port} within {timeout.total_seconds():g} s: {words}. Is that an "
            "address of rank 0's host, and may rank 0 listen there, or does another process? Have all ranks called "
            "hvd.init() (look at their output), with the same address, port and WORLD_SIZE? Does a firewall block them?"
        ) from error


def _meet(rank: int, size: int, address: str, port: str, timeout: timedelta) -> Store:
    """Opens PyTorch's store in a thread: a program that listens there and does not answer would block for ever."""
    found: Future[Store] = Future()

    def look() -> None:
        try:
            store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
            found.set_exception(error)
        else:
            found.set_result(store)

    threading.Thread(target=look, name="hvdlite-store", daemon=True).start()
    limit_s = timeout.total_seconds() + _SLACK_S
    if limit_s > _WARN_AFTER_S:
        with contextlib.suppress(FutureTimeoutError):
            return found.result(_WARN_AFTER_S)
        log.warning(
            "rank %d has waited %g s in hvd.init() for %s at MASTER_ADDR=%r, MASTER_PORT=%s, and gives up after %g s "
            "(hvd.init(timeout_s=...)): look at the output of the other ranks",
            *(rank, _WARN_AFTER_S, "the other ranks" if rank == 0 else "rank 0", address, port, limit_s),
        )
        limit_s -= _WARN_AFTER_S
    try:
        return found.result(limit_s)
    except FutureTimeoutError:
        raise RuntimeError("the program that listens there has not answered") from None


# Below Linux's ephemeral ports (from 32768), above the ports of well-known services.
_FIRST_PORT = 12000
_PORTS = 20000

# Slurm's lists of host names, such as node[1-3,07],login,rack[1-2]n[0-1].
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST_HOSTS = 1 << 17  # a longer list is a mistake, and could exhaust this host's memory

Exchange = Callable[[str, str | None], str]


def rendezvous_by_pmi(
    placement: Placement, environ: Mapping[str, str], process: ProcessState, timeout: timedelta
) -> tuple[Store, bytes | None]:
    """Returns a store that all ranks share, with its own key prefix for each `init`. Every rank must call it.

    Also returns a secret that rank 0 has sent to the others along with the address; None under plain srun, where
    nothing is sent.

    Sets ``GLOO_SOCKET_IFNAME`` to the interface that has the address, unless the user has set it. Without it, gloo
    would use the interface to which each host resolves its own name.
    """
    assert placement.launcher is not None, "there is no address to meet at"
    return _Meeting(placement, launcher_named(placement.launcher), environ, process, timeout).meet()


@dataclass(frozen=True)
class _Meeting:
    """The ranks of a job that connect in one `init`."""

    placement: Placement
    launcher: Launcher
    environ: Mapping[str, str]
    process: ProcessState
    timeout: timedelta

    def meet(self) -> tuple[Store, bytes | None]:
        job = self._name_of_job()
        name = f"init{self.process.next_init((self.launcher.name, job))}"
        exchange = self._choose_exchange(job)
        secret = None
        if exchange is None:
            store, own = self._store_of_job()
        else:
            store, own, secret = self._store_by(exchange, f"hvdlite.{name}")
        self.process.choose_interface(None if own is None else interface_with(own))
        store.set_timeout(self.timeout)
        return PrefixStore(name, store), secret

    def _choose_exchange(self, job: str | None) -> Exchange | None:
        """Returns a function that broadcasts a line of rank 0's to the other ranks; None under plain srun.

        Every rank calls that function with the same key; rank 0 passes the line, the others None, and all get the line.
        """
        placement, environ, timeout_s = self.placement, self.environ, self.timeout.total_seconds()
        if placement.one_host and job is not None:
            return lambda key, value: self._exchange_on_host(f"{job}/{key}", value)
        mpi = _running_mpi()
        own = (placement.rank, placement.size)
        if mpi is not None and (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()) == own:
            return lambda _, value: str(mpi.COMM_WORLD.bcast(value))
        if "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
            return lambda key, value: exchange_by_pmix(environ, key, value, timeout_s)
        if "PMI_FD" in environ or self.launcher.is_asked_by_pmi:
            inherited = environ.get("PMI_FD", "")
            connection = self.process.keep("PMI", inherited, lambda: PmiConnection(inherited), PmiConnection.close).fd
            return lambda key, value: exchange_by_pmi(connection, key, value, timeout_s)
        if self.launcher.nodelist is not None:
            return None
        raise LaunchEnvironmentError(
            f"{self.launcher.name} has set neither PMIX_RANK and PMIX_NAMESPACE nor PMI_FD, so its ranks cannot find "
            "each other: set MASTER_ADDR and MASTER_PORT for every rank (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
        )

    def _name_of_job(self) -> str | None:
        """Returns a name that is unique among the jobs that run on this host; None if there is no job id."""
        if self.launcher.job_id:
            return f"{os.getuid()}/{self.launcher.job_id[0]}/{self._id_of_job()}"
        if "PMIX_NAMESPACE" in self.environ and "PMIX_SERVER_URI2" in self.environ:
            # Another job may use the namespace again; the address of the job's server is unique while it runs.
            server = self.environ["PMIX_SERVER_URI2"].rpartition("/")[2]
            return f"{os.getuid()}/pmix/{self.environ['PMIX_NAMESPACE'][-40:]}/{server}"
        return None

    def _id_of_job(self) -> str:
        return ".".join(self.environ.get(name, "") for name in self.launcher.job_id)

    def _exchange_on_host(self, name: str, value: str | None) -> str:
        if value is None:
            return ask_local_rank_0(name, self.placement.rank, self.timeout.total_seconds())
        give_to_local_ranks(name, value, self.placement.size, self.timeout.total_seconds())
        return value

    def _store_by(self, exchange: Exchange, key: str) -> tuple[Store, str | None, bytes]:
        """Returns the store, this host's own address on the route to it, and rank 0's secret."""
        placement = self.placement
        if placement.rank != 0:
            address, port, secret = exchange(key, None).split("/")
            store = self._connect(address, int(port))
            return store, LOOPBACK if placement.one_host else own_address([address]), secret.encode()
        own = LOOPBACK if placement.one_host else own_address(self._outward())
        if own is None:
            raise LaunchEnvironmentError(
                f"no address of {placement.host}, where rank 0 runs, was found that other hosts can reach: set "
                "MASTER_ADDR and MASTER_PORT for every rank"
            )
        store = self._serve(own, 0)
        secret = new_secret()
        exchange(key, f"{own}/{store.port}/{secret}")  # without spaces and equals signs, which PMI does not allow
        return store, own, secret.encode()

    def _outward(self) -> list[str]:
        """Returns names and addresses on the side of the other ranks, best first, for rank 0's `own_address`."""
        others: list[str] = []
        if self.launcher.nodelist is not None:
            others = hosts_of_job(self.launcher, self.environ)[-1:]
        elif self.launcher.own_addresses is not None:
            # OpenMPI's format: "...;tcp://10.0.0.1,10.1.0.1:4000;tcp6://[fd00::1]:4001".
            listed = self.environ.get(self.launcher.own_addresses, "")
            groups = re.findall(r"tcp6?://\[?([0-9a-fA-F:.,]+?)\]?:\d+", listed)
            others = [address for group in groups for address in group.split(",")]
        return [*others, *ELSEWHERE, self.placement.host]

    def _store_of_job(self) -> tuple[Store, str | None]:
        """Returns the store of a plain srun job, on its first host, and this host's own address on the route to it."""
        placement, hosts = self.placement, hosts_of_job(self.launcher, self.environ)
        if placement.rank == 0 and placement.node != "0":
            raise LaunchEnvironmentError(
                f"rank 0 is not on {hosts[0]}, the first host of {self.launcher.nodelist}, where the others look for "
                "it: set MASTER_ADDR and MASTER_PORT for every rank, or use srun --mpi=pmix"
            )
        port = port_of_job(self.launcher, self.environ)
        as_whom = () if placement.rank == 0 else (placement.rank, placement.size)
        try:
            # Kept for later calls of init(): otherwise a rank could connect to a server that is just closing.
            store = self.process.keep("store", (tuple(hosts), port, *as_whom), lambda: self._store_at(hosts, port))
        except (RuntimeError, OSError) as error:
            if placement.rank != 0:
                raise  # rank 0 has not opened the store in time
            raise LaunchEnvironmentError(
                f"rank 0 cannot listen on port {port} of {placement.host}, which follows from the step's id: set "
                f"MASTER_ADDR and another MASTER_PORT for every rank, or use srun --mpi=pmix or --resv-ports ({error})"
            ) from error
        # Two jobs may compute the same port, and ranks of one connect to the store of the other: separate their keys.
        of_job = PrefixStore(f"job.{self._id_of_job()}", store)
        return of_job, own_address([hosts[-1] if placement.rank == 0 else hosts[0]])

    def _store_at(self, hosts: Sequence[str], port: int) -> TCPStore:
        own = own_address([hosts[-1]]) if self.placement.rank == 0 else None
        # On all interfaces, unless hosts[0] resolves to `own` here: the others connect to what the name is to them.
        return (
            self._connect(hosts[0], port) if own is None or not _is_name_of(hosts[0], own) else self._serve(own, port)
        )

    def _connect(self, host: str, port: int) -> TCPStore:
        """Opens the store at an address; rank 0 serves it there."""
        is_master, size = self.placement.rank == 0, self.placement.size
        return TCPStore(host, port, size, is_master=is_master, timeout=self.timeout, wait_for_workers=False)

    def _serve(self, own: str, port: int) -> TCPStore:
        """Opens rank 0's store on one address of this host alone; with port 0 the kernel chooses the port."""
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener = socket.create_server((own, port), family=family, backlog=max(128, self.placement.size))
        return TCPStore(
            own,
            listener.getsockname()[1],
            self.placement.size,
            is_master=True,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class PmiConnection:
    """The connection of one PMI_FD, kept for every `init` of this process; "finalize" is sent at the program's end."""

    def __init__(self, inherited: str) -> None:
        self.fd = open_connection(inherited)
        self._pid = os.getpid()
        atexit.register(self._finalize)

    def close(self) -> None:
        """Sends "finalize" and closes the connection; called when PMI_FD names another launcher's connection."""
        atexit.unregister(self._finalize)
        self._finalize()
        os.close(self.fd)

    def _finalize(self) -> None:
        # If MPI is running, it sends "finalize" itself, after Python's exit handlers.
        if os.getpid() == self._pid and _running_mpi() is None:
            finalize_pmi(self.fd)


def _running_mpi() -> Any:
    """Returns the module mpi4py.MPI if the program has imported it and MPI is initialised; never imports it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _is_name_of(host: str, address: str) -> bool:
    try:
        return any(found[4][0] == address for found in socket.getaddrinfo(host, None))
    except OSError:
        return False


def port_of_job(launcher: Launcher, environ: Mapping[str, str]) -> int:
    """Returns the port that every task of a job computes alike: a reserved one, or one from the job's id."""
    reserved = re.match(r"[0-9]{1,5}", environ.get(launcher.reserved_ports or "", ""))
    if reserved is not None:
        return int(reserved[0])
    number = 0
    for name in reversed(launcher.job_id):
        # 7919 is a prime: it keeps the ports of one job's steps apart from those of the next job's.
        number = 7919 * number + int(re.sub(r"[^0-9]", "", environ.get(name, "")) or "0")
    return _FIRST_PORT + number % _PORTS


def hosts_of_job(launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """Returns the job's hosts in the order of its nodelist. A range keeps its first number's width (``[08-10]``)."""
    assert launcher.nodelist is not None, "the caller has asked"
    text = environ.get(launcher.nodelist, "")
    try:
        if _LIST.fullmatch(text) is not None:
            return [host for item in _ITEM.findall(text) for host in _expand_item(item)]
    except ValueError:
        pass
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise LaunchEnvironmentError(
        f"{launcher.nodelist}={shown!r} is not a list of hosts such as node[1-3,7]; {launcher.name} sets it, so "
        "something has changed it since"
    )


def _expand_item(item: str) -> list[str]:
    choices = [[literal] if literal else _expand_ranges(ranges) for ranges, literal in _PART.findall(item)]
    if math.prod(map(len, choices)) > _MOST_HOSTS:
        raise ValueError("too many hosts")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise ValueError(f"{part!r} is no range")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise ValueError(f"{part!r} is no range of hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
