"""
The state of an engine: open, quiesced (it refuses new operations) or revoked (its waits fail, too).

- After ``quiesce(reason)`` the engine refuses new operations, and those in progress finish.
- After ``revoke(reason)``, which tells of a lost rank, it also ends the operations in progress: each wait raises a
  LostError.

The first reason counts, and later ones are ignored. The engines (`engine`, `torch_engine`, `hierarchy`, `shm`) keep an
`EngineState` and check it before they begin or wait.
"""

from __future__ import annotations

import threading

from ..errors import CommunicationError, PeerLostError


class RevokedError(CommunicationError):
    """Raised by an engine that was quiesced or revoked. The message says by whom and why."""


class LostError(RevokedError, PeerLostError):
    """Raised by an engine that was revoked, because a rank was lost that others may wait for."""


class EngineState:
    """One engine's state: whether operations may begin, and whether waits may go on. Every method is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._revocation: str | None = None

    def require_open(self) -> None:
        """Raise a RevokedError if the engine refuses new operations, and a LostError if it was revoked."""
        if self._refusal is not None:
            raise (RevokedError if self._revocation is None else LostError)(self._refusal)

    def require_not_revoked(self) -> None:
        """Raise a LostError if the engine was revoked."""
        if self._revocation is not None:
            raise LostError(self._revocation)

    @property
    def is_revoked(self) -> bool:
        return self._revocation is not None

    def reason_of(self, error: RuntimeError) -> RuntimeError:
        """Returns the error to raise for an operation that failed with ``error``: the revocation, if there was one."""
        return error if self._revocation is None else LostError(self._revocation)

    def quiesce(self, reason: str) -> None:
        """Refuse new operations from now on."""
        with self._lock:
            if self._refusal is None:
                self._refusal = reason

    def revoke(self, reason: str) -> bool:
        """Refuse new operations, and fail all waits; returns False if the engine was revoked before."""
        with self._lock:
            if self._revocation is not None:
                return False
            self._revocation = reason
            if self._refusal is None:
                self._refusal = reason
            return True
