"""
Three ways in which rank 0 sends the other ranks a line of text, before there is a store.

    Unix socket, for jobs on one host
        rank 0 listens under a name in Linux's abstract namespace, which vanishes with its process
    PMI-1, from MPICH's mpirun and ``srun --mpi=pmi2``, a text protocol
        init -> get_my_kvsname -> rank 0: put -> barrier_in (all) -> get      at the end of the process: finalize
    PMIx, from OpenMPI's mpirun and ``srun --mpi=pmix``, called in libpmix through ctypes
        PMIx_Init -> rank 0: Put, Commit -> Fence (all) -> Get                at the end of the process: PMIx_Finalize

A process inherits one PMI-1 connection to the launcher, and an MPI library in the same process uses it too. The
launcher ignores the process after "finalize". So this is sent only at the end of the process, when MPI has finished.
libpmix counts its initialisations, so an MPI library can use it at the same time. `rank0_stores` calls these
functions.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CommunicationError, LaunchEnvironmentError

_LONGEST = 65536
_PAUSE_S = 0.02  # between two attempts to connect to rank 0
_PATIENCE_S = 30  # for requests that the launcher's daemon on this host answers without waiting for other ranks


def give_to_local_ranks(name: str, text: str, size: int, timeout_s: float) -> None:
    """Sends ``text`` to all other ranks of this host; rank 0 calls it. Blocks until each rank has it.

    ``name`` is the socket's, equal on all ranks. Raises a CommunicationError if a rank does not ask within
    ``timeout_s``, or if another process listens under this name.
    """
    give_up_at = time.monotonic() + timeout_s
    missing = set(range(1, size))
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address_of(name))
        except OSError as error:
            raise CommunicationError(
                f"another process of this host has the socket name {name!r} of this job: two processes are its rank "
                f"0, or hvd.init() was called both in a program and in one that it started ({error})"
            ) from error
        listener.listen(size)
        while missing:
            listener.settimeout(max(0.001, give_up_at - time.monotonic()))
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(max(0.001, give_up_at - time.monotonic()))
                    if _peer_user(connection) == os.getuid():
                        rank = int(_read_line(connection.fileno(), give_up_at))
                        connection.sendall(f"{text}\n".encode())
                        missing.discard(rank)
            except TimeoutError:
                raise CommunicationError(
                    f"hvd.init() failed: rank {_list(missing)} on this host did not call it within {timeout_s:g} s: "
                    "look at the output of these ranks"
                ) from None
            except (OSError, ValueError):
                continue  # it closed the connection, or is no rank; the error at the end names the missing ranks


def ask_local_rank_0(name: str, rank: int, timeout_s: float) -> str:
    """Returns the text that rank 0 sends; every other rank calls it. Blocks until rank 0 listens under ``name``.

    Raises a CommunicationError after ``timeout_s``, or if the socket belongs to another user's process.
    """
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.001, give_up_at - time.monotonic()))
            connection.connect(_address_of(name))
            if _peer_user(connection) != os.getuid():
                raise CommunicationError(f"the socket {name!r} of this host belongs to another user's process")
            connection.sendall(f"{rank}\n".encode())
            if answer := _read_line(connection.fileno(), give_up_at):
                return answer
        time.sleep(_PAUSE_S)
    raise CommunicationError(
        f"hvd.init() failed: rank 0 on this host did not call it within {timeout_s:g} s: look at its output"
    )


def _address_of(name: str) -> bytes:
    return b"\0hvdlite/" + name.encode()


def _read_line(descriptor: int, give_up_at: float) -> str:
    """Returns a line, or "" if the other end closes or sends too much; raises a TimeoutError at ``give_up_at``.

    By `poll`, since a timeout of the socket would hold for its duplicate in an MPI library, too.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        if not poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
            raise TimeoutError
        piece = os.read(descriptor, _LONGEST)
        if not piece or len(data) > _LONGEST:
            return ""
        data += piece
    return data[:-1].decode(errors="replace")


