"""The connections to rank 0: intruders cost little and are not believed, and sending never blocks."""

from __future__ import annotations

import errno
import json
import logging
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from control_messages import said, sent, to_rank_0
from hvdlite_wire.errors import MessageError
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.calls.handshake import CHALLENGE_BYTES, HELLO_BYTES, HandshakeClient, HandshakeServer
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
    StillWaiting,
    WaitsIn,
)
from hvdlite.control import connect
from hvdlite.control.heartbeat import Heartbeat, Silence
from hvdlite.control.rank0_connection import LOOK_S
from hvdlite.coordinator import acceptor
from hvdlite.coordinator.acceptor import Acceptor
from hvdlite.coordinator.coordinator import Coordinator, handle_message
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.scene import BlockedThread
from hvdlite.coordinator.stall import StallRules
from hvdlite.coordinator.stragglers import StragglerWatch
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
    sender = Mailbox(ours, KEY, sends=UP, receives=DOWN, wake=lambda: woken.append(1))
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


# -- the handshake


def test_two_ends_with_one_key_come_to_one_session_and_each_connection_to_another():
    sessions = []
    for _ in range(2):
        caller = HandshakeClient(KEY, 3)
        answerer = HandshakeServer(KEY, caller.hello)
        proof, session = caller.prove(answerer.challenge)
        assert answerer.rank == 3
        assert answerer.session(proof).sign("x") == session.sign("x")
        sessions.append(session.sign("x"))
    assert sessions[0] != sessions[1]


def test_who_does_not_know_the_key_is_no_rank_and_no_rank_0():
    caller = HandshakeClient(STRANGERS_KEY, 1)
    answerer = HandshakeServer(KEY, caller.hello)
    assert caller.prove(answerer.challenge) is None
    with pytest.raises(ValueError, match="does not know the job's key"):
        answerer.session(bytes(32))


def test_a_signature_of_rank_0_or_of_another_connection_proves_nothing():
    answerer = HandshakeServer(KEY, HandshakeClient(KEY, 1).hello)
    with pytest.raises(ValueError, match="does not know"):
        answerer.session(answerer.challenge[-32:])
    overheard = HandshakeClient(KEY, 1)
    proof, _ = overheard.prove(HandshakeServer(KEY, overheard.hello).challenge)
    with pytest.raises(ValueError, match="does not know"):
        HandshakeServer(KEY, overheard.hello).session(proof)


# -- the door


class Entrance:
    """An acceptor on loopback whose selector the test handles."""

    def __init__(self, size: int = 3) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.listener.getsockname()
        self.selector = selectors.DefaultSelector()
        self.admitted: list[int] = []
        self.sessions: list[Signer] = []
        self.handled: Counter[tuple[str, int] | None] = Counter()
        """The number of events: by the visitor's address; those of the listening socket under None."""
        self.door = Acceptor(self.listener, KEY, size, self.selector, self._admit, self._is_expected)
        self._size = size

    def _admit(self, rank: int, connection: socket.socket, session: Signer) -> None:
        self.admitted.append(rank)
        self.sessions.append(session)
        connection.close()

    def _is_expected(self, rank: int) -> bool:
        return 0 < rank < self._size and rank not in self.admitted

    def serve(self, until: Callable[[], object]) -> None:
        """Handles events until the condition holds."""
        give_up_at_s = time.monotonic() + 60
        while not until():
            assert time.monotonic() < give_up_at_s
            for key, _ in self.selector.select(0.01):
                self.handled[_other_end(key.fileobj)] += 1
                key.data()
            self.door.look()

    def come(self) -> socket.socket:
        before = self.handled[None]
        visitor = socket.create_connection(self.address, 60)
        self.serve(until=lambda: self.handled[None] > before)
        return visitor

    def is_closed(self, visitor: socket.socket) -> bool:
        """Whether it is closed, once there is anything to read for the visitor."""
        self.serve(until=lambda: select.select([visitor], [], [], 0)[0])
        try:
            return visitor.recv(100) == b""
        except ConnectionError:
            return True

    def enter(self, rank: int, *, piece: int = 1000) -> None:
        visitor, caller = self.come(), HandshakeClient(KEY, rank)
        self.send(visitor, caller.hello, piece)
        challenge = visitor.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        proof, session = caller.prove(challenge)
        self.send(visitor, proof, piece)
        assert self.admitted[-1] == rank
        assert self.sessions[-1].sign("x") == session.sign("x")

    def send(self, visitor: socket.socket, data: bytes, piece: int) -> None:
        for start in range(0, len(data), piece):
            before = self.handled[visitor.getsockname()]
            visitor.sendall(data[start : start + piece])
            self.serve(until=lambda before=before: self.handled[visitor.getsockname()] > before)


