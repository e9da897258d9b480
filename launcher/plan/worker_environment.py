"""The environment of workers: the variables that hvdlite-run sets for each, and what they inherit of its own.

The variables are the public contract between hvdlite-run and hvdlite, or any other program that it starts. What each
means is in docs/variables.md, and their names are in `hvdlite_wire.job_contract`. HVDLITE_STORE is unix:// and the
path, unquoted, of the socket on which the host's agent answers the requests in `hvdlite_wire.store_requests`.

In an elastic job ranks change, so a worker gets its rank in hvd.init() and no variable has it, nor any size. Its local
rank is its slot on the host, which stays.

A worker creates empty files in HVDLITE_JOB_DIR before it ends: see `hvdlite_wire.job_contract`.

A program that only knows torch.distributed finds the variables of torchrun; MASTER_PORT is kept free on rank 0's host
until rank 0 listens. One written for Horovod finds the variables of horovodrun. The table below has them all, and
tests/e2e/test_contract.py compares it with the library's. PYTHONPATH begins with the directory of a
`sitecustomize`, by which reports have the stacks of any program that imports torch; with --horovod, the directory of
`horovod` in that host's hvdlite follows. `horovodrun_flags` has the variables that flags set for all workers.

Some variables are set only if the user has not set them: OMP_NUM_THREADS (the host's cores divided by its workers),
PYTHONUNBUFFERED=1, GLOO_ENABLE_STORE_V2_API=1 (gloo then sends fewer requests to the store) and GLOO_SOCKET_IFNAME. The
latter is the interface towards the other hosts, which NCCL_SOCKET_IFNAME names too, or the loopback interface if all
workers are on one host.

No worker inherits the variables of one rank of an MPI job. Workers on other hosts also inherit none that hold only for
this host, this login or another launcher's job. If you add a launcher to `hvdlite.rendezvous.launchers`, add its
variables to the patterns here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hvdlite_wire.job_contract import (
    CHAOS,
    CROSS_RANK,
    CROSS_SIZE,
    ELASTIC,
    HOROVODS,
    HOST,
    JOB_DIR,
    LOCAL_RANK,
    LOCAL_SIZE,
    RANK,
    SIZE,
    STORE,
    WORKER,
)

from ..errors import UsageError

if TYPE_CHECKING:  # agents import this module, and need neither slots nor hosts
    from .hosts import Slot

_OWN = {
    RANK: "rank",
    SIZE: "size",
    LOCAL_RANK: "local rank",
    LOCAL_SIZE: "local size",
    CROSS_RANK: "cross rank",
    CROSS_SIZE: "cross size",
    WORKER: "worker",
    HOST: "host",
}
_PLACE: Mapping[str, str] = {
    **_OWN,
    # As set by horovodrun
    **{HOROVODS[name]: what for name, what in _OWN.items() if name in HOROVODS},
    # As set by torchrun
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local rank",
    "LOCAL_WORLD_SIZE": "local size",
    "GROUP_RANK": "node",
    "MASTER_ADDR": "master address",
    "MASTER_PORT": "master port",
}
"""The variables of a worker's rank and host, and the name of the value of each in `slot_environment`."""

_ELASTIC = (ELASTIC, HOROVODS[ELASTIC])

OWN_VARIABLES = frozenset({*_PLACE, *_ELASTIC, STORE, JOB_DIR, CHAOS})
"""The variables that only hvdlite-run sets: a user's values are replaced."""

# The longest path of a Unix socket, and how much of it follows the temporary directory: /hvdlite-, a token, and /store
# or /r and the number of a process.
_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
_JOB_BYTES = 40


def slot_environment(slot: Slot, size: int, *, master_address: str, master_port: int) -> dict[str, str]:
    """Returns the variables of the worker in ``slot``, one of ``size``, and the address where rank 0 may listen."""
    place = {
        **{field.name.replace("_", " "): getattr(slot, field.name) for field in fields(slot)},
        "worker": slot.number,
        "size": size,
        "host": slot.host.label,
        "master address": master_address,
        "master port": master_port,
    }
    return {name: str(place[what]) for name, what in _PLACE.items()}


def elastic_environment(worker: int, host: str, slot: int, chaos: str = "") -> dict[str, str]:
    """Returns the variables of a worker of an elastic job: its number, its host's label, and its slot there.

    ``chaos`` are its faults, if it has any.
    """
    place = {"worker": str(worker), "host": host, "local rank": str(slot)}
    faults = {CHAOS: chaos} if chaos else {}
    return {
        **faults,
        **dict.fromkeys(_ELASTIC, "1"),
        **{name: place[what] for name, what in _PLACE.items() if what in place},
    }


@dataclass(frozen=True)
class HostEnvironment:
    """The host's part of a worker's environment.

    ``slots`` is how many workers share its ``cores``. ``interface`` is the one towards the job's other hosts, or the
    loopback interface if there are none (``is_alone``).
    """

    job_dir: str
    cores: int
    interface: str | None
    slots: int
    is_alone: bool


