"""
Reads the job's secret from HVDLITE_SECRET or HVDLITE_SECRET_FILE, or makes a random one.

The ranks sign their messages with a key made from it (`signing`). If the user gives no secret, rank 0 makes one and
sends it through the launcher's exchange (`pmi_rendezvous`) or through the store (`rank_info`).
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import LaunchEnvironmentError

SECRET, SECRET_FILE = "HVDLITE_SECRET", "HVDLITE_SECRET_FILE"

_LEAST_BYTES = 16
_MOST_BYTES = 65536
_HOW = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"


def given_secret(environ: Mapping[str, str]) -> bytes | None:
    """Returns the secret that the user has set, or None.

    Raises a LaunchEnvironmentError if it is too short, or if its file is missing or readable by other users.
    """
    text, path = environ.get(SECRET, ""), environ.get(SECRET_FILE, "")
    if text and path:
        raise LaunchEnvironmentError(f"both {SECRET} and {SECRET_FILE} are set: set only one of them")
    if path:
        return _checked(_read(Path(path)), f"the file {path} of {SECRET_FILE}")
    return _checked(text.encode(errors="surrogateescape"), SECRET) if text else None


def new_secret() -> str:
    """Returns a random secret, as hexadecimal digits, which every launcher's exchange can transport."""
    return secrets.token_hex(32)


def _read(path: Path) -> bytes:
    try:
        # Non-blocking: opening a pipe without a writer would hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise LaunchEnvironmentError(f"{SECRET_FILE}={path} is not a regular file: {_HOW} > {path}")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise LaunchEnvironmentError(f"{SECRET_FILE}={path} can be read by other users: chmod 600 {path}")
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise LaunchEnvironmentError(
            f"{SECRET_FILE}={path} cannot be read on this host: {error.strerror}. It must be there on every host, with "
            f"the same content; {_HOW} > {path}"
        ) from error


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST_BYTES:
        raise LaunchEnvironmentError(f"{where} has {len(secret)} bytes, and needs at least {_LEAST_BYTES}: {_HOW}")
    return secret