def _other_end(connection: socket.socket) -> tuple[str, int] | None:
    try:
        return connection.getpeername()
    except OSError:  # it is the socket that listens
        return None


@pytest.fixture
def entrance(monkeypatch):
    # Time passes only where a test says so.
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(acceptor, "_BACK_OFF_S", 600.0)
    made = Entrance()
    yield made
    made.door.close()
    made.selector.close()


def test_a_hello_that_comes_in_pieces_is_one(entrance):
    entrance.enter(1, piece=1)
    assert entrance.admitted == [1]


def test_who_is_silent_or_talks_nonsense_holds_up_nobody(entrance, caplog):
    silent, slow = entrance.come(), entrance.come()
    slow.sendall(b"hv")
    nonsense = entrance.come()
    nonsense.sendall(secrets.token_bytes(100_000)[: HELLO_BYTES * 50])
    assert entrance.is_closed(nonsense)
    nobody = entrance.come()
    nobody.sendall(HandshakeClient(KEY, 77).hello)
    assert entrance.is_closed(nobody)
    entrance.enter(2)
    assert "does not use hvdlite's protocol" in caplog.text
    assert "rank 77, which does not exist" in caplog.text
    assert silent.fileno() != -1


def test_a_rank_cannot_be_stolen_by_who_does_not_know_the_key_nor_taken_twice(entrance):
    thief = entrance.come()
    entrance.send(thief, HandshakeClient(STRANGERS_KEY, 1).hello, 1000)
    thief.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    thief.sendall(bytes(32))
    assert entrance.is_closed(thief)
    assert entrance.admitted == []
    entrance.enter(1)
    second = entrance.come()
    second.sendall(HandshakeClient(KEY, 1).hello)
    assert entrance.is_closed(second)
    assert entrance.admitted == [1]


def test_who_proves_nothing_in_time_is_sent_away_and_others_are_not(entrance, monkeypatch, caplog):
    silent = entrance.come()
    assert 0 < entrance.door.patience_s <= acceptor.HANDSHAKE_S
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.0)
    entrance.door.look()
    assert entrance.is_closed(silent)
    assert "it did not authenticate within 0 s" in caplog.text
    assert entrance.door.patience_s is None


def test_the_oldest_goes_when_too_many_have_come_and_few_lines_tell_of_it(entrance, caplog):
    visitors = [entrance.come() for _ in range(64 + 20)]
    assert all(entrance.is_closed(visitor) for visitor in visitors[:20])
    entrance.enter(1)
    assert len([record for record in caplog.records if "that is not from a rank" in record.message]) == 5
    entrance.door.close()
    # The newest connection replaced the oldest.
    assert "rank 0 refused 21 connections in all that were not from ranks of this job" in caplog.text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_an_error_of_accept_ends_nothing_and_does_not_spin(entrance, number, monkeypatch):
    class Broken:
        def __init__(self, listener: socket.socket) -> None:
            self.calls, self._listener = 0, listener

        def accept(self) -> None:
            self.calls += 1
            # A connection of an intruder, which was dropped.
            self._listener.accept()[0].close()
            raise OSError(number, "an error of the test's")

        def fileno(self) -> int:
            return self._listener.fileno()

        def close(self) -> None:
            self._listener.close()

    listener = entrance.door._listener
    entrance.door._listener = broken = Broken(listener)
    socket.create_connection(entrance.address).close()
    entrance.serve(until=lambda: broken.calls)
    assert broken.calls == 1
    entrance.door._listener = listener
    entrance.door.look()
    if number == errno.EMFILE:
        assert 0 < entrance.door.patience_s <= 600.0
        after_s = time.monotonic() + 601
        monkeypatch.setattr(acceptor.time, "monotonic", lambda: after_s)
        entrance.door.look()
        monkeypatch.undo()
    entrance.enter(1)


# -- the coordinator


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
    reach = connect._reach

    def reach_one_that_ends(*arguments):
        mailbox, welcome, early = reach(*arguments)
        return mailbox, welcome, [*early, Over("rank 0 (node0) has ended", False)]

    monkeypatch.setattr(connect, "_reach", reach_one_that_ends)

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
        connect._reach(impostor.getsockname(), Lone(), timedelta(seconds=60))
    thread.join()
    impostor.close()


class Raw:
    """Encodes whatever it is given, in place of a family of messages."""

    def encode(self, words: object) -> bytes:
        return json.dumps(words).encode()


class Ranks:
    """The ranks' ends of connections to a running coordinator."""

    def __init__(self, size: int) -> None:
        self.negotiation = Negotiation([f"node{rank}" for rank in range(size)], StallRules())
        self.coordinator = Coordinator(
            self.negotiation, size, StallRules(60.0, None), StragglerWatch(["here"] * size, None)
        )
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


