"""
PMI-1, the text protocol in which a rank of MPICH's mpirun (or of ``srun --mpi=pmi2``) asks its launcher.

    init -> get_my_kvsname -> rank 0: put -> barrier_in (all) -> get          at the end of the process: finalize

The connection is inherited and there is one: an MPI library in the same process speaks over it too. Therefore
"finalize", after which the launcher hears no more from the process, waits for the end of the process, where MPI
has had its turn.
"""

from __future__ import annotations

import os
import select
import stat
import time
from contextlib import suppress

from ..errors import CommunicationError, LaunchEnvironmentError

_LONGEST = 65536
_PATIENCE_S = 30  # for what the launcher's daemon on this host answers without asking anybody


def open_connection(inherited: str) -> int:
    """The file descriptor of PMI_FD, as a copy of our own: MPI closes the inherited one at its end.

    To be done once: Slurm takes a second "init" for an error, which Hydra answers.
    """
    with suppress(ValueError, OSError, OverflowError):
        if not inherited.isascii():
            raise ValueError("int() reads digits of all scripts")
        if stat.S_ISSOCK(os.fstat(int(inherited)).st_mode):
            connection = os.dup(int(inherited))
            _ask(connection, "cmd=init pmi_version=1 pmi_subversion=1", time.monotonic() + _PATIENCE_S)
            return connection
    raise LaunchEnvironmentError(
        f"PMI_FD={inherited!r} is not an open connection to the launcher that set PMI_RANK; what starts programs in "
        "between may have closed it. Set MASTER_ADDR and MASTER_PORT for every rank, and they meet there"
    )


def exchange_by_pmi(connection: int, key: str, value: str | None, timeout_s: float) -> str:
    """Rank 0 gives a value, the others None; all get the value. Waits for all ranks."""
    give_up_at = time.monotonic() + timeout_s

    def ask(command: str) -> dict[str, str]:
        return _ask(connection, command, give_up_at)

    space = ask("cmd=get_my_kvsname")["kvsname"]
    if value is not None:
        ask(f"cmd=put kvsname={space} key={key} value={value}")
    ask("cmd=barrier_in")
    return ask(f"cmd=get kvsname={space} key={key}")["value"]


def finalize_pmi(connection: int) -> None:
    """Tell the launcher that this process may end, which otherwise ends the others."""
    try:
        _ask(connection, "cmd=finalize", time.monotonic() + _PATIENCE_S)
    except (CommunicationError, OSError):
        return  # told already, by the MPI library or by us, or nobody is there to be told


def _ask(connection: int, command: str, give_up_at: float) -> dict[str, str]:
    try:
        os.write(connection, f"{command}\n".encode())
        answer = _read_line(connection, give_up_at)
    except OSError as error:
        raise CommunicationError(f"the launcher does not answer on PMI_FD={connection}: {error}") from error
    # The last value may have spaces (a message), and no other does.
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
            raise CommunicationError("waiting for the other ranks in the launcher's barrier")
        piece = os.read(connection, _LONGEST)
        if not piece or len(data) > _LONGEST:
            raise CommunicationError(f"the launcher closed PMI_FD={connection} or sent no line")
        data += piece
    return data[:-1].decode(errors="replace")