def variables_set(given: Mapping[str, str], own: Mapping[str, str], host: HostEnvironment) -> dict[str, str]:
    """Returns the variables that hvdlite-run adds to those ``given``: the worker's ``own`` slot's, and its host's."""
    unless_set = {"OMP_NUM_THREADS": str(max(1, host.cores // host.slots)), "PYTHONUNBUFFERED": "1"}
    # With it gloo gets all ranks' addresses in one request, and not in two requests per rank.
    unless_set["GLOO_ENABLE_STORE_V2_API"] = "1"
    if host.interface is not None:
        # Else gloo would resolve the hostname, which often fails or leads out of the machine needlessly.
        unless_set["GLOO_SOCKET_IFNAME"] = host.interface
        if not host.is_alone:
            unless_set["NCCL_SOCKET_IFNAME"] = f"={host.interface}"  # = for this name only, and no prefix of others
    defaults = {name: value for name, value in unless_set.items() if name not in given}
    return {**own, STORE: f"unix://{store_socket(host.job_dir)}", JOB_DIR: host.job_dir, **defaults}


def job_dir(token: str, tmp: str) -> str:
    """Returns the private directory of the job with this ``token``, on a host with the temporary directory ``tmp``.

    It is in /tmp if ``tmp`` is too long for the path of a socket in it.
    """
    tmp = os.path.abspath(tmp)
    if len(os.fsencode(tmp)) > _SOCKET_BYTES - _JOB_BYTES:
        tmp = "/tmp"
    return os.path.join(tmp, f"hvdlite-{token}")


def store_socket(job_dir: str) -> str:
    """Returns the path of the socket on which the agent answers its workers' requests to the store."""
    return os.path.join(job_dir, "store")


# Without these a program may not be found or not start: the directories of commands, those of Python's shared library
# and standard library if they are not where it was built, and the home directory, which many programs read first.
_NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME")

# Variables of one host, one login or one rank of another launcher's job. They would be wrong on another host, where
# workers have that host's own.
_OF_ONE_HOST = re.compile(
    r"""
    HOME | USER | LOGNAME | MAIL | SHELL | SHLVL | PWD | OLDPWD | _ | BASH_FUNC_.*
    | HOST | HOSTNAME | HOSTTYPE | MACHTYPE | SSH_.* | KRB5CCNAME | GPG_.*
    | TMP | TEMP | TMPDIR | XDG_.* | DBUS_.* | SYSTEMD_.* | INVOCATION_ID | JOURNAL_STREAM
    | DISPLAY | XAUTHORITY | WAYLAND_DISPLAY | WINDOWID | TERM_.* | TMUX.* | STY | WINDOW | COLUMNS | LINES
    | (CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES | GPU_DEVICE_ORDINAL
    | OMPI_.* | MPIR_CVAR_CH3_INTERFACE_HOSTNAME | PMIX?_.* | PRTE_.* | HYDI?_.* | MPI_LOCAL.* | (SLURM|SLURMD)_.*
    | TORCHELASTIC_.* | ROLE_.* | GROUP_WORLD_SIZE
    """,
    re.VERBOSE,
)

# Variables of one rank of an MPI job. Workers must not inherit them, as they would seem to be ranks of that job.
_OF_ONE_RANK = re.compile(r"OMPI_COMM_WORLD_.*|PMIX?_.*|MPI_LOCAL.*")


@dataclass(frozen=True)
class WorkerEnvironment:
    """The environment that all workers get.

    ``elsewhere`` is for hosts other than the launcher's, in addition to their own environment.
    """

    here: Mapping[str, str]
    elsewhere: Mapping[str, str]


def chosen_environment(environ: Mapping[str, str], exports: Iterable[str], *, inherit: bool) -> WorkerEnvironment:
    """Returns the part of ``environ`` that workers get, with the variables in ``exports``.

    That part is all of it if they ``inherit`` it, else what they need to start. Each export is ``NAME``, for the value
    in ``environ``, or ``NAME=VALUE``; a later one replaces an earlier one of the same name.
    """
    exported = dict(_read_export(export, environ) for export in exports)
    here = {
        name: value
        for name, value in environ.items()
        if (inherit and not _OF_ONE_RANK.fullmatch(name)) or name in _NEEDED
    }
    elsewhere = {name: value for name, value in here.items() if inherit and not _OF_ONE_HOST.fullmatch(name)}
    return WorkerEnvironment({**here, **exported}, {**elsewhere, **exported})


def _read_export(export: str, environ: Mapping[str, str]) -> tuple[str, str]:
    # Values may be secret: no message contains one.
    name, given, value = export.partition("=")
    if not name:
        raise UsageError("-x: the name of the variable is missing: write -x NAME=VALUE")
    if name in OWN_VARIABLES:
        raise UsageError(f"-x: {name} cannot be set: hvdlite-run sets it for each worker")
    if not given and name not in environ:
        raise UsageError(f"-x: {name!r} is not set here: write -x NAME=VALUE to give it a value")
    return name, value if given else environ[name]
