"""
`SignedCall`: the signatures by which the ranks of a group check who has sent data in a collective.

    header (length, digest, signature of both, the call and the rank) ── data ── compared with the digest
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CommunicationError
from ..signing import TAG_BYTES, Signer, digest

_LENGTH_BYTES = 8
HEADER_BYTES = _LENGTH_BYTES + 2 * TAG_BYTES


@dataclass
class SignedCall:
    """One collective of signed data. Its number differs from that of every other call of the group.

    ``rank`` is this rank of the group, and ``describe_rank`` names any.
    """

    signer: Signer
    number: int
    what: str
    rank: int
    describe_rank: Callable[[int], str]

    def header(self, data: bytes, group_rank: int) -> Tensor:
        """Returns what this rank sends before the data: length, digest, and a signature of both, the rank and the call.

        It is of shape ``(HEADER_BYTES,)`` and uint8.
        """
        length, own_digest = len(data), digest(data)
        tag = self.signer.sign(self.what, self.number, group_rank, length, own_digest)
        return tensor_of(length.to_bytes(_LENGTH_BYTES, "big") + own_digest + tag)

    def read_header(self, received: Tensor, group_rank: int) -> tuple[int, bytes]:
        """Returns the length and digest in the header of rank ``group_rank``, after checking its signature."""
        header = bytes(received.tolist())
        length = int.from_bytes(header[:_LENGTH_BYTES], "big")
        its_digest, tag = header[_LENGTH_BYTES:-TAG_BYTES], header[-TAG_BYTES:]
        if not self.signer.is_signed(tag, self.what, self.number, group_rank, length, its_digest):
            raise self._forged(group_rank)
        return length, its_digest

    def checked(self, part: Tensor, expected: bytes, group_rank: int) -> bytes:
        """Returns the data of rank ``group_rank``, after comparing their digest with that of the header."""
        # Not with numpy, which torch does not require, nor with a Python int for each byte.
        data = ctypes.string_at(part.data_ptr(), part.numel()) if part.numel() else b""
        if digest(data) != expected:
            raise self._forged(group_rank)
        return data

    def _forged(self, group_rank: int) -> CommunicationError:
        return CommunicationError(
            f"{self.what} failed on {self.describe_rank(self.rank)}: the data received from "
            f"{self.describe_rank(group_rank)} are not signed with this job's key for this call: something on the "
            "network between the two has changed or replaced them"
        )


def tensor_of(data: bytes) -> Tensor:
    """Returns a copy of the bytes as a flat tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
