"""
Signatures with a key that only the ranks of a job have: HMAC-SHA256 over everything that gives a message its meaning.

    key ── Signer ── sign(parts) on one rank ── tag travels beside the message ── is_signed(tag, parts) on another

Where the key comes from is in `rendezvous.secret`. Introductions are signed in `rendezvous.rank_info`, connections
of gloo prove themselves in `comm.gloo`, objects are signed in `comm.group`, control messages in `control`.
"""

from __future__ import annotations

import hashlib
import hmac

TAG_BYTES = 32

_LENGTH_BYTES = 8


class Signer:
    """Signs messages, and checks the signatures of others who have the same key."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """``key``: secret bytes of any length, equal on all ranks of the job."""
        self._key = key

    def sign(self, *parts: bytes | str | int) -> bytes:
        """The signature of these parts in this order: `TAG_BYTES` bytes.

        Parts cannot be moved into each other: their lengths and kinds are signed too.
        """
        return hmac.digest(self._key, b"".join(map(_encoded, parts)), "sha256")

    def is_signed(self, tag: bytes, *parts: bytes | str | int) -> bool:
        """Whether ``tag`` is the signature of these parts; takes as long whatever is wrong with it."""
        return hmac.compare_digest(tag, self.sign(*parts))

    def is_signed_hex(self, tag: str, *parts: bytes | str | int) -> bool:
        """`is_signed`, of a signature in hexadecimal digits."""
        return hmac.compare_digest(tag.encode(), self.sign(*parts).hex().encode())

    def derive(self, *parts: bytes | str | int) -> Signer:
        """A signer with a key of its own that follows from this one's and the parts."""
        return Signer(self.sign("derive", *parts))

    def __repr__(self) -> str:
        return "<Signer>"

    def __reduce__(self) -> str:
        raise TypeError("a Signer holds the job's key and is not to be sent anywhere")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """What stands for long data where it is signed: its SHA-256."""
    return hashlib.sha256(data).digest()


def _encoded(part: bytes | str | int) -> bytes:
    if isinstance(part, int):
        kind, data = b"i", b"%d" % part
    elif isinstance(part, str):
        kind, data = b"s", part.encode()
    else:
        kind, data = b"b", part
    return kind + len(data).to_bytes(_LENGTH_BYTES, "big") + data
