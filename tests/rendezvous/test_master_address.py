"""The errors of ranks that cannot connect at MASTER_ADDR and MASTER_PORT name the cause first, and then the way out."""

import socket
import threading
import weakref
from datetime import timedelta

import pytest

from hvdlite.errors import CommunicationError
from hvdlite.rendezvous import master_address
from hvdlite.rendezvous.process_state import ProcessState

HOST = socket.gethostname()


def refused(rank, monkeypatch, address="127.0.0.1", port="29500", words=None):
    """Returns the error of this rank; if ``words`` are given, PyTorch's error has them, and no network is used."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    if words is not None:

        def fails(*_, **__):
            raise RuntimeError(f"{words}\nException raised from somewhere")

        monkeypatch.setattr(master_address, "rendezvous", fails)
    with pytest.raises(CommunicationError) as caught:
        master_address.store_at_given_address(ProcessState(), rank, 2, address, port, timedelta(seconds=5))
    return str(caught.value)


def test_a_port_that_another_process_has_is_said_first(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(0, monkeypatch, port=port)
    assert said.startswith(
        f"hvd.init() failed on rank 0 ({HOST}): port {port} on {HOST} is taken by another process (address already in "
        "use): set MASTER_PORT to a free port, the same for every rank. ("
    )


def test_a_name_that_is_unknown_is_said_first(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = refused(1, monkeypatch, address="no{such}host", words="The client socket has timed out")
    assert said == (
        f"hvd.init() failed on rank 1 ({HOST}): MASTER_ADDR='no{{such}}host' cannot be resolved on {HOST} (Name or "
        "service not known): set it to a name or an address of rank 0's host, for every rank. (The client socket has "
        "timed out)"
    )


@pytest.mark.parametrize(
    ("rank", "address", "why"),
    [
        (0, "192.0.2.7", f"MASTER_ADDR='192.0.2.7' is not an address of {HOST}, where rank 0 runs"),
        (0, "127.0.0.1", "not all of the 2 ranks connected to MASTER_ADDR='127.0.0.1', MASTER_PORT=29500 within 5 s"),
        (1, "192.0.2.7", "rank 0 was not found at MASTER_ADDR='192.0.2.7', MASTER_PORT=29500 within 5 s"),
    ],
)
def test_an_address_where_rank_0_is_not_is_said_first(monkeypatch, rank, address, why):
    said = refused(rank, monkeypatch, address=address, words="connection refused")
    assert said.startswith(f"hvd.init() failed on rank {rank} ({HOST}): {why}")
    assert said.endswith("(connection refused)")


def test_a_stranger_at_the_port_who_never_answers_is_told_of_and_not_waited_for_beyond_the_timeout(monkeypatch, caplog):
    monkeypatch.setattr(master_address, "_SLACK_S", 0.0)
    monkeypatch.setattr(master_address, "_WARN_AFTER_S", 0.05)
    over = threading.Event()

    def never(*_, **__):
        over.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr(master_address, "rendezvous", never)
    with pytest.raises(CommunicationError) as caught:
        master_address.store_at_given_address(ProcessState(), 1, 2, "127.0.0.1", "29500", timedelta(seconds=0.1))
    over.set()
    assert "rank 0 was not found at MASTER_ADDR='127.0.0.1', MASTER_PORT=29500 within 0.1 s" in str(caught.value)
    assert str(caught.value).endswith("(the program that listens there has not answered)")
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

    monkeypatch.setattr(master_address, "rendezvous", lambda _, rank, size, **__: iter([(Store(f"{rank} of {size}"),)]))

    def meet(rank, size, port, timeout_s=60):
        timeout = timedelta(seconds=timeout_s)
        name = master_address.store_at_given_address(process, rank, size, "127.0.0.1", port, timeout).name
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
