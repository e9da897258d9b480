"""`horovod.run`: calls a function in new workers, with Horovod's arguments; it calls `hvdlite.run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hvdlite

Returned = TypeVar("Returned")

__all__ = ["run"]

# A package without modules: `finder` says of `horovod.runner.launch` what to use instead.
__path__: list[str] = []


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,  # no effect: hvdlite always sends CPU tensors between hosts over gloo
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Returned]:
    """Calls `hvdlite.run` with Horovod's arguments, in Horovod's order; returns the return values by rank.

    An argument without meaning here prints a line on stderr. If no number of workers is given, there is one, or one for
    each slot of ``hosts`` or ``hostfile``; with ``min_num_proc`` or ``host_discovery_script`` their number may change.
    """
    workers = _one_of("num_proc", num_proc, "np", np)
    least = _one_of("min_num_proc", min_num_proc, "min_np", min_np)
    most = _one_of("max_num_proc", max_num_proc, "max_np", max_np)
    if executable not in (None, sys.executable):
        raise ValueError(
            f"horovod.run(executable={executable!r}): workers run in the calling program's Python, "
            f"{sys.executable}: run that program with the other one"
        )
    if disable_cache is not None:
        _say_without_meaning("disable_cache", "hvdlite caches nothing between jobs")
    if use_mpi or mpi_args:
        _say_without_meaning("use_mpi" if use_mpi else "mpi_args", "workers are started over ssh, without MPI")
    if all(given is None for given in (workers, least, hosts, hostfile, host_discovery_script)):
        workers = 1
    interfaces = network_interfaces if network_interfaces is not None else network_interface
    return hvdlite.run(
        func,
        args,
        kwargs,
        np=workers,
        min_np=least,
        max_np=most,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        slots=slots,
        reset_limit=reset_limit,
        blacklist_cooldown_range=None if cooldown_range is None else list(cooldown_range),
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=None if verbose is None else bool(verbose),
        network_interface=interfaces if interfaces is None or isinstance(interfaces, str) else ",".join(interfaces),
        # Each worker finds the shim on its own host, where the path may differ from that in this environment.
        horovod=True,
    )


def _one_of(name: str, value: int | None, old_name: str, old_value: int | None) -> int | None:
    if value is not None and old_value is not None:
        raise ValueError(f"horovod.run(): {name} and {old_name} are the same argument: pass only {name}")
    return old_value if value is None else value


def _say_without_meaning(argument: str, why: str) -> None:
    print(f"hvdlite: horovod.run({argument}=...) has no effect: {why}", file=sys.stderr)
