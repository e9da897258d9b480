"""
Connects the ranks of a launcher's job: opens the store that they share and the default process group.

    Placement ── store ── exchange_infos ── default process group ── make_world

`bootstrap` calls `connect_all`, and tells hvdlite-run of it by a `LauncherEnd`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from hvdlite_wire.store_requests import RankAssignment, StoreRequest
from torch._C._distributed_c10d import PrefixStore, Store

from .. import forks
from ..comm.gloo import Connecting, open_proven
from ..comm.gloo_sockets import Connections
from ..comm.torch_engine import TorchEngineFactory, allow_collectives
from ..errors import CommunicationError, LaunchEnvironmentError, MismatchError
from ..rendezvous.host_address import no_connection_between
from ..rendezvous.launcher_store import LauncherStore
from ..rendezvous.placement import Placement, StoreConnection
from ..rendezvous.process_state import ProcessState
from ..rendezvous.rank_info import RankInfo
from ..rendezvous.store_client import StoreClient
from .make_world import InitCall, World, exchange_infos, make_world

_GIVING_UP = timedelta(seconds=1)  # the timeout for telling the launcher that init has failed

# Of TORCH_NCCL_ASYNC_ERROR_HANDLING: abort the communicator, and leave the process alone.
_CLEAN_UP_ONLY = "2"


def connect_all(
    placement: Placement,
    client: StoreConnection | None,
    assignment: RankAssignment | None,
    call: InitCall,
    connecting: Connecting | None = None,
) -> World:
    """Connects this rank to all others and returns their world. Every rank must call it, and waits for all.

    ``client`` is hvdlite-run's store, or the one of a place that was given. An elastic worker has an ``assignment``,
    and a ``connecting`` that ends the waits once a rank is lost. A `CommunicationError` if not all ranks come in time.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if assignment is not None:
        # By default NCCL's watchdog ends the process when it sees that another rank is gone; the others are to go on.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _CLEAN_UP_ONLY)
    # torch.distributed was not initialised before, so a default group that exists on failure is ours to destroy.
    process, init_timeout = call.process, call.timeout
    call.undo.callback(_leave, client)
    infos: Sequence[RankInfo] = ()
    process.connects_since_s = time.monotonic()
    try:
        store, secret = _open_store(placement, client, assignment, process, init_timeout.limit)
        ranks = exchange_infos(placement, store, secret, call, assignment)
        infos = ranks.infos

        def make(_: Connections) -> dist.ProcessGroup:
            # Torch puts this count into the keys of the store, and forgets to reset it where init_process_group fails:
            # ranks of which only some have come so far, in a generation before, would not find each other.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.size, timeout=init_timeout.left()
            )
            assert dist.group.WORLD is not None, "it has just been made"
            allow_collectives(dist.group.WORLD, init_timeout.timeout)
            return dist.group.WORLD

        has_network = client is not None and len({info.placement.node for info in infos}) > 1
        if has_network and connecting is not None and assignment is not None and assignment.generation > 1:
            # In the first generation a host that others do not reach is an error of the job.
            process.keepalive = connecting.sockets
            connecting.addresses_by_rank = {rank: tuple(info.settings["addresses"]) for rank, info in enumerate(infos)}

        def on_connected(connections: Connections) -> None:
            if connecting is not None:
                connecting.on_give_up(connections.end_waits)
            if has_network:
                connections.probe()
                process.keepalive = connections

        limit_s = init_timeout.limit.total_seconds()
        with contextlib.nullcontext() if connecting is None else connecting.for_at_most(limit_s):
            default, connections = open_proven(
                make, dist.destroy_process_group, ranks.connecting, "default", on_connected
            )
        call.undo.callback(connections.end_waits)
    except (LaunchEnvironmentError, MismatchError):
        raise
    except RuntimeError as error:
        if isinstance(error, CommunicationError) and not (connecting is not None and connecting.is_late):
            raise
        hosts = [info.placement.host for info in infos]
        if firewall := no_connection_between(hosts, placement.host, error):
            raise CommunicationError(f"hvd.init() failed on rank {placement.rank}: {firewall}. ({error})") from error
        raise CommunicationError(
            f"hvd.init() failed on rank {placement.rank} ({placement.host}): another rank did not call it within "
            f"{init_timeout.limit.total_seconds():g} s, ended before it did, or cannot be reached. ({error})"
        ) from error
    finally:
        process.connects_since_s = None
    engine_factory = TorchEngineFactory(backend, ranks.connecting, (default, connections))
    leave = partial(_leave, client, connections.shut_down)
    return make_world(placement, engine_factory, ranks, call, leave, assignment)


