"""`horovod.runner`, and `horovod.run`: a function called in many workers, with Horovod's arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hvdlite

Returned = TypeVar("Returned")

__all__ = ["run"]


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
    use_gloo: bool | None = None,  # between hosts CPU tensors travel over gloo in any case
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Returned]:
    """`hvdlite.run` with Horovod's arguments, in Horovod's order: what the function returned, by rank.

    Those of elastic training are refused with a ValueError; what has no meaning here is said to have none, in one line
    on stderr. Without a number of workers there is one, or one for each slot of the hosts that are given.
    """
    _refuse_elastic(
        min_num_proc=min_num_proc, max_num_proc=max_num_proc, slots=slots, reset_limit=reset_limit,
        cooldown_range=cooldown_range, host_discovery_script=host_discovery_script, min_np=min_np, max_np=max_np,
    )  # fmt: skip
    if num_proc is not None and np is not None:
        raise ValueError("horovod.run(): num_proc and np say the same; give num_proc alone")
    if executable not in (None, sys.executable):
        raise ValueError(
            f"horovod.run(executable={executable!r}): workers run in the Python that calls it, {sys.executable}: call "
            "it from a program that the other one runs"
        )
    if disable_cache is not None:
        _say_without_meaning("disable_cache", "nothing about hosts is kept from one job to the next")
    if use_mpi or mpi_args:
        _say_without_meaning("use_mpi" if use_mpi else "mpi_args", "workers are started over ssh, without MPI")
    workers = np if num_proc is None else num_proc
    if workers is None and hosts is None and hostfile is None:
        workers = 1
    interfaces = network_interfaces if network_interfaces is not None else network_interface
    return hvdlite.run(
        func,
        args,
        kwargs,
        np=workers,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=None if verbose is None else bool(verbose),
        network_interface=interfaces if interfaces is None or isinstance(interfaces, str) else ",".join(interfaces),
        # On another host the shim may lie elsewhere than where this process's environment has it.
        horovod=True,
    )


def _refuse_elastic(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"horovod.run({name}={value!r}): elastic training is not in hvdlite yet; give num_proc, and hosts or "
                "hostfile, and start again from a checkpoint if a host is lost"
            )


def _say_without_meaning(argument: str, why: str) -> None:
    print(f"hvdlite: horovod.run({argument}=...) has no meaning here: {why}", file=sys.stderr)
