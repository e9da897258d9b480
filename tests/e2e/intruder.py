"""An attacker on a machine or its network that is no rank of the job and knows only its open ports.

It runs as a separate program, in a machine's network and under an unprivileged user id:

    python -IS intruder.py UID

It reads orders from stdin as lines of JSON: {"attack", "family", "address", "port", ...}. A thread carries out each
order and prints {"begun", "connected"} when it has sent everything. When stdin is closed, the program prints a line
{"attack", "connected", "heard", ...} for each attack.

`Intruder` starts the program, sends it orders, and ends it. Every attack is limited in number and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

HOLD_S = 20.0  # how long an attack keeps its connections open
SEQUENCES = range(64)
FLOOD = 1300
BRACKETS = 60_000

# Gloo's protocol over TCP (gloo/transport/tcp/pair.h): eight bytes with the number of the pair that the connection is
# for, then frames, each with a header of six 8-byte words.
_PAIR = struct.Struct("<q")
_FRAME = struct.Struct("<6Q")  # total bytes, opcode, slot, offset, length, offset at the receiver
_SEND_BUFFER, _SEND, _SEND_READY, _RECEIVE_READY = range(4)


class Attack:
    """One attack on a listening socket; counts the connections that were accepted and the bytes that were received."""

    def __init__(self, order: dict[str, object]) -> None:
        self.connected = self.heard = self.frames = self.given = 0
        self.order = order
        self.name = str(order["attack"])
        self.dice = random.Random(str(order.get("seed", 0)))
        self._sockets: list[socket.socket] = []
        self._is_shut_out = False
        self._ends_at_s = time.monotonic() + float(str(order.get("hold_s", HOLD_S)))

    def run(self) -> None:
        try:
            converse = getattr(self, "_" + self.name.replace("-", "_"))() or self._listen
            print(
                json.dumps({"begun": [self.order["address"], self.order["port"]], "connected": self.connected}),
                flush=True,
            )
            while self._sockets and not self._is_over():
                converse()
        finally:
            for each in self._sockets:
                each.close()

    # ----------------------------------------- attacks without gloo's protocol

    def _knock(self) -> None:
        self._open_and_send(b"")

    def _garbage(self) -> None:
        self._open_and_send(self.dice.randbytes(1 << 16))
        self._open_and_send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def _truncated(self) -> None:
        for said in (b"\0", b"\0\0\0", b"\0" * 7, _PAIR.pack(1) + b"\x30", _PAIR.pack(1) + b"\x30" + bytes(40)):
            self._open_and_send(said)
            with contextlib.suppress(OSError, IndexError):
                self._sockets[-1].shutdown(socket.SHUT_WR)

    def _lengths(self) -> None:
        for length in (0xFFFFFFFF, 0x7FFFFFFF, 1 << 30):
            self._open_and_send(struct.pack(">I", length) + b"[" * 4096)
        for length in (1 << 62, (1 << 64) - 1):
            self._open_and_send(struct.pack(">Q", length) + bytes(4096))
            self._open_and_send(struct.pack("<Q", length) + bytes(4096))

    def _nesting(self) -> None:
        for deep in (b"[" * BRACKETS, b"[" * BRACKETS + b"]" * BRACKETS, b'{"a":' * BRACKETS):
            self._open_and_send(struct.pack(">I", len(deep)) + deep)

    def _stolen_rank(self) -> None:
        for said in ([1, "x" * 32], [0, ""], [-1, None], [[1], {}], [1]):
            data = json.dumps(said).encode()
            self._open_and_send(struct.pack(">I", len(data)) + data)

    def _slow_bytes(self) -> Callable[[], None]:
        self._half_open()

        def converse() -> None:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.send(b"\0")
            time.sleep(0.5)

        return converse

    def _half_open(self) -> None:
        for _ in range(8):
            self._open_and_send(b"")

    def _flood(self) -> None:
        for _ in range(FLOOD):
            if self._connect() is None:
                return

    # ------------------------------------- attacks in the place of a gloo peer

    def _place_silence(self) -> None:
        self._take_places(b"")

    def _place_random(self) -> None:
        self._take_places(self.dice.randbytes(4096))

    def _place_truncated(self) -> None:
        """Sends a part of a frame and closes the sending side of the connection."""
        self._take_places(_FRAME.pack(_FRAME.size + 8, _SEND, 0, 0, 8, 0)[: self.dice.randrange(1, _FRAME.size)])
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def _place_frame(self) -> None:
        """Sends a frame in gloo's format with a meaningless opcode and a length that no rank expects."""
        opcode = self.dice.choice([_SEND_BUFFER, _SEND_READY, _RECEIVE_READY, 4, 1 << 40])
        self._take_places(self._frame_of(opcode) + bytes(64))

    def _place_data(self) -> None:
        """Sends a frame with data for a buffer that does not exist."""
        self._take_places(self._frame_of(_SEND) + bytes(64))

    def _frame_of(self, opcode: int) -> bytes:
        length = self.dice.choice([0, 8, 1 << 31, 1 << 40, 1 << 62])
        slot = self.dice.choice([0, self.dice.getrandbits(64)])
        return _FRAME.pack(self.dice.choice([0, length, _FRAME.size + length]), opcode, slot, 0, length, 0)

    def _place_replay(self) -> None:
        """Sends the complete streams that real ranks sent in an earlier job."""
        for recorded in self.order.get("recorded", []):  # type: ignore[attr-defined]  # JSON
            said = bytes.fromhex(recorded)
            (pair,) = _PAIR.unpack_from(said)
            self._take_places(said[_PAIR.size :], sorted({pair, *range(8)}))

    def _place_pickle(self) -> Callable[[], None]:
        """Follows the protocol as a rank would, and sends a pickle that runs a command when it is loaded."""
        said = pickle.dumps(Touch(str(self.order["marker"])))
        self._take_places(b"")
        received = {each: bytearray() for each in self._sockets}

        def converse() -> None:
            ready, _, _ = select.select(self._sockets, [], [], 0.2)
            for each in ready:
                received[each] += self._heard_of(each)
                with contextlib.suppress(OSError):
                    for answer in self._answers(received[each], said):
                        each.sendall(answer)

        return converse

    def _answers(self, received: bytearray, said: bytes) -> Iterator[bytes]:
        """Yields the frames that the peer waits for, with the pickle as data; removes read frames from ``received``."""
        while len(received) >= _FRAME.size:
            whole, opcode, slot, _, length, _ = _FRAME.unpack_from(received)
            if len(received) < whole or whole < _FRAME.size:
                return
            del received[:whole]
            self.frames += 1
            if opcode == _SEND_READY:
                yield _FRAME.pack(_FRAME.size, _RECEIVE_READY, slot, 0, length, 0)
            elif opcode == _RECEIVE_READY:
                # The peer first receives eight bytes, the length, and then the data; each may be requested in halves.
                whole_answer = len(said).to_bytes(8, "little") if length in (4, 8) else said
                data = whole_answer[self.given : self.given + length].ljust(length, b"\0")
                self.given = self.given + length if self.given + length < len(whole_answer) else 0
                yield _FRAME.pack(_FRAME.size + length, _SEND, slot, 0, length, 0) + data

    def _take_places(self, said: bytes, sequences: range | list[int] = SEQUENCES) -> None:
        for pair in sequences:
            self._open_and_send(_PAIR.pack(pair) + said)

    # ------------------------------------------------------------- connections

    def _connect(self) -> socket.socket | None:
        # Once a connection has failed, further ones would fail too, and each attempt takes time.
        if self._is_shut_out:
            return None
        family = {"unix": socket.AF_UNIX, "tcp6": socket.AF_INET6}.get(str(self.order["family"]), socket.AF_INET)
        made = socket.socket(family)
        made.settimeout(float(str(self.order.get("connect_s", 3))))
        try:
            if family == socket.AF_UNIX:
                made.connect(self.order["address"])
            else:
                _bind_away(made)
                made.connect((self.order["address"], self.order["port"]))
        except OSError:
            made.close()
            self._is_shut_out = True
            return None
        self.connected += 1
        self._sockets.append(made)
        return made

    def _open_and_send(self, said: bytes) -> None:
        made = self._connect()
        if made is not None:
            made.settimeout(1)
            with contextlib.suppress(OSError):
                made.sendall(said)

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at_s

    def _listen(self) -> None:
        poll = select.poll()
        by_number = {each.fileno(): each for each in self._sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(200):
            self._heard_of(by_number[number])

    def _heard_of(self, connection: socket.socket) -> bytes:
        """Reads from a connection and returns the data; closes the connection at its end."""
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(1 << 16)
        self.heard += len(data)
        if not data:
            self._sockets.remove(connection)
            connection.close()
        return data


def _bind_away(connection: socket.socket) -> None:
    """Binds to a local port outside the ephemeral range, so that the job's ranks do not run out of ephemeral ports."""
    for port in random.sample(range(20_000, 32_000), 1000):
        with contextlib.suppress(OSError):
            connection.bind(("", port))
            return


class Touch:
    """An object whose pickle creates a file when it is loaded; tests check that no rank loads it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self._path}'",)


# There are two more: "knock" connects and sends nothing, and "place-replay" needs recorded streams.
ATTACKS = (
    "garbage",
    "truncated",
    "lengths",
    "nesting",
    "stolen-rank",
    "slow-bytes",
    "half-open",
    "flood",
    "place-silence",
    "place-random",
    "place-truncated",
    "place-frame",
    "place-data",
    "place-pickle",
)


class Intruder:
    """The running program; ``inside`` is the command prefix of the machine it runs on (`Machine.inside`)."""

    def __init__(self, inside: list[str], uid: int) -> None:
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-IS", __file__, str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._sending = threading.Lock()
        self.orders = self.begun = 0
        self.let_in: dict[tuple[str, int], int] = {}
        """The number of connections made so far to an address and a port."""
        self.results: list[dict[str, Any]] = []
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the intruder could not be started"
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def attack(self, name: str, family: str, address: str, port: int, **more: object) -> None:
        """Sends an order; does not wait for the attack."""
        order = {"attack": name, "family": family, "address": address, "port": port, **more}
        assert self._process.stdin is not None
        with self._sending:
            self.orders += 1
            self._process.stdin.write(json.dumps(order) + "\n")

    def has_begun(self) -> bool:
        """Whether every attack ordered so far has sent all its data, on the connections that were accepted."""
        return self.begun == self.orders

    def close(self) -> list[dict[str, Any]]:
        """Ends all attacks and returns a result for each."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(100)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        return self.results

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            told = json.loads(line)
            if "begun" in told:
                self.let_in[tuple(told["begun"])] = told["connected"]
                self.begun += 1
            else:
                self.results.append(told)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    uid = int(sys.argv[1])
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    print("ready", flush=True)
    attacks = []
    for line in sys.stdin:
        attack = Attack(json.loads(line))
        attacks.append(attack)
        threading.Thread(target=attack.run, daemon=True).start()
    for attack in attacks:
        print(
            json.dumps(
                {
                    "attack": attack.name,
                    "family": attack.order["family"],
                    "connected": attack.connected,
                    "heard": attack.heard,
                    "frames": attack.frames,
                }
            ),
            flush=True,
        )
    os._exit(0)


if __name__ == "__main__":
    _main()
