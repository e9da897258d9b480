"""Finds the hosts that the place where hvdlite-run runs has named in the environment, if the user names none.

    a hostfile      MPIJob (Kubeflow's mpi-operator) and Trainer v2, for OpenMPI, Intel MPI and MPICH; dstack
    SkyPilot        the nodes' addresses, and the GPUs of each
    SageMaker       the hosts' names, and the GPUs of each

`cli.hvdlite_run` calls it. Flags that name hosts have priority, and within another launcher's job nothing is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import UsageError
from .hosts import AUTO, Host, parse_host, read_hostfile

_HOSTFILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
    "DSTACK_MPI_HOSTFILE",
)
# What mpirun sets for each process that it starts: that process's hosts are mpirun's business.
_WITHIN_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True)
class GivenHosts:
    """``hosts``, and the variable that has named them, for messages."""

    variable: str
    hosts: tuple[Host, ...]


def given_hosts(environ: Mapping[str, str]) -> GivenHosts | None:
    """Returns the hosts that the environment names; None if it names none.

    Raises a `UsageError` that names the variable, if its value cannot be used, or if this is not the host on which a
    job is to be started.
    """
    if any(name in environ for name in _WITHIN_MPI):
        return None
    if name := next((name for name in _HOSTFILES if environ.get(name)), None):
        try:
            return GivenHosts(name, read_hostfile(environ[name]))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    if environ.get("SKYPILOT_NODE_IPS"):
        return _of_skypilot(environ)
    if environ.get("SM_HOSTS"):
        return _of_sagemaker(environ)
    return None


def _of_skypilot(environ: Mapping[str, str]) -> GivenHosts:
    name = "SKYPILOT_NODE_IPS"
    if environ.get("SKYPILOT_NODE_RANK", "0") != "0":
        raise UsageError(
            f"SKYPILOT_NODE_RANK is {environ['SKYPILOT_NODE_RANK']}, and SkyPilot starts this command on every node: "
            'start hvdlite-run on the first one alone, as in: if [ "$SKYPILOT_NODE_RANK" = 0 ]; then ... fi'
        )
    slots = _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    return GivenHosts(name, tuple(_host(each, name, slots) for each in environ[name].split()))


def _of_sagemaker(environ: Mapping[str, str]) -> GivenHosts:
    name = "SM_HOSTS"
    try:
        names = json.loads(environ[name])
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
        raise UsageError(f"{name}={environ[name]!r} is not a list of hosts in JSON")
    own = environ.get("SM_CURRENT_HOST", names[0])
    if own != names[0]:
        raise UsageError(
            f"SM_CURRENT_HOST is {own}, and SageMaker starts this command on every host: start hvdlite-run on "
            f"{names[0]}, the first one, alone"
        )
    slots = _gpus(environ, "SM_NUM_GPUS")
    return GivenHosts(name, tuple(_host(each, name, slots) for each in names))


def _host(text: str, variable: str, slots: int) -> Host:
    try:
        host = parse_host(f"[{text}]" if ":" in text else text)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None
    return replace(host, slots=slots)


def _gpus(environ: Mapping[str, str], name: str) -> int:
    """Returns the GPUs of each host; `AUTO`, where the host itself counts, if there are none or it is not said."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 and int(text) else AUTO
