"""
`Mailbox`: one end of the connection over which a rank and rank 0 send each other short messages; and its handshake.

    rank ──  magic, rank, the rank's nonce           ──► rank 0
         ◄──  rank 0's nonce, signature for "rank 0"  ──
         ──  signature for "rank"                    ──►
    send (any thread) ── Sealer ── into the socket ── what does not fit is buffered ── flush, when the socket has room
    receive ── Opener ── messages, or a FrameError                   a frame: length, tag, JSON

Nothing here waits for the other end, even if it stops reading. Each step of the handshake has a fixed size. A signature
is an HMAC with the job's key over the role in quotes, the rank and both nonces. So one that was overheard, taken from
another connection, or sent by rank 0 itself is not valid. Then both ends derive the connection's key, with which a
frame's tag is computed from the direction, the number of earlier frames and the JSON. So a frame that is forged,
changed, dropped, replayed or sent back to its sender is rejected.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hvdlite_wire.codec import Family

from .. import forks
from ..signing import TAG_BYTES, Signer
from .messages import FROM_RANK_0, TO_RANK_0, FromRank0, ToRank0

_NONCE_BYTES = 16
_MAGIC = b"hvdlite\x02"
_HELLO = struct.Struct(f">{len(_MAGIC)}sI{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f">{_NONCE_BYTES}s{TAG_BYTES}s")

HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_BYTES = TAG_BYTES


class HandshakeClient:
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
        if not self._signer.is_signed(proof, "control", "rank", *self._said):
            raise ValueError(f"it claims to be rank {self.rank} and does not know the job's key")
        return self._signer.derive("control", *self._said)


MAX_BYTES = 256 << 20
"""Most bytes of one message's JSON. Longer messages are refused by the sender and by the receiver."""

# hvdlite's messages nest only a few levels deep. Rank 0 could read a deeper one and not send it on to the others.
_MAX_DEPTH = 64

_TAG_BYTES = 16
_HEADER = struct.Struct(f">I{_TAG_BYTES}s")

# While many frames are read at once, the bytes already read are deleted in steps of this size.
_CUT_BYTES = 1 << 20

_READ_BYTES = 1 << 18
_WRITE_BYTES = 1 << 18

Message = TypeVar("Message")
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FrameError(ValueError):
    """A frame is not valid: its length, its tag or its message is wrong."""


@dataclass(eq=False)
class Sealer(Generic[Message]):
    """Makes the frames of one direction of a connection, ``count`` of them so far."""

    _signer: Signer
    _family: Family[Message]
    count: int = 0

    def seal(self, message: Message) -> bytes:
        """Returns the next frame. Raises a ValueError if the message is too long; the connection stays usable."""
        data = self._family.encode(message)
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than the limit of {MAX_BYTES}")
        tag = self._signer.sign(self.count, data)[:_TAG_BYTES]
        self.count += 1
        return _HEADER.pack(len(data), tag) + data


@dataclass(eq=False)
class Opener(Generic[Message]):
    """Reads the frames of one direction of a connection."""

    _signer: Signer
    _family: Family[Message]
    _count: int = 0
    _received: bytearray = field(default_factory=bytearray)

    def open(self, data: bytes) -> list[Message]:
        """Returns the messages completed by these bytes. After a FrameError nothing more can be read."""
        received = self._received
        received += data
        messages = []
        start = 0
        while len(received) - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(received, start)
            if length > MAX_BYTES:
                raise FrameError(f"it announces a message of {length} bytes, more than the limit of {MAX_BYTES}")
            end = start + _HEADER.size + length
            if len(received) < end:
                break
            messages.append(self._open(bytes(received[start + _HEADER.size : end]), tag))
            start = end
            if start > _CUT_BYTES:
                del received[:start]
                start = 0
        del received[:start]
        return messages

    def _open(self, data: bytes, tag: bytes) -> Message:
        expected = self._signer.sign(self._count, data)[:_TAG_BYTES]
        if not hmac.compare_digest(tag, expected):
            raise FrameError("a message is not signed with the connection's key, or is out of order")
        self._count += 1
        try:
            # This quick count includes brackets in strings; only if it is too high is the real depth measured.
            is_deeper = data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deeper(json.loads(data), _MAX_DEPTH)
            message = self._family.decode(data)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a message is malformed: {error}") from error
        if is_deeper:
            raise FrameError(f"a message nests deeper than {_MAX_DEPTH} levels")
        return message


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts nest deeper than this many levels; recurses no deeper than that."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in value if isinstance(each, (list, dict)))