def _open_store(
    placement: Placement,
    client: StoreConnection | None,
    assignment: RankAssignment | None,
    process: ProcessState,
    timeout: timedelta,
) -> tuple[Store, bytes | None]:
    """Returns the store that all ranks share, and the secret from the launcher's exchange, or None.

    Each init at the same store has its own key prefix, not to read older keys; in an elastic job the generation's, as
    ranks may have called init at different times.
    """
    # Imported where it is used, since a job under hvdlite-run does not need it.
    if placement.launcher is not None:
        from ..rendezvous.rank0_stores import rendezvous_by_pmi  # noqa: PLC0415

        return rendezvous_by_pmi(placement, os.environ, process, timeout)
    if client is not None:
        prefix = f"init{process.next_init(placement.store_url)}" if assignment is None else assignment.prefix
        launcher_store = process.keep("launcher store", client, lambda: LauncherStore(client, timeout))
        launcher_store.set_timeout(timeout)
        return PrefixStore(prefix, launcher_store), None
    from ..rendezvous.rank0_stores import store_at_given_address  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    number = process.next_init((address, port))
    store = store_at_given_address(process, placement.rank, placement.size, address, port, timeout)
    store.set_timeout(timeout)
    return PrefixStore(f"init{number}", store), None


def _leave(client: StoreConnection | None, shut_down: Callable[[], None] = lambda: None) -> None:
    shut_down()
    if dist.is_initialized():
        if forks.parent is not None:
            # In a forked child torch forgets the groups, and does not shut down those that it has no names of: NCCL's
            # would wait for threads that only the parent has.
            dist.distributed_c10d._world.pg_names.clear()
        dist.destroy_process_group()
    if client is not None:
        client.close()


@dataclass(frozen=True, slots=True)
class LauncherEnd:
    """Tells hvdlite-run whether this worker's init has started, is done or has failed.

    By this hvdlite-run ends the job if ranks wait in init for one that never calls it, or gives elastic workers ranks.
    """

    client: StoreClient
    worker: int
    name: str

    def tell(self, what: StoreRequest, timeout: timedelta, generation: int | None = None, *further: bytes) -> None:
        """``generation``: an elastic worker's last one, or 0; ``further``: its `NewWorkerPolicy`, or its `Refusals`."""
        numbers = [self.worker] if generation is None else [self.worker, generation]
        try:
            self.client.request(what, [*(b"%d" % each for each in numbers), *further], timeout.total_seconds())
        except (OSError, ValueError) as error:
            raise CommunicationError(
                f"hvd.init() failed on {self.name}: hvdlite-run's agent on this host does not answer: {error}"
            ) from error

    def tell_failure(self, generation: int | None = None, *further: bytes) -> None:
        """Like `tell`, but does not wait for long, and ignores errors."""
        with contextlib.suppress(CommunicationError):
            self.tell(StoreRequest.INIT_FAILED, _GIVING_UP, generation, *further)


def store_client(url: str, process: ProcessState) -> StoreClient:
    """Returns this process's client of hvdlite-run's store, without open connections; one for all worlds."""
    return process.keep("store client", url, lambda: StoreClient.from_url(url), StoreClient.close)