def _peer_user(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _list(ranks: set[int]) -> str:
    shown = sorted(ranks)[:8]
    return ", ".join(map(str, shown)) + (", ..." if len(ranks) > len(shown) else "")


def open_connection(inherited: str) -> int:
    """Returns a duplicate of the descriptor in PMI_FD, which MPI closes, on which "init" has been sent.

    Call it once per process: Slurm treats a second "init" as an error (MPICH's Hydra does not).
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
    """Tells the launcher that this process may end. Otherwise it takes that for a crash of the job."""
    try:
        _ask(connection, "cmd=finalize", time.monotonic() + _PATIENCE_S)
    except (CommunicationError, OSError):
        return  # the MPI library has sent it already, or the launcher has ended


def _ask(connection: int, command: str, give_up_at: float) -> dict[str, str]:
    try:
        os.write(connection, f"{command}\n".encode())
        answer = _read_line(connection, give_up_at)
    except TimeoutError:
        raise CommunicationError(
            "hvd.init() failed: another rank did not call it in time (the launcher's PMI barrier has not ended): look "
            "at the output of the other ranks"
        ) from None
    except OSError as error:
        raise CommunicationError(f"the launcher does not answer on PMI_FD={connection}: {error}") from error
    if not answer:
        raise CommunicationError(f"the launcher closed PMI_FD={connection} or sent an invalid answer")
    # Only the last value may contain spaces: it is a message, which is not used here.
    fields = dict(part.partition("=")[::2] for part in answer.split())
    if "cmd" not in fields or fields.get("rc", "0") != "0":
        raise CommunicationError(f"the launcher answered {answer!r} to {command!r} on PMI_FD={connection}")
    return fields


# Of pmix_common.h.
_SUCCESS = 0
_STRING = 3
_GLOBAL = 3


class _Process(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    # The second field is a union of up to three words; only its string is used here.
    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("_rest", ctypes.c_void_p * 3))


def exchange_by_pmix(environ: Mapping[str, str], key: str, value: str | None, timeout_s: float) -> str:
    """Broadcasts rank 0's ``value``; the other ranks pass None. Every rank must call it, and waits for all.

    Raises a CommunicationError after ``timeout_s``, and a LaunchEnvironmentError if libpmix is not found.
    """
    library = _libpmix(environ)
    outcome: list[str | Exception] = []

    def exchange() -> None:
        try:
            outcome.append(_run_pmix(library, key.encode(), None if value is None else value.encode()))
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            outcome.append(error)

    # In a thread: if a rank does not call it, PMIx_Fence never returns and cannot be interrupted.
    thread = threading.Thread(target=exchange, daemon=True, name="hvdlite-pmix")
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise CommunicationError(
            f"hvd.init() failed: another rank did not call it within {timeout_s:g} s (PMIx_Fence has not ended): look "
            "at the output of the other ranks"
        )
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    # Only at the end of the program, and not of a forked child: after it, the launcher takes any end for a success.
    own_pid = os.getpid()
    atexit.register(lambda: os.getpid() == own_pid and library.PMIx_Finalize(None, ctypes.c_size_t(0)))
    return outcome[0]


def _run_pmix(library: ctypes.CDLL, key: bytes, value: bytes | None) -> str:
    def call(name: str, *arguments: object) -> None:
        status = getattr(library, name)(*arguments)
        if status != _SUCCESS:
            raise CommunicationError(f"{name} failed: {library.PMIx_Error_string(status).decode()} ({status})")

    nothing = ctypes.c_size_t(0)
    me = _Process()
    call("PMIx_Init", ctypes.byref(me), None, nothing)
    if value is not None:
        put = _Value(type=_STRING, string=value)
        call("PMIx_Put", ctypes.c_uint8(_GLOBAL), key, ctypes.byref(put))
        call("PMIx_Commit")
    call("PMIx_Fence", None, nothing, None, nothing)
    root = _Process(nspace=me.nspace, rank=0)
    got = ctypes.POINTER(_Value)()
    call("PMIx_Get", ctypes.byref(root), key, None, nothing, ctypes.byref(got))
    if got.contents.type != _STRING or not got.contents.string:
        raise CommunicationError(f"PMIx_Get returned no text for {key.decode()}")
    return str(got.contents.string.decode())  # these few bytes are never freed


def _libpmix(environ: Mapping[str, str]) -> ctypes.CDLL:
    for path in _places(environ):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.PMIx_Error_string.restype = ctypes.c_char_p
        return library
    raise LaunchEnvironmentError(
        "the launcher uses PMIx, and libpmix.so.2 was not found on this host: install it (Debian: libpmix2) or add its "
        "directory to LD_LIBRARY_PATH, or set MASTER_ADDR and MASTER_PORT for every rank (mpirun -x MASTER_ADDR=... "
        "-x MASTER_PORT=...), or start with hvdlite-run"
    )


def _places(environ: Mapping[str, str]) -> Iterator[str]:
    # The launcher's own library first: then client and server have the same version.
    for variable in ("PMIX_INSTALL_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX"):
        for directory in ("lib", "lib64"):
            if environ.get(variable):
                yield str(Path(environ[variable], directory, "libpmix.so.2"))
    yield "libpmix.so.2"
    found = ctypes.util.find_library("pmix")
    if found is not None:
        yield found
