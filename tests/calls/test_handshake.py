"""Both ends of a connection prove that they know the job's key."""

from __future__ import annotations

import pytest

from hvdlite.calls.mailbox import HandshakeClient, HandshakeServer
from hvdlite.signing import Signer

KEY = Signer(b"the job's key")
STRANGERS_KEY = Signer(b"another key")


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
