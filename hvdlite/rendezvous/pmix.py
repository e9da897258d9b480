"""
A client of PMIx, the interface between a rank and its launcher: OpenMPI's mpirun, or ``srun --mpi=pmix``.

    PMIx_Init -> rank 0: Put, Commit -> Fence (all) -> Get          at the end of the process: PMIx_Finalize

It calls libpmix through ctypes. libpmix counts its initialisations, so an MPI library in the same process can use it
at the same time. `pmi_rendezvous` calls `exchange_by_pmix`.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import CommunicationError, LaunchEnvironmentError

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
    library = _load(environ)
    outcome: list[str | Exception] = []

    def exchange() -> None:
        try:
            outcome.append(_exchange(library, key.encode(), None if value is None else value.encode()))
        except CommunicationError as error:
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
    # Only at the end of the program: once PMIx is finalised, the launcher counts any end of the process as a success.
    own_pid = os.getpid()
    # Not at the end of a forked child.
    atexit.register(lambda: os.getpid() == own_pid and library.PMIx_Finalize(None, ctypes.c_size_t(0)))
    return outcome[0]


def _exchange(library: ctypes.CDLL, key: bytes, value: bytes | None) -> str:
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


def _load(environ: Mapping[str, str]) -> ctypes.CDLL:
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