# -- the heartbeat


def looked(heartbeat: Heartbeat, now_s: float, blocked=(), **more) -> list:
    more = {"is_stuck": True, "is_waiting": bool(blocked), "over_count": 0, **more}
    return [said(message) for message in heartbeat.look(now_s, blocked, **more)]


@pytest.mark.parametrize(
    "other",
    [
        BlockedThread("bucket 1", 11.0, collective=("opt", 4, (0, 1))),  # for too short a time to be reported
        BlockedThread("allreduce of 'a'", 0.0, is_operation=True),
        BlockedThread("something", 0.0),
    ],
)
def test_a_rank_is_stuck_only_where_all_that_it_waits_for_is_told(other):
    wait = BlockedThread("bucket 0", 0.0, collective=("opt", 3, (0, 2)))
    assert looked(Heartbeat(StallRules()), 11.0, [wait], size=3)[0][1:3] == [
        [["bucket 0", 11.0, False, ["opt", 3, [0, 2]]]],
        True,
    ]
    assert looked(Heartbeat(StallRules()), 11.0, [wait, other], size=3)[0][2] is False


def test_what_a_rank_is_blocked_in_is_told_once_and_again_when_it_changes():
    heartbeat = Heartbeat(StallRules())
    begun, size = {"opt": 3}, 2
    wait = BlockedThread("bucket 0", 10.0, collective=("opt", 3, (0, 1)))
    busy = ["busy", [["bucket 0", 1.5, False, ["opt", 3, None]]], True, begun]
    assert looked(heartbeat, 10.25, [wait]) == [["alive", 0]]
    assert looked(heartbeat, 11.5, [wait], begun=begun, size=size)[0] == busy
    assert looked(heartbeat, 12.5, [wait]) == [["alive", 0]]
    # The same text, but another step.
    again = BlockedThread("bucket 0", 12.0, collective=("opt", 3, (0, 1)))
    assert looked(heartbeat, 13.5, [again], begun=begun, size=size)[0] == busy
    assert looked(heartbeat, 14.5, begun=begun) == [["busy", [], False, begun]]
    assert looked(heartbeat, 15.5) == []


def test_the_longest_waits_of_all_threads_are_told_first():
    waits = [BlockedThread(str(number), float(number)) for number in range(30, 0, -1)]
    (_, told, _, _), _ = looked(Heartbeat(StallRules()), 100.0, waits)
    assert [what for what, *_ in told] == [str(number) for number in range(1, 17)]


def test_how_many_operations_are_over_is_told_when_that_has_changed():
    heartbeat = Heartbeat(StallRules())
    assert looked(heartbeat, 1.0, over_count=7) == [["alive", 7]]
    assert looked(heartbeat, 2.0, over_count=7) == []


def test_a_rank_0_that_does_not_answer_is_told_of_and_is_the_end_when_that_is_asked_for():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    told = []
    for second in range(10):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        told.append(heartbeat.silence(float(second)))
    assert told == [None] * 5 + [Silence(5.0, is_end=False), None, None, Silence(8.0, True), Silence(9.0, True)]


def test_a_rank_0_that_answers_or_is_not_asked_is_not_silent():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    for second in range(20):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        assert heartbeat.silence(float(second)) is None
        heartbeat.heard()
    for second in range(20, 40):
        looked(heartbeat, float(second))
        assert heartbeat.silence(float(second)) is None


def test_a_rank_that_was_stopped_itself_does_not_blame_rank_0():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    looked(heartbeat, 0.0, [BlockedThread("bucket 0", 0.0)])
    looked(heartbeat, 100.0, [BlockedThread("bucket 0", 0.0)])
    assert heartbeat.silence(100.0) is None
    assert LOOK_S < 3


def test_a_rank_0_that_does_not_answer_is_told_of_also_by_a_rank_that_is_always_late():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    told = []
    for look in range(40):
        now_s = 4.0 * look
        looked(heartbeat, now_s, [BlockedThread("bucket 0", 0.0)])
        told.append(heartbeat.silence(now_s))
    # Of a time in which the rank did not look itself, no more counts than the time between two looks.
    assert [each for each in told if each is not None][:2] == [Silence(5.0, is_end=False), Silence(8.0, is_end=True)]


def test_the_stall_check_can_be_turned_off():
    heartbeat = Heartbeat(StallRules(None, None))
    for second in range(1000):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        assert heartbeat.silence(float(second)) is None


@pytest.fixture(autouse=True)
def _log_is_seen(caplog):
    with caplog.at_level(logging.WARNING, "hvdlite"):
        yield
