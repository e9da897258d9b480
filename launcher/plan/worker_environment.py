"""The environment variables that hvdlite-run sets for each worker. Pure: nothing is started or looked up here.

They are the public contract between hvdlite-run and hvdlite (or any other program that is launched):

    HVDLITE_RANK HVDLITE_SIZE               among all workers
    HVDLITE_LOCAL_RANK HVDLITE_LOCAL_SIZE   among those on this host
    HVDLITE_CROSS_RANK HVDLITE_CROSS_SIZE   among the hosts that have this local rank
    HVDLITE_HOST                            this host, as the user named it
    HVDLITE_STORE                           where the workers meet: unix:// and the path, as it is, of a socket on
                                            which the host's agent answers what `worker_requests` describes
    HVDLITE_JOB_DIR                         the job's private directory here, removed at its end

A worker that ends only because it lost a peer leaves an empty file ``rank.<rank>.peer-lost`` in HVDLITE_JOB_DIR
before it does, and is then not taken for the cause.

A program that knows torch.distributed alone finds what torchrun would tell it, with a MASTER_PORT that is kept free
on rank 0's host until rank 0 listens. One that was written for Horovod finds what horovodrun would tell it. The table
below has them all; tests/e2e/test_contract.py compares it with the library's. With --horovod, PYTHONPATH begins with
where that host's hvdlite has a `horovod`. What else flags set for all workers is in `horovodrun_flags`.

Set too unless the user did: OMP_NUM_THREADS (the cores of the host shared out among its workers),
PYTHONUNBUFFERED=1, GLOO_ENABLE_STORE_V2_API=1 (gloo asks the store less often), and GLOO_SOCKET_IFNAME: the
interface towards the other hosts, which NCCL_SOCKET_IFNAME names too, or the loopback interface if all workers
are on one host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .slots import Slot

_PLACE: Mapping[str, str] = MappingProxyType(
    {
        "HVDLITE_RANK": "rank",
        "HVDLITE_SIZE": "size",
        "HVDLITE_LOCAL_RANK": "local rank",
        "HVDLITE_LOCAL_SIZE": "local size",
        "HVDLITE_CROSS_RANK": "cross rank",
        "HVDLITE_CROSS_SIZE": "cross size",
        "HVDLITE_HOST": "host",
        # As horovodrun
        "HOROVOD_RANK": "rank",
        "HOROVOD_SIZE": "size",
        "HOROVOD_LOCAL_RANK": "local rank",
        "HOROVOD_LOCAL_SIZE": "local size",
        "HOROVOD_CROSS_RANK": "cross rank",
        "HOROVOD_CROSS_SIZE": "cross size",
        "HOROVOD_HOSTNAME": "host",
        # As torchrun
        "RANK": "rank",
        "WORLD_SIZE": "size",
        "LOCAL_RANK": "local rank",
        "LOCAL_WORLD_SIZE": "local size",
        "GROUP_RANK": "node",
        "MASTER_ADDR": "master address",
        "MASTER_PORT": "master port",
    }
)
"""The variables of a worker's place, and what each of them has."""

_STORE, _JOB_DIR = "HVDLITE_STORE", "HVDLITE_JOB_DIR"

OWN_VARIABLES = frozenset({*_PLACE, _STORE, _JOB_DIR})
"""What hvdlite-run alone sets: a user's value never counts."""

# The longest name of a socket, and what of it comes after the temporary directory: /hvdlite-, a token, /store.
_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
_JOB_BYTES = 36


def slot_environment(slot: Slot, size: int, *, master_address: str, master_port: int) -> dict[str, str]:
    """The variables that say which of ``size`` workers this one is, and where rank 0 may listen."""
    place = {
        "rank": str(slot.rank),
        "size": str(size),
        "local rank": str(slot.local_rank),
        "local size": str(slot.local_size),
        "cross rank": str(slot.cross_rank),
        "cross size": str(slot.cross_size),
        "host": slot.host.label,
        "node": str(slot.node),
        "master address": master_address,
        "master port": str(master_port),
    }
    return {name: place[what] for name, what in _PLACE.items()}


@dataclass(frozen=True)
class HostEnvironment:
    """What a worker's environment says of its host. ``interface`` is the one that its peers are reached by."""

    job_dir: str
    cores: int
    interface: str | None


def variables_set(given: Mapping[str, str], own: Mapping[str, str], host: HostEnvironment) -> dict[str, str]:
    """What a worker's environment has beyond what the user has ``given``: its ``own`` slot's and its host's."""
    local_size = int(own["HVDLITE_LOCAL_SIZE"])
    unless_set = {"OMP_NUM_THREADS": str(max(1, host.cores // local_size)), "PYTHONUNBUFFERED": "1"}
    # gloo asks for all ranks' addresses in one question then, and not in two for each.
    unless_set["GLOO_ENABLE_STORE_V2_API"] = "1"
    if host.interface is not None:
        # Or gloo would resolve the hostname, which often fails, or leave the machine needlessly.
        unless_set["GLOO_SOCKET_IFNAME"] = host.interface
        if local_size != int(own["HVDLITE_SIZE"]):
            unless_set["NCCL_SOCKET_IFNAME"] = f"={host.interface}"  # = for this very name, not all that begin so
    defaults = {name: value for name, value in unless_set.items() if name not in given}
    return {**own, _STORE: f"unix://{store_socket(host.job_dir)}", _JOB_DIR: host.job_dir, **defaults}


def job_dir(token: str, tmp: str) -> str:
    """The private directory of the job named ``token`` on a host whose temporary directory is ``tmp``.

    It is in /tmp where that is so long that no socket in it could be named.
    """
    tmp = os.path.abspath(tmp)
    if len(os.fsencode(tmp)) > _SOCKET_BYTES - _JOB_BYTES:
        tmp = "/tmp"
    return os.path.join(tmp, f"hvdlite-{token}")


def store_socket(job_dir: str) -> str:
    """Where the agent listens for its workers' questions to the store."""
    return os.path.join(job_dir, "store")


def peer_lost_file(job_dir: str, rank: int) -> str:
    """What worker ``rank`` leaves behind to say that it ends only because it lost a peer."""
    return os.path.join(job_dir, f"rank.{rank}.peer-lost")


def left_file(job_dir: str, rank: int) -> str:
    """What worker ``rank`` leaves behind to say that it leaves the others by itself, whatever they lose by it."""
    return os.path.join(job_dir, f"rank.{rank}.left")
