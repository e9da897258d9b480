"""A rank that sends what no rank sends, or reads nothing, is lost alone: the others go on."""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import socket
import struct

import pytest
from control_messages import sent, to_rank_0
from hvdlite_wire.codec import MessageError

from hvdlite.calls.mailbox import DOWN, UP, Mailbox, Sealer
from hvdlite.calls.messages import TO_RANK_0, StillWaiting
from hvdlite.coordinator.coordinator import Coordinator, handle_message
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.stall import StallRules
from hvdlite.coordinator.stragglers import StragglerWatch
from hvdlite.signing import Signer


class Raw:
    """Encodes whatever it is given, in place of a family of messages."""

    def encode(self, words: object) -> bytes:
        return json.dumps(words).encode()


class Ranks:
    """The ranks' ends of connections to a running coordinator."""

    def __init__(self, size: int) -> None:
        self.negotiation = Negotiation([f"node{rank}" for rank in range(size)], StallRules(60.0))
        self.coordinator = Coordinator(self.negotiation, StragglerWatch(["here"] * size, None))
        self.sockets, self.ends, self.sessions = [], [], []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            session = Signer(secrets.token_bytes(32))
            self.coordinator.add(rank, Mailbox(theirs, session, sends=DOWN, receives=UP))
            self.sockets.append(ours)
            self.sessions.append(session)
            self.ends.append(Mailbox(ours, session, sends=UP, receives=DOWN))
        for end in self.ends:
            assert self.next_word(end)[0] == "welcome"
        self.coordinator.start()

    def next_word(self, end: Mailbox) -> list:
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            assert selector.select(60), "rank 0 says nothing"
        (message,) = end.receive()
        return sent(message)

    def say(self, rank: int, words: list) -> None:
        """Sends what may be no message."""
        sealer = self.ends[rank]._sealer
        self.sockets[rank].sendall(Sealer(sealer._signer, Raw()).seal(words))


@pytest.mark.parametrize(
    "said",
    [
        ["nothing that is known"],
        ["ask", 1],
        ["ask", "one", 0, "allreduce", None, "what", [], {}, None, None],
        ["ask", 1, 0, "allreduce", None, "what", [0, 1], {}, None, None],
        ["ask", 1, 5, "allreduce", None, "what", [], {}, None, None],
        ["ask", 1, 5, "allreduce", None, "what", [0], {}, None, None],
        ["ask", 1, 5, "allreduce", None, "what", [1, 99], {}, None, None],
        ["ask", 1, 5, "allreduce", None, "what", [1, {}], {}, None, None],
        ["busy", [["what"]], True, {}],
        ["busy", [["what", 0.0, False, None]] * 100, True, {}],
        ["busy", [["what", 0.0, False, ["all", 1, [9]]]], True, {}],
        ["busy", [], True, {"all": "many"}],
        ["wait", 1, {"all": "many"}],
        ["alive", []],
        ["join", "all"],
    ],
)
def test_a_rank_that_says_what_none_says_counts_as_gone_and_the_others_go_on(said, caplog):
    ranks = Ranks(3)
    ranks.say(1, said)
    for own in (0, 2):
        assert ranks.next_word(ranks.ends[own]) == ["left", 1, False]
        ranks.ends[own].send(to_rank_0("ask", 9, 4, "allreduce", "a", "a", [0, 2], {}, None, None))
    for own in (0, 2):
        assert ranks.next_word(ranks.ends[own]) == ["go", 9, [None, None], 2]
    ranks.coordinator.close()
    assert "rank 0 closes its connection to rank 1" in caplog.text


def test_asking_twice_under_one_number_is_what_no_rank_does():
    negotiation = Negotiation(["a", "b"], StallRules())
    ask = to_rank_0("ask", 1, 0, "allreduce", "x", "x", [], {}, None, None)
    handle_message(negotiation, 1, ask, 0.0)
    with pytest.raises(MessageError, match="number 1 twice"):
        handle_message(negotiation, 1, ask, 0.0)


@pytest.mark.parametrize(
    "data",
    [
        b"garbage" * 100,
        struct.pack(">I16s", 0xFFFFFFFF, b""),
        json.dumps(["bye"]).encode() * 10,
    ],
)
def test_bytes_that_are_no_frame_end_their_own_connection_alone(data):
    ranks = Ranks(2)
    ranks.sockets[1].sendall(data)
    assert ranks.next_word(ranks.ends[0]) == ["left", 1, False]
    ranks.ends[0].send(StillWaiting(0))
    assert ranks.next_word(ranks.ends[0]) == ["alive", []]
    ranks.coordinator.close()


def test_a_frame_that_is_sent_again_ends_the_connection():
    ranks = Ranks(2)
    frame = Sealer(ranks.sessions[1].derive("to rank 0"), TO_RANK_0).seal(StillWaiting(0))
    ranks.sockets[1].sendall(frame)
    assert ranks.next_word(ranks.ends[1]) == ["alive", []]
    ranks.sockets[1].sendall(frame)
    assert ranks.next_word(ranks.ends[0]) == ["left", 1, False]
    ranks.coordinator.close()


def test_a_rank_that_reads_nothing_holds_up_no_other():
    ranks = Ranks(3)
    # To rank 1, which does not read: more than any socket buffers.
    own = "x" * 500_000
    for ticket in range(40):
        for rank in (1, 2):
            ranks.ends[rank].send(to_rank_0("ask", ticket, 7, "look", str(ticket), "look", [1, 2], {}, own, None))
            while ranks.ends[rank].has_outgoing:
                ranks.ends[rank].flush()
        got: list = []
        while not got:
            got = ranks.ends[2].receive()
        assert [message.ticket for message in got] == [ticket]
    got = []
    while len(got) < 40:
        got += [message.ticket for message in ranks.ends[1].receive()]
    assert got == list(range(40))
    ranks.coordinator.close()


@pytest.fixture(autouse=True)
def _log_is_seen(caplog):
    with caplog.at_level(logging.WARNING, "hvdlite"):
        yield
