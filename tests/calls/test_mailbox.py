"""Frames that are no message of the other end are refused, and sending never blocks."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from hvdlite.calls.mailbox import DOWN, MAX_BYTES, UP, FrameError, Mailbox, Opener, Sealer, mailbox_pair
from hvdlite.calls.messages import (
    FROM_RANK_0,
    TO_RANK_0,
    AskLine,
    EndProcess,
    Go,
    HasFailed,
    Leaving,
    No,
    Over,
    WaitsIn,
)
from hvdlite.signing import Signer

KEY = Signer(b"the job's key")
STRANGERS_KEY = Signer(b"another key")

# -- frames


def sealed(data: bytes, count: int = 0) -> bytes:
    """Returns a frame with a valid tag over these bytes."""
    return struct.pack(">I16s", len(data), KEY.sign(count, data)[:16]) + data


def test_messages_come_as_they_were_sent_in_whatever_pieces():
    sealer, opener = Sealer(KEY, FROM_RANK_0), Opener(KEY, FROM_RANK_0)
    sent = [Go(1, [None], 2), Go(1, ["ünï", {"a": [1.5]}], 2), EndProcess("x" * 3_000_000), AskLine()]
    stream = b"".join(map(sealer.seal, sent))
    got, step = [], 70_001
    for start in range(0, len(stream), step):
        got += opener.open(stream[start : start + step])
    assert got == sent


def changed(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: changed(Sealer(KEY, TO_RANK_0).seal(Leaving())), "not signed"),
        (lambda: Sealer(STRANGERS_KEY, TO_RANK_0).seal(Leaving()), "not signed"),
        (lambda: Sealer(KEY, TO_RANK_0).seal(Leaving()) * 2, "out of order"),
        (lambda: sealed(b'["bye"]', count=1), "out of order"),
        (lambda: struct.pack(">I16s", MAX_BYTES + 1, b""), "more than"),
        (lambda: sealed(b"{"), "malformed"),
        (lambda: sealed(b"\xff\xfe"), "malformed"),
        (lambda: sealed(b"[" * 200_000), "malformed"),
        (lambda: sealed(b"[" * 100 + b"]" * 100), "malformed"),
        (
            lambda: sealed(b'["ask",1,0,"a",null,"a",[],{},' + b'{"a":' * 70 + b"1" + b"}" * 70 + b",null]"),
            "nests deeper",
        ),
        (lambda: sealed(b"{}"), "malformed"),
        (lambda: sealed(b"[]"), "malformed"),
    ],
)
def test_what_the_other_end_has_not_sent_now_is_refused(data, words):
    with pytest.raises(FrameError, match=words):
        Opener(KEY, TO_RANK_0).open(data())


def test_brackets_in_words_are_no_depth():
    message = No(1, "MismatchError", "[" * 1000)
    assert Opener(KEY, FROM_RANK_0).open(Sealer(KEY, FROM_RANK_0).seal(message)) == [message]


def test_a_message_that_is_too_long_is_refused_by_who_would_send_it_and_the_next_one_goes(monkeypatch):
    monkeypatch.setattr("hvdlite.calls.mailbox.MAX_BYTES", 100)
    sealer = Sealer(KEY, FROM_RANK_0)
    with pytest.raises(ValueError, match="108 bytes is longer than the limit of 100"):
        sealer.seal(EndProcess("x" * 98))
    assert Opener(KEY, FROM_RANK_0).open(sealer.seal(AskLine())) == [AskLine()]


def test_of_several_messages_none_goes_if_one_is_too_long_and_the_next_one_does(monkeypatch):
    monkeypatch.setattr("hvdlite.calls.mailbox.MAX_BYTES", 100)
    rank, rank_0 = mailbox_pair(KEY)
    with pytest.raises(ValueError, match="longer than the limit of 100"):
        rank_0.send_all([AskLine(), EndProcess("x" * 98)])
    rank_0.send(AskLine())
    assert rank.receive() == [AskLine()]


def test_what_a_rank_is_sent_cannot_be_sent_back_to_rank_0():
    ours, theirs = socket.socketpair()
    mailbox = Mailbox(ours, KEY, sends=DOWN, receives=UP)
    mailbox.send(AskLine())
    theirs.sendall(theirs.recv(1000))
    with pytest.raises(FrameError, match="not signed"):
        mailbox.receive()


# -- mailboxes


def test_sending_never_waits_and_everything_arrives_in_order_once_the_other_end_reads():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    woken = []
    sender = Mailbox(ours, KEY, sends=UP, receives=DOWN)
    sender.wake = lambda: woken.append(1)
    receiver = Mailbox(theirs, KEY, sends=DOWN, receives=UP)
    sent = [HasFailed("all", number, "x" * (number % 700)) for number in range(2000)]
    for message in sent:
        sender.send(message)
    assert sender.has_outgoing
    assert woken == [1]
    got = []
    while len(got) < len(sent):
        sender.flush()
        got += receiver.receive()
    assert got == sent
    assert not sender.has_outgoing


def test_threads_that_send_at_once_do_not_mix_their_messages():
    sender, receiver = mailbox_pair(KEY)
    threads = [
        threading.Thread(target=lambda own=own: [sender.send(WaitsIn(number, {"own": own})) for number in range(300)])
        for own in range(4)
    ]
    for thread in threads:
        thread.start()
    got = []
    while len(got) < 1200:
        sender.flush()
        got += receiver.receive()
    for thread in threads:
        thread.join()
    assert all([each.ticket for each in got if each.begun["own"] == own] == list(range(300)) for own in range(4))


def test_sending_to_who_is_gone_is_no_error_and_receiving_tells_after_the_last_words():
    sender, other = mailbox_pair(KEY)
    other.send(Over("words", False))
    other.close()
    sender.send(Leaving())
    assert sender.receive() == [Over("words", False)]
    with pytest.raises((EOFError, OSError)):
        sender.receive()
