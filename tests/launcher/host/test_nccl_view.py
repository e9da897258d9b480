"""What NCCL says of a job, from a listener that answers as its RAS service does."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hvdlite_launcher.host.nccl_view import _QUESTION, nccl_view

OWN = os.getpid()


@contextmanager
def service(tmp_path: Path, answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serves one connection on loopback; yields the pattern of environment files in which NCCL's port is that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / str(OWN)).write_bytes(b"HOME=/\0NCCL_RAS_ADDR=localhost:%d\0" % listener.getsockname()[1])

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{tmp_path}/%d"
        listener.shutdown(socket.SHUT_RDWR)  # where nobody has come
        thread.join(5)


def say(*parts: bytes) -> Callable[[socket.socket], None]:
    """Returns what answers the question in these parts."""

    def answer(connection: socket.socket) -> None:
        asked = b""
        while len(asked) < len(_QUESTION):
            asked += connection.recv(100)
        for part in parts:
            connection.sendall(part)

    return answer


def test_the_lines_of_the_process_that_listens_are_told(tmp_path):
    with service(tmp_path, say(b"OK\nNCCL ver", b"sion 2.28.9\n  Rank 0: process 17 \xff\n")) as environ:
        assert nccl_view([1, OWN], environ) == (OWN, ("NCCL version 2.28.9", "  Rank 0: process 17 \ufffd"))


def test_what_is_not_said_in_time_or_has_no_end_is_left_out(tmp_path):
    with service(tmp_path, lambda connection: [connection.recv(100) for _ in range(2)]) as environ:
        assert nccl_view([OWN], environ) is None
    with service(tmp_path, say(b"x" * 99 + b"\n", b"y" * 10_000_000)) as environ:
        found = nccl_view([OWN], environ)
    assert found is not None
    assert sum(map(len, found[1])) < 60_000


@pytest.mark.parametrize("given", [b"NCCL_RAS_ENABLE=0", b"NCCL_RAS_ADDR=localhost:1", b"NCCL_RAS_ADDR=", b""])
def test_nobody_is_asked_where_no_worker_listens(tmp_path, given):
    (tmp_path / str(OWN)).write_bytes(given)
    assert nccl_view([OWN, 2**22 + 1], f"{tmp_path}/%d") is None


def test_another_process_that_has_the_port_is_not_asked(tmp_path):
    with service(tmp_path, say(b"NCCL of another job\n")) as environ:
        (tmp_path / "1").write_bytes((tmp_path / str(OWN)).read_bytes())
        assert nccl_view([1], environ) is None
