"""
Authenticates a rank and rank 0 to each other: both prove that they know the job's key, before any other message.

    rank ──  magic, rank, its nonce                        ──► rank 0
         ◄──  a nonce of rank 0's, signed by "rank 0"       ──
         ──  both nonces, signed by "rank"                 ──►       session: a key of this connection's own

Everything has a fixed size. A signature holds for one pair of nonces and one role: none that was heard before, or on
another connection, or that rank 0 itself has given, proves anything. Pure, but for the nonces.
"""

from __future__ import annotations

import secrets
import struct

from ..signing import TAG_BYTES, Signer

_NONCE_BYTES = 16
_MAGIC = b"hvdlite\x02"
_HELLO = struct.Struct(f">{len(_MAGIC)}sI{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f">{_NONCE_BYTES}s{TAG_BYTES}s")

HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_BYTES = TAG_BYTES


class HandshakeClient:
    """The rank's side of one connection."""

    def __init__(self, signer: Signer, rank: int) -> None:
        self._signer = signer
        self._rank = rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.hello = _HELLO.pack(_MAGIC, rank, self._nonce)

    def prove(self, challenge: bytes) -> tuple[bytes, Signer] | None:
        """The proof to be sent, and the session's signer; None if who answers does not know the key."""
        nonce, tag = _CHALLENGE.unpack(challenge)
        said = (self._rank, self._nonce, nonce)
        if not self._signer.is_signed(tag, "control", "rank 0", *said):
            return None
        return self._signer.sign("control", "rank", *said), self._signer.derive("control", *said)


class HandshakeServer:
    """Rank 0's side of one connection."""

    def __init__(self, signer: Signer, hello: bytes) -> None:
        """A ValueError if that is no rank's hello."""
        magic, self.rank, its_nonce = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ValueError("it does not speak as hvdlite's ranks do")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._signer = signer
        self._said = (self.rank, its_nonce, nonce)
        self.challenge = _CHALLENGE.pack(nonce, signer.sign("control", "rank 0", *self._said))

    def session(self, proof: bytes) -> Signer:
        """The session's signer. A ValueError if the other end does not know the key."""
        if not self._signer.is_signed(proof, "control", "rank", *self._said):
            raise ValueError(f"it says that it is rank {self.rank} and does not know the job's key")
        return self._signer.derive("control", *self._said)
