"""
A client of PMI-1, the text protocol between a rank and its launcher: MPICH's mpirun, or ``srun --mpi=pmi2``.

    init -> get_my_kvsname -> rank 0: put -> barrier_in (all) -> get          at the end of the process: finalize

A process inherits one connection to the launcher, and an MPI library in the same process uses it too. The launcher
ignores the process after "finalize". So this is sent only at the end of the process, when MPI has finished.
`pmi_rendezvous` calls these functions.
"""

from __future__ import annotations

import os
import select
import stat
import time
from contextlib import suppress

from ..errors import CommunicationError, LaunchEnvironmentError

_LONGEST = 65536
_PATIENCE_S = 30  # for requests that the launcher's daemon on this host answers without waiting for other ranks


def open_connection(inherited: str) -> int:
    """Returns a duplicate of the file descriptor in PMI_FD, on which "init" has been sent.

    It is a duplicate because MPI closes the inherited one when it finalizes. Call it once per process: Slurm treats a
    second "init" as an error (MPICH's Hydra does not).
    """
    with suppress(ValueError, OSError, OverflowError):
        if not inherited.isascii():
            raise ValueError("int() reads digits of all scripts")
        if stat.S_ISSOCK(os.fstat(int(inherited)).st_mode):
            connection = os.dup(int(inherited))
            _ask(connection, "cmd=init pmi_version=1 pmi_subversion=1", time.monotonic() + _PATIENCE_S)
            return connection
    raise LaunchEnvironmentError(
        f"PMI_FD={inherited!r} is not an open connection to the launcher that set PMI_RANK; a program in between may "
        "have closed it: set MASTER_ADDR and MASTER_PORT for every rank"
    )


def exchange_by_pmi(connection: int, key: str, value: str | None, timeout_s: float) -> str:
    """Broadcasts rank 0's ``value``; the other ranks pass None. Every rank must call it, and waits for all.

    Raises a CommunicationError after ``timeout_s``.
    """
    give_up_at = time.monotonic() + timeout_s

    def ask(command: str) -> dict[str, str]:
        return _ask(connection, command, give_up_at)

    space = ask("cmd=get_my_kvsname")["kvsname"]
    if value is not None:
        ask(f"cmd=put kvsname={space} key={key} value={value}")
    ask("cmd=barrier_in")
    return ask(f"cmd=get kvsname={space} key={key}")["value"]


def finalize_pmi(connection: int) -> None:
    """Tells the launcher that this process may end. Otherwise the launcher takes its end for a crash of the job."""
    try:
        _ask(connection, "cmd=finalize", time.monotonic() + _PATIENCE_S)
    except (CommunicationError, OSError):
        return  # the MPI library has sent it already, or the launcher has ended


def _ask(connection: int, command: str, give_up_at: float) -> dict[str, str]:
    try:
        os.write(connection, f"{command}\n".encode())
        answer = _read_line(connection, give_up_at)
    except OSError as error:
        raise CommunicationError(f"the launcher does not answer on PMI_FD={connection}: {error}") from error
    # Only the last value may contain spaces: it is a message, which is not used here.
    fields = dict(part.partition("=")[::2] for part in answer.split())
    if "cmd" not in fields or fields.get("rc", "0") != "0":
        raise CommunicationError(f"the launcher answered {answer!r} to {command!r} on PMI_FD={connection}")
    return fields


def _read_line(connection: int, give_up_at: float) -> str:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        if not poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
            raise CommunicationError(
                "hvd.init() failed: another rank did not call it in time (the launcher's PMI barrier has not ended): "
                "look at the output of the other ranks"
            )
        piece = os.read(connection, _LONGEST)
        if not piece or len(data) > _LONGEST:
            raise CommunicationError(f"the launcher closed PMI_FD={connection} or sent an invalid answer")
        data += piece
    return data[:-1].decode(errors="replace")