@dataclass(frozen=True, slots=True)
class Direction(Generic[Message]):
    """A direction of a connection: its name, which is signed too, and the messages that go there."""

    name: str
    family: Family[Message]


UP = Direction("to rank 0", TO_RANK_0)
DOWN = Direction("from rank 0", FROM_RANK_0)


class Mailbox(Generic[Sent, Received]):
    """One end of a connection. Any thread may send; one thread receives, and flushes when the socket has room again."""

    def __init__(
        self, connection: socket.socket, session: Signer, *, sends: Direction[Sent], receives: Direction[Received]
    ) -> None:
        """``session`` is the connection's signer, the same at both ends."""
        connection.setblocking(False)
        self._connection = connection
        self._sealer = Sealer(session.derive(sends.name), sends.family)
        self._opener = Opener(session.derive(receives.name), receives.family)
        # Called on the sending thread when there is data to flush and there was none before.
        self.wake: Callable[[], None] = lambda: None
        self._sending = threading.Lock()
        # Data that the socket had no room for.
        self._outgoing = bytearray()
        self._is_broken = False
        forks.when_forked(self)

    def send(self, message: Sent) -> None:
        """Sends a message. Never blocks, and never fails because the other end is closed: `receive` reports that."""
        self.send_all([message])

    def send_all(self, messages: Iterable[Sent]) -> None:
        """Sends several messages, as `send` does. Raises a ValueError before any is sent if one is too long."""
        with self._sending:
            # Under the lock, since frames are counted in the order in which they are sent.
            count = self._sealer.count
            try:
                data = b"".join([self._sealer.seal(message) for message in messages])
            except ValueError:
                # Those before it are not sent either.
                self._sealer.count = count
                raise
            if self._is_broken:
                return
            had_to_wait = bool(self._outgoing)
            sent = 0 if had_to_wait else self._push(data)
            if sent == len(data):
                return
            self._outgoing += memoryview(data)[sent:]
        if not had_to_wait:
            self.wake()

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
        """Sends as much as the socket has room for now."""
        with self._sending:
            while self._outgoing:
                sent = self._push(self._outgoing[:_WRITE_BYTES])
                if self._is_broken:
                    self._outgoing.clear()
                elif sent == 0:
                    return
                else:
                    del self._outgoing[:sent]

    def _push(self, data: bytes | bytearray) -> int:
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # Not raised here: `receive` must still read what the other end sent, and then its end.
            self._is_broken = True
            return len(data)

    def receive(self) -> list[Received]:
        """Returns the messages that have arrived completely by now.

        Raises EOFError if the other end is closed, OSError if this end is, and FrameError if the data is not the other
        end's.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise EOFError("the other end has closed the connection")
        return self._opener.open(data)

    def fileno(self) -> int:
        return self._connection.fileno()

    def end_sending(self) -> None:
        """Makes the other end's `receive` raise EOFError; this end can still receive."""
        self._connection.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Makes `receive` raise EOFError at both ends."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    # A forked child's copy would keep the connection alive after the parent's end, of which the other end must hear.
    leave_to_parent = close


def mailbox_pair(session: Signer) -> tuple[Mailbox[ToRank0, FromRank0], Mailbox[FromRank0, ToRank0]]:
    """Returns two connected ends within this process: a rank's, and rank 0's."""
    own_end, other_end = socket.socketpair()
    return Mailbox(own_end, session, sends=UP, receives=DOWN), Mailbox(other_end, session, sends=DOWN, receives=UP)
