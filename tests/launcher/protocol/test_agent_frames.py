"""Frames decode to the messages that were encoded, however the bytes are split; invalid frames are refused at once."""

import json
import struct
from itertools import pairwise

import pytest
from hvdlite_launcher.errors import ProtocolError
from hvdlite_launcher.protocol.channel import FROM_AGENT, FROM_LAUNCHER, MAX_PAYLOAD_BYTES, Decoder, encode
from hvdlite_launcher.protocol.messages import (
    Alive,
    AskStatus,
    Beat,
    Exited,
    Greet,
    Hello,
    InitDone,
    InitFailed,
    InitStarted,
    Input,
    InputWanted,
    Output,
    OutputTaken,
    PeakMemory,
    Refused,
    SignalWorkers,
    Started,
    StartJob,
    StartWorkers,
    StatusTold,
)
from hvdlite_launcher.protocol.store_messages import Answer, Ask, Drop, Dropped, Have, Revoke, Want
from hvdlite_wire import codec
from hvdlite_wire.worker_status import Frame, HostUsage, Process, Source, Thread, Wait, WorkerStatus
from hypothesis import given
from hypothesis import strategies as st

WORKERS = st.integers(0, 10**6)
NUMBERS = st.integers(0, 2**32 - 1)
PIDS, CODES, SIGNALS = st.integers(1, 2**31 - 1), st.integers(1, 255), st.integers(1, 64)
ADDRESSES = st.ip_addresses().map(str)
# Arguments and variables are bytes on Unix: bytes that are not UTF-8 are lone surrogates in a str.
WORDS = st.binary(max_size=20).map(lambda word: word.replace(b"\0", b"").decode(errors="surrogateescape"))
ENVIRONMENTS = st.dictionaries(WORDS.map(lambda name: name.replace("=", "")), WORDS, max_size=4)
SHOWN = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=9)
FRAMES = st.lists(st.builds(Frame, SHOWN, WORKERS, SHOWN)).map(tuple)
STATUSES = st.builds(
    WorkerStatus,
    worker=WORKERS,
    steps=st.dictionaries(SHOWN, WORKERS),
    waits=st.lists(st.builds(Wait, SHOWN, st.floats(0, 10**5))).map(tuple),
    threads=st.lists(st.builds(Thread, SHOWN, st.booleans(), FRAMES)).map(tuple),
    source=st.sampled_from(Source),
    usage=st.none() | st.builds(HostUsage, WORKERS, WORKERS, st.lists(st.floats(0, 1)).map(tuple)),
    processes=st.lists(st.builds(Process, PIDS, SHOWN, SHOWN, st.floats(0, 10**5), WORKERS, SHOWN)).map(tuple),
)
MESSAGES = st.one_of(
    st.builds(Output, WORKERS, st.sampled_from(["stdout", "stderr"]), st.binary()),
    st.builds(Input, WORKERS, st.binary()),
    st.builds(InputWanted, WORKERS),
    st.builds(Started, WORKERS, PIDS),
    st.one_of(st.builds(of, WORKERS, st.none() | WORKERS) for of in (InitStarted, InitDone, InitFailed)),
    st.builds(
        InitFailed, WORKERS, WORKERS, st.booleans(), st.lists(ADDRESSES).map(tuple), st.lists(ADDRESSES).map(tuple)
    ),
    st.builds(
        Alive,
        WORKERS,
        st.integers(0, 10**9),
        st.floats(0, 10**5),
        st.lists(ADDRESSES).map(tuple),
        st.dictionaries(ADDRESSES, st.floats(0, 10**5)),
    ),
    st.one_of(st.builds(of, st.binary()) for of in (Want, Drop, Dropped)),
    st.builds(Have, st.binary(), st.binary()),
    st.builds(Revoke, WORKERS, st.text()),
    st.builds(StartWorkers, st.dictionaries(WORKERS, ENVIRONMENTS, max_size=3)),
    st.one_of(st.builds(of, WORKERS, st.integers(0, 255), st.binary()) for of in (Ask, Answer)),
    st.builds(Exited, WORKERS, st.integers(-255, 255), st.booleans(), peak_memory=st.integers(0, 1 << 50)),
    st.builds(PeakMemory, WORKERS, st.integers(0, 1 << 50)),
    st.builds(StatusTold, WORKERS, st.integers(0, 10**9), st.booleans(), STATUSES),
    st.builds(AskStatus, st.integers(0, 10**9), st.booleans()),
    st.builds(Refused, WORDS, CODES, worker=st.none() | WORKERS),
    st.builds(Hello, WORDS, st.none() | CODES, st.none() | ADDRESSES, CODES, st.none() | WORDS),
    st.just(Beat()),
    st.builds(OutputTaken, NUMBERS),
    st.builds(Greet, WORDS, st.booleans(), st.booleans(), st.none() | WORDS),
    st.builds(SignalWorkers, st.lists(WORKERS).map(tuple), SIGNALS),
    st.builds(
        StartJob,
        st.from_regex(r"[0-9a-z-]+", fullmatch=True),
        st.lists(WORDS, min_size=1).map(tuple),
        WORDS,
        ENVIRONMENTS,
        st.booleans(),
        st.lists(ADDRESSES).map(tuple),
        *[st.booleans()] * 3,
        st.integers(1, 10**6),
        st.dictionaries(WORKERS, ENVIRONMENTS, max_size=3),
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
    [
        "worker",
        "pid",
        "returncode",
        "peer_lost",
        "left",
        "peer_left",
        "numbers",
        "signum",
        "token",
        "command",
        "workers",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
)


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BII", kind, 0, len(payload)) + payload


@given(st.sampled_from([*range(3, 11), 14, 16, 17, 19, 25, 28]), JSON)
def test_any_json_in_a_frame_is_one_message_or_an_error(kind, value):
    try:
        messages = list(Decoder().feed(_frame(kind, json.dumps(value).encode())))
    except ProtocolError:
        return
    assert len(messages) == 1


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff", b"[" * 100_000, b"1e999999", b"[true, 1]", b'{"worker": 0, "pid": 1}']
)
def test_a_payload_that_is_not_what_its_kind_says_is_an_error(payload):
    with pytest.raises(ProtocolError):
        list(Decoder().feed(_frame(3, payload)))


@given(st.sampled_from([11, 12, 13, 20, 21, 22, 24]), st.integers(0, 2**32 - 1), st.binary())
def test_any_bytes_in_a_frame_of_the_store_are_one_message_or_an_error(kind, number, payload):
    try:
        messages = list(Decoder().feed(struct.pack(">BII", kind, number, len(payload)) + payload))
    except ProtocolError:
        return
    assert len(messages) == 1


@pytest.mark.parametrize("header", [(99, 0, 0), (1, 0, MAX_PAYLOAD_BYTES + 1)])
def test_a_bad_header_is_told_before_its_payload_is_waited_for(header):
    with pytest.raises(ProtocolError, match="invalid frame: "):
        list(Decoder().feed(struct.pack(">BII", *header)))


def test_a_greeting_of_a_version_with_more_fields_is_read_for_its_version():
    hello = Hello("7.0", None, None, 1, None)
    (message,) = Decoder().feed(_frame(7, json.dumps(["7.0", None, None, 1, None, {"new": 1}]).encode()))
    assert message == hello
    for payload in (b"{}", b"7", b"", b"[" * 100_000, b'["7.0"]'):
        with pytest.raises(ProtocolError):
            list(Decoder().feed(_frame(7, payload)))


def test_messages_before_the_garbage_still_come_out():
    messages = Decoder().feed(encode(Started(0, 1)) + b"Welcome to this host!\n")
    assert next(messages) == Started(0, 1)
    with pytest.raises(ProtocolError):
        next(messages)


# For each kind in JSON: a valid payload, and for each field invalid values.
RIGHT = {
    3: {"worker": 0, "pid": 1},
    4: {
        "worker": 0,
        "returncode": -9,
        "peer_lost": False,
        "left": False,
        "peer_left": False,
        "peak_memory": 0,
        "apart": True,
    },
    5: {"why": "no", "exit_code": 1, "host": None, "worker": None},
    7: {"version": "1", "slots": None, "address": "10.0.0.1", "port": 1, "machine": None},
    17: {"numbers": [0], "signum": 15},
    19: {"version": "1", "beats": True, "count_slots": False, "interface": None},
    23: {"count": 0},
}
START = {"token": "0f-1", "command": ["true"], "cwd": "/", "environment": {}, "inherits": True, "peers": ["::1"]}
RIGHT[16] = {**START, "in_python": False, "as_horovod": False, "forks": True, "slots": 1, "workers": {"0": {}}}
STATUS = json.loads(codec.encode(WorkerStatus()))
RIGHT[28] = {"worker": 0, "number": 0, "in_full": True, "status": STATUS}
RIGHT[29] = {"number": 0, "in_full": False}
RIGHT[25] = {"workers": {"0": {}}}
RIGHT[26] = {"worker": 0, "number": 0, "waited_s": 0.0, "addresses": ["::1"], "silent_s": {"::2": 1.0}}
RIGHT[9] = {"worker": 0, "after": None, "newcomers": 0}
HUGE = 10**4000
WRONG = {
    **dict.fromkeys(["worker", "pid", "returncode", "exit_code", "port", "count", "signum"], (HUGE, -300, 1.0, True)),
    **dict.fromkeys(["why", "version", "cwd", "token", "interface", "host"], ("\0", "\ud800", 1, ["x"])),
    **dict.fromkeys(
        ["beats", "left", "inherits", "peer_lost", "peer_left", "count_slots", "in_python", "as_horovod", "forks"],
        (0, "true"),
    ),
    "slots": [0, HUGE, "1"],
    "apart": [0, "true"],
    "in_full": [0, "true"],
    "peak_memory": [-1, HUGE, "1", True],
    "number": [-1, HUGE, "1", True],
    # Each field of a status is one that no type of theirs allows, or the one behind them.
    "status": [
        {},
        None,
        [],
        STATUS[:-1],
        [*STATUS, 0],
        *([*STATUS[:at], {"a": {}}, *STATUS[at + 1 :]] for at in range(22)),
    ],
    "newcomers": [None, -1, 4, HUGE, "1", True],
    "waited_s": [None, -1.0, -1, True, "1"],
    "addresses": [None, ["host"]],
    "silent_s": [[], {"host": 1.0}, {"::1": "1"}],
    "after": [-1, HUGE, "1", True],
    "address": ["", "host", "1.2.3", "10.0.0.1; id", 7],
    "machine": ["\ud800", 1],
    "numbers": [None, [HUGE], [-1], "12", {"0": 1}],
    "command": [[], "true", [1], ["\ud800"]],
    "environment": [[], {"A=B": "x"}, {"A": 1}, {"A": "\0"}],
    "peers": [["a" * 300], "::1", [None]],
    "workers": [{"x": {}}, {"0": []}, {str(HUGE): {}}, {"-1": {}}],
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_field_that_is_missing_or_not_what_it_counts_is_an_error_and_no_other_is(kind):
    def read(payload):
        return list(Decoder().feed(_frame(kind, json.dumps(list(payload.values())).encode())))

    assert len(read(RIGHT[kind])) == 1
    for name in RIGHT[kind]:
        for wrong in WRONG[name]:
            with pytest.raises(ProtocolError, match="invalid frame of kind "):
                read({**RIGHT[kind], name: wrong})
        with pytest.raises(ProtocolError):
            read({other: value for other, value in RIGHT[kind].items() if other != name})


def test_bytes_of_a_name_that_are_no_text_are_kept():
    start = json.loads(json.dumps({**RIGHT[16], "environment": {"A": "\udcff"}}))
    (message,) = Decoder().feed(_frame(16, json.dumps(list(start.values())).encode()))
    assert message.environment == {"A": "\udcff"}


def test_each_end_reads_only_what_the_other_may_say_and_no_long_words_of_an_agent():
    for kind in {*range(1, 26)} - {2, 15}:
        for kinds, is_read in ((FROM_AGENT, kind in FROM_AGENT), (FROM_LAUNCHER, kind in FROM_LAUNCHER)):
            header = struct.pack(">BII", kind, 0, 1 << 20)
            if is_read:
                assert list(Decoder(kinds).feed(header)) == []
            else:
                with pytest.raises(ProtocolError):
                    list(Decoder(kinds).feed(header))
    with pytest.raises(ProtocolError):  # many small values, which decode to large objects
        list(Decoder(FROM_AGENT).feed(struct.pack(">BII", 5, 0, (1 << 20) + 1)))
    assert {8} == FROM_AGENT & FROM_LAUNCHER
