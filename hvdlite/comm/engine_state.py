"""
The state of an engine: open, quiesced (nothing more may begin), or revoked (waits end, too).

    quiesce(reason) ── nothing begins any more; what is under way comes to its end
    revoke(reason)  ── ... and neither does anything that is under way: each wait ends with that reason

The first reason counts, whoever comes with another later.
"""

from __future__ import annotations

import threading

from ..errors import CommunicationError


class RevokedError(CommunicationError):
    """Raised by an engine that was quiesced or revoked; the message says by whom and why."""


class EngineState:
    """Says whether operations may begin, and waits go on; engines ask it. Any thread may call all of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._revocation: str | None = None

    def require_open(self) -> None:
        """Raise a RevokedError if nothing may begin."""
        if self._refusal is not None:
            raise RevokedError(self._refusal)

    def require_not_revoked(self) -> None:
        """Raise a RevokedError if nothing is to be waited for."""
        if self._revocation is not None:
            raise RevokedError(self._revocation)

    @property
    def is_revoked(self) -> bool:
        return self._revocation is not None

    def reason_of(self, error: RuntimeError) -> RuntimeError:
        """Why an operation ended with this error: the revocation, if there was one before."""
        return error if self._revocation is None else RevokedError(self._revocation)

    def quiesce(self, reason: str) -> None:
        """Let nothing begin any more."""
        with self._lock:
            if self._refusal is None:
                self._refusal = reason

    def revoke(self, reason: str) -> bool:
        """Let nothing begin and nothing be waited for; False if it was revoked before."""
        with self._lock:
            if self._revocation is not None:
                return False
            self._revocation = reason
            if self._refusal is None:
                self._refusal = reason
            return True
