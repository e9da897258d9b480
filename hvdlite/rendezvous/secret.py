"""
Gets the job's secret: given to all ranks by the user, or made by rank 0 and told where only the others can hear it.

    HVDLITE_SECRET, HVDLITE_SECRET_FILE ── else a random one of rank 0's: by the launcher's own exchange, or the store
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
    """The secret that the user has given, or None. A LaunchEnvironmentError where it protects nothing."""
    text, path = environ.get(SECRET, ""), environ.get(SECRET_FILE, "")
    if text and path:
        raise LaunchEnvironmentError(f"both {SECRET} and {SECRET_FILE} are set: set one of them")
    if path:
        return _checked(_read(Path(path)), f"the file {path} of {SECRET_FILE}")
    return _checked(text.encode(errors="surrogateescape"), SECRET) if text else None


def new_secret() -> str:
    """A random secret, as text that any launcher can carry."""
    return secrets.token_hex(32)


def _read(path: Path) -> bytes:
    try:
        # Not blocking: a pipe that nobody writes to is not to hold up the job.
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
        raise LaunchEnvironmentError(f"{where} has {len(secret)} bytes, and must have {_LEAST_BYTES} at least: {_HOW}")
    return secret
