"""
Authenticates a rank and rank 0 to each other over a new connection, before any other message is sent on it.

    rank ──  magic, rank, the rank's nonce           ──► rank 0
         ◄──  rank 0's nonce, signature for "rank 0"  ──
         ──  signature for "rank"                    ──►

A signature is an HMAC with the job's key over the role in quotes, the rank and both nonces. So one that was overheard,
taken from another connection, or sent by rank 0 itself is not valid. Then both ends derive the key that signs all
further messages of this connection. Each step has a fixed size. `control.connect` uses the rank's side and
`coordinator.acceptor` rank 0's; they send and receive, this module only computes.
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
        """Returns the proof to send and the session's signer; None if the other end does not know the key."""
        nonce, tag = _CHALLENGE.unpack(challenge)
        said = (self._rank, self._nonce, nonce)
        if not self._signer.is_signed(tag, "control", "rank 0", *said):
            return None
        return self._signer.sign("control", "rank", *said), self._signer.derive("control", *said)


class HandshakeServer:
    """Rank 0's side of one connection."""

    def __init__(self, signer: Signer, hello: bytes) -> None:
        """Raises a ValueError if ``hello`` is not a rank's hello."""
        magic, self.rank, its_nonce = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ValueError("it does not use hvdlite's protocol")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._signer = signer
        self._said = (self.rank, its_nonce, nonce)
        self.challenge = _CHALLENGE.pack(nonce, signer.sign("control", "rank 0", *self._said))

    def session(self, proof: bytes) -> Signer:
        """Returns the session's signer. Raises a ValueError if the other end does not know the key."""
        if not self._signer.is_signed(proof, "control", "rank", *self._said):
            raise ValueError(f"it claims to be rank {self.rank} and does not know the job's key")
        return self._signer.derive("control", *self._said)
