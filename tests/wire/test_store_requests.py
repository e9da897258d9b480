"""Requests to the store, and the ranks that workers read there, come out as they went in, or are an error."""

from __future__ import annotations

import struct

import pytest
from hvdlite_wire.codec import MessageError
from hvdlite_wire.store_requests import (
    ANSWERS,
    MAX_REQUEST_BYTES,
    Dismissal,
    RankAssignment,
    RequestDecoder,
    StoreRequest,
    frame,
    pack,
    unpack,
)
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.binary()))
def test_byte_strings_come_out_as_they_went_in(parts):
    assert unpack(pack(parts)) == parts


@given(st.binary())
def test_any_bytes_are_byte_strings_or_an_error(garbage):
    try:
        parts = unpack(garbage)
    except MessageError:
        return
    assert pack(parts) == garbage


@given(st.lists(st.tuples(st.sampled_from(StoreRequest), st.binary(max_size=50)), max_size=3), st.integers(1, 9))
def test_one_request_after_another_comes_out_however_it_is_cut(requests, step):
    decoder = RequestDecoder()
    for request in requests:
        wire = frame(*request)
        *before, last = [decoder.feed(wire[start : start + step]) for start in range(0, len(wire), step)]
        assert before == [None] * len(before)
        assert last == request


@given(st.binary())
def test_any_bytes_are_one_request_or_its_begin_or_an_error(garbage):
    try:
        request = RequestDecoder().feed(garbage)
    except MessageError:
        return
    assert request is None or frame(*request) == garbage


@pytest.mark.parametrize("header", [(0, 0), (15, 0), (255, 5), (1, MAX_REQUEST_BYTES + 1)])
def test_a_bad_header_is_told_before_its_payload_is_waited_for(header):
    with pytest.raises(MessageError, match="invalid request"):
        RequestDecoder().feed(struct.pack(">BI", *header))


def test_a_second_request_before_the_first_is_answered_is_an_error():
    with pytest.raises(MessageError, match="invalid request"):
        RequestDecoder().feed(frame(StoreRequest.COUNT, b"") + frame(StoreRequest.COUNT, b""))


@pytest.mark.parametrize("answer", [RankAssignment(4, 1, 2, 0), Dismissal("b has been removed")])
def test_an_answer_comes_out_as_it_went_in(answer):
    assert ANSWERS.decode(ANSWERS.encode(answer)) == answer


@pytest.mark.parametrize("value", [b"", b"{}", b'["assigned",1,0,2]', b'["assigned",1,0,2,-1]', b'["dismissed",1]'])
def test_anything_else_is_an_error(value):
    with pytest.raises(MessageError):
        ANSWERS.decode(value)
