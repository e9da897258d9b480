"""Frames: what goes in comes out, however it is cut; what is none is told at once."""

import json
import struct
from itertools import pairwise

import pytest
from hvdlite_launcher.errors import ProtocolError
from hvdlite_launcher.exchange import Answer, Ask, Drop, Dropped, Have, Want
from hvdlite_launcher.messages import (
    Beat,
    Exited,
    GaveUp,
    Greet,
    Hello,
    Input,
    InputWanted,
    Joined,
    Joining,
    Output,
    OutputTaken,
    Refused,
    SignalRanks,
    Started,
    StartJob,
)
from hvdlite_launcher.protocol import MAX_PAYLOAD_BYTES, Decoder, encode
from hypothesis import given
from hypothesis import strategies as st

RANKS = st.integers(0, 2**32 - 1)
NUMBERS = st.integers(-(2**31), 2**31)
# Arguments and variables are bytes on Unix: those that are no UTF-8 are lone surrogates in a str.
WORDS = st.binary(max_size=20).map(lambda word: word.replace(b"\0", b"").decode(errors="surrogateescape"))
ENVIRONMENTS = st.dictionaries(WORDS, WORDS, max_size=4)
MESSAGES = st.one_of(
    st.builds(Output, RANKS, st.sampled_from(["stdout", "stderr"]), st.binary()),
    st.builds(Input, RANKS, st.binary()),
    st.builds(InputWanted, RANKS),
    st.builds(Started, RANKS, NUMBERS),
    st.builds(Joining, RANKS),
    st.builds(Joined, RANKS),
    st.builds(GaveUp, RANKS),
    st.one_of(st.builds(of, st.binary()) for of in (Want, Drop, Dropped)),
    st.builds(Have, st.binary(), st.binary()),
    st.one_of(st.builds(of, RANKS, st.integers(0, 255), st.binary()) for of in (Ask, Answer)),
    st.builds(Exited, RANKS, NUMBERS, st.booleans()),
    st.builds(Refused, WORDS, NUMBERS),
    st.builds(Hello, WORDS, st.none() | NUMBERS, st.none() | WORDS, NUMBERS, st.none() | WORDS),
    st.just(Beat()),
    st.builds(OutputTaken, NUMBERS),
    st.builds(Greet, WORDS, st.booleans(), st.booleans(), st.none() | WORDS),
    st.builds(SignalRanks, st.lists(RANKS).map(tuple), NUMBERS),
    st.builds(
        StartJob,
        WORDS,
        st.lists(WORDS, min_size=1).map(tuple),
        WORDS,
        ENVIRONMENTS,
        st.booleans(),
        st.lists(WORDS).map(tuple),
        st.booleans(),
        st.booleans(),
        st.dictionaries(RANKS, ENVIRONMENTS, max_size=3),
    ),
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 400)))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(messages, cuts):
    wire = b"".join(map(encode, messages))
    decoder = Decoder()
    ends = sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})
    assert [m for a, b in pairwise(ends) for m in decoder.feed(wire[a:b])] == messages


@given(st.binary())
def test_any_bytes_are_messages_or_the_begin_of_one_or_an_error(garbage):
    try:
        list(Decoder().feed(garbage))
    except ProtocolError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either outcome is right


FIELDS = st.sampled_from(
    ["rank", "pid", "returncode", "peer_lost", "left", "ranks", "signum", "token", "command", "workers"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
)


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BII", kind, 0, len(payload)) + payload


@given(st.sampled_from([*range(3, 11), 14, 16, 17, 19]), JSON)
def test_any_json_in_a_frame_is_one_message_or_an_error(kind, value):
    try:
        messages = list(Decoder().feed(_frame(kind, json.dumps(value).encode())))
    except ProtocolError:
        return
    assert len(messages) == 1


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 100_000, b"1e999999", b'{"rank": true, "pid": 1}'])
def test_a_payload_that_is_not_what_its_kind_says_is_an_error(payload):
    with pytest.raises(ProtocolError):
        list(Decoder().feed(_frame(3, payload)))


@given(st.sampled_from([11, 12, 13, 20, 21, 22]), st.integers(0, 2**32 - 1), st.binary())
def test_any_bytes_in_a_frame_of_the_store_are_one_message_or_an_error(kind, number, payload):
    try:
        messages = list(Decoder().feed(struct.pack(">BII", kind, number, len(payload)) + payload))
    except ProtocolError:
        return
    assert len(messages) == 1


@pytest.mark.parametrize("header", [(99, 0, 0), (1, 0, MAX_PAYLOAD_BYTES + 1)])
def test_a_bad_header_is_told_before_its_payload_is_waited_for(header):
    with pytest.raises(ProtocolError, match="not a frame of hvdlite's"):
        list(Decoder().feed(struct.pack(">BII", *header)))


def test_messages_before_the_garbage_still_come_out():
    messages = Decoder().feed(encode(Started(0, 1)) + b"Welcome to this host!\n")
    assert next(messages) == Started(0, 1)
    with pytest.raises(ProtocolError):
        next(messages)
