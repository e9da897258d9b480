"""Ranks find rank 0, and are not misled by strangers."""

from __future__ import annotations

import secrets
import socket
import threading
from datetime import timedelta

import pytest
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.calls.mailbox import CHALLENGE_BYTES, HELLO_BYTES
from hvdlite.calls.messages import Over
from hvdlite.control import control_client
from hvdlite.signing import Signer

KEY = Signer(b"the job's key")


def beset(address, stop: threading.Event) -> None:
    """Connects again and again, and sends garbage or nothing, as long as the port listens."""
    while not stop.is_set() and len(held) < 500:  # each is an open file
        try:
            with socket.create_connection(address[:2], 5) as stranger:
                stranger.sendall(secrets.token_bytes(HELLO_BYTES))
                held.append(socket.create_connection(address[:2], 5))
        except OSError:
            return


held: list[socket.socket] = []


def test_ranks_find_together_while_strangers_come_all_the_time(monkeypatch):
    listen = socket.create_server
    stop = threading.Event()
    strangers: list[threading.Thread] = []

    def beset_listener(*address, **options):
        listener = listen(*address, **options)
        strangers.append(threading.Thread(target=beset, args=(listener.getsockname(), stop), daemon=True))
        strangers[0].start()
        return listener

    monkeypatch.setattr(socket, "create_server", beset_listener)
    try:
        assert run_worlds(3, hvd.allgather_object) == [[0, 1, 2]] * 3
    finally:
        stop.set()
        strangers[0].join()
        while held:
            held.pop().close()


def test_a_rank_0_that_ends_right_after_its_welcome_is_an_error_of_later_calls_and_not_of_init(monkeypatch):
    reach = control_client._reach

    def reach_one_that_ends(*arguments):
        mailbox, welcome, early = reach(*arguments)
        return mailbox, welcome, [*early, Over("rank 0 (node0) has ended", False)]

    monkeypatch.setattr(control_client, "_reach", reach_one_that_ends)

    def rank(own: int) -> str:
        if own == 0:
            return ""
        with pytest.raises(hvd.CommunicationError) as caught:
            hvd.barrier()
        assert not isinstance(caught.value, hvd.PeerLostError)
        return str(caught.value)

    assert run_worlds(2, rank)[1] == "Horovod has been shut down. barrier failed because rank 0 (node0) has ended"


def test_who_answers_in_rank_0s_place_without_the_key_is_told_from_it(monkeypatch):
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(secrets.token_bytes(CHALLENGE_BYTES))
            connection.recv(1000)
            connection.recv(1000)

    thread = threading.Thread(target=answer)
    thread.start()

    class Lone:
        rank, signer = 1, KEY

        def describe_rank(self, rank: int) -> str:
            return f"rank {rank} (node{rank})"

    with pytest.raises(
        hvd.CommunicationError, match=r"rank 1 \(node1\): the program that answers at .* does not know the job's key"
    ):
        control_client._reach(impostor.getsockname(), Lone(), timedelta(seconds=60))
    thread.join()
    impostor.close()
