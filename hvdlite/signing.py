"""
Signs messages between ranks with HMAC-SHA256, by a key that only the ranks of a job have.

    sender: tag = signer.sign(parts) ── message and tag ── receiver: signer.is_signed(tag, parts)

``parts`` are the message and all that gives it its meaning, such as the sender's rank. The key is made from the secret
of `rendezvous.rank_info`, which signs what ranks exchange in the store. `comm.gloo` authenticates gloo's connections,
`comm.group` signs objects, and `control` signs control messages.
"""

from __future__ import annotations

import hashlib
import hmac

TAG_BYTES = 32

_LENGTH_BYTES = 8


class Signer:
    """Signs messages with a key, and checks signatures made with the same key."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Takes the key: secret bytes of any length, equal on all ranks of the job."""
        self._key = key

    def sign(self, *parts: bytes | str | int) -> bytes:
        """Returns the signature of these parts in this order, of `TAG_BYTES` bytes.

        The types and lengths of the parts are signed too, so that no other parts give the same bytes.
        """
        return hmac.digest(self._key, b"".join(map(_encoded, parts)), "sha256")

    def is_signed(self, tag: bytes, *parts: bytes | str | int) -> bool:
        """Whether ``tag`` is the signature of these parts; compares in constant time."""
        return hmac.compare_digest(tag, self.sign(*parts))

    def is_signed_hex(self, tag: str, *parts: bytes | str | int) -> bool:
        """Does what `is_signed` does, for a signature in hexadecimal digits."""
        return hmac.compare_digest(tag.encode(), self.sign(*parts).hex().encode())

    def derive(self, *parts: bytes | str | int) -> Signer:
        """Returns a signer with another key, computed from this one's key and the parts."""
        return Signer(self.sign("derive", *parts))

    def __repr__(self) -> str:
        return "<Signer>"

    def __reduce__(self) -> str:
        raise TypeError("a Signer holds the job's key and cannot be pickled")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Returns the SHA-256 of long data; callers sign this instead of the data."""
    return hashlib.sha256(data).digest()


def _encoded(part: bytes | str | int) -> bytes:
    if isinstance(part, int):
        kind, data = b"i", b"%d" % part
    elif isinstance(part, str):
        kind, data = b"s", part.encode()
    else:
        kind, data = b"b", part
    return kind + len(data).to_bytes(_LENGTH_BYTES, "big") + data
