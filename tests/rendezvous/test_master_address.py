"""The errors of ranks that cannot connect at MASTER_ADDR and MASTER_PORT say where, why, and what to look at."""

import socket
import threading
import weakref
from datetime import timedelta

import pytest

from hvdlite.errors import CommunicationError
from hvdlite.rendezvous import rank0_stores
from hvdlite.rendezvous.process_state import ProcessState

HOST = socket.gethostname()


def refused(rank, monkeypatch, address="127.0.0.1", port="29500", words=None):
    """Returns the error of this rank; if ``words`` are given, PyTorch's error has them, and no network is used."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    if words is not None:

        def fails(*_, **__):
            raise RuntimeError(f"{words}\nException raised from somewhere")

        monkeypatch.setattr(rank0_stores, "rendezvous", fails)
    with pytest.raises(CommunicationError) as caught:
        rank0_stores.store_at_given_address(ProcessState(), rank, 2, address, port, timedelta(seconds=5))
    return str(caught.value)


def test_a_port_that_another_process_has_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(0, monkeypatch, port=port)
    assert f"MASTER_PORT={port} within 5 s: " in said
    assert "address already in use" in said.lower()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_are_told_where_and_what_pytorch_says(monkeypatch, rank):
    said = refused(rank, monkeypatch, address="192.0.2.7", words="connection refused")
    assert said.startswith(
        f"hvd.init() failed on rank {rank} ({HOST}): 2 ranks did not meet at MASTER_ADDR='192.0.2.7', "
        "MASTER_PORT=29500 within 5 s: connection refused. Is that an address of rank 0's host"
    )


def test_a_stranger_at_the_port_who_never_answers_is_told_of_and_not_waited_for_beyond_the_timeout(monkeypatch, caplog):
    monkeypatch.setattr(rank0_stores, "_SLACK_S", 0.0)
    monkeypatch.setattr(rank0_stores, "_WARN_AFTER_S", 0.05)
    over = threading.Event()

    def never(*_, **__):
        over.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr(rank0_stores, "rendezvous", never)
    with pytest.raises(CommunicationError) as caught:
        rank0_stores.store_at_given_address(ProcessState(), 1, 2, "127.0.0.1", "29500", timedelta(seconds=0.1))
    over.set()
    assert "within 0.1 s: the program that listens there has not answered" in str(caught.value)
    (warned,) = caplog.messages
    assert warned.startswith(
        "rank 1 has waited 0.05 s in hvd.init() for rank 0 at MASTER_ADDR='127.0.0.1', MASTER_PORT=29500"
    )


def test_a_store_is_kept_while_the_ranks_meet_there_and_let_go_before_another_is_opened(monkeypatch):
    events, process = [], ProcessState()

    class Store:
        def __init__(self, name):
            self.name = name
            events.append(f"opens {name}")
            weakref.finalize(self, events.append, f"loses {name}")

    monkeypatch.setattr(rank0_stores, "rendezvous", lambda _, rank, size, **__: iter([(Store(f"{rank} of {size}"),)]))

    def meet(rank, size, port, timeout_s=60):
        timeout = timedelta(seconds=timeout_s)
        name = rank0_stores.store_at_given_address(process, rank, size, "127.0.0.1", port, timeout).name
        # The thread that has opened the store refers to it until it ends.
        for thread in threading.enumerate():
            if thread.name == "hvdlite-store":
                thread.join(60)
        return name

    # Rank 0 serves the store, whatever the number of ranks and the timeout.
    assert [meet(0, 2, "29500"), meet(0, 2, "29500", 61), meet(0, 3, "29500")] == ["0 of 2"] * 3
    assert meet(0, 3, "29501") == "0 of 3"
    # Other ranks connect to it; again as another rank, because another process may serve it.
    assert [meet(2, 3, "29501"), meet(2, 3, "29501", 61), meet(1, 2, "29501")] == ["2 of 3", "2 of 3", "1 of 2"]
    opened = ["0 of 2", "0 of 3", "2 of 3", "1 of 2"]
    assert events == [event for name in opened for event in (f"opens {name}", f"loses {name}")][:-1]
