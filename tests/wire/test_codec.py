"""What was encoded is decoded to the same; anything that the types of the fields do not allow is an error."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hvdlite_wire.codec import Between, Family, MessageError, decode, encode
from hypothesis import given
from hypothesis import strategies as st


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    name: str
    share: float


def even(value):
    if value % 2:
        raise ValueError("it is odd")
    return value


@dataclass(frozen=True, slots=True)
class Part:
    number: Annotated[int, Between(0, 9)]


@dataclass(frozen=True)
class Whole:
    flag: bool
    text: str | None
    seconds: float
    parts: tuple[Part, ...]
    both: tuple[int, str]
    pairs: Sequence[Pair] = ()
    by_number: Mapping[int, Part] = field(default_factory=dict)
    by_name: dict[str, float] = field(default_factory=dict)
    level: Level = Level.LOW
    color: Color = Color.RED
    stream: Literal["out", "err"] = "out"
    anything: Any = None
    doubled: Annotated[int, Between(0, 100), even] = 0
    steps: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Empty:
    pass


PARTS = st.builds(Part, st.integers(0, 9))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
WHOLES = st.builds(
    Whole,
    st.booleans(),
    st.none() | st.text(),
    FLOATS,
    st.lists(PARTS).map(tuple),
    st.tuples(st.integers(), st.text()),
    st.lists(st.builds(Pair, st.text(), FLOATS)),
    st.dictionaries(st.integers(), PARTS),
    st.dictionaries(st.text(), FLOATS),
    st.sampled_from(Level),
    st.just(Color.RED),
    st.sampled_from(["out", "err"]),
    JSON,
    st.integers(0, 50).map(lambda number: 2 * number),
    st.frozensets(st.tuples(st.integers(), st.integers())),
)


@given(WHOLES)
def test_a_value_comes_out_as_it_went_in(whole):
    assert decode(Whole, encode(whole)) == whole


@given(JSON)
def test_any_json_is_a_value_or_an_error(value):
    for of in (Whole, Part, Pair, Level, int | None, tuple[Part, ...]):
        try:
            found = decode(of, json.dumps(value))
        except MessageError:
            continue
        assert json.loads(encode(found)) == value


RIGHT = [
    True,
    None,
    1.5,
    [[1]],
    [1, "a"],
    [["a", 0.5]],
    {"3": [1]},
    {"a": 0.0},
    2,
    "red",
    "err",
    {"a": [1]},
    4,
    [[1, 2]],
]
WRONG = {
    0: [None, 1, "true"],
    1: [1, ["x"]],
    2: ["1", math.nan, math.inf, True, None, 10**400],
    3: [None, {}, "12", [1], [[1, 2]], [[10]], [[True]], [[-1]]],
    4: [[1], [1, "a", 2], ["a", 1], None],
    5: [[["a"]], [["a", "b"]]],
    6: [[], {"x": [1]}, {"3": 1}],
    7: [{"a": "1"}, [], {"a": None}],
    8: [0, 3, "1", True, 1.0, None],
    9: ["blue", 0],
    10: ["in", None],
    12: [3, 102, -2, 10**4000],
    13: [None, [1], [[1]], {"a": 1}],
}


def test_a_field_of_a_wrong_type_or_size_is_an_error_and_so_are_too_few_and_too_many():
    assert decode(Whole, json.dumps(RIGHT)).both == (1, "a")
    for place, values in WRONG.items():
        for wrong in values:
            with pytest.raises(MessageError):
                decode(Whole, encode([*RIGHT[:place], wrong, *RIGHT[place + 1 :]]))
    for wrong in (RIGHT[:-1], [*RIGHT, None], dict(enumerate(RIGHT)), None, []):
        with pytest.raises(MessageError):
            decode(Whole, json.dumps(wrong))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"1e999999", b"9" * 5000])
def test_bytes_that_are_not_json_are_an_error(data):
    for read in (lambda data: decode(Part, data), Family({"part": Part}).decode):
        with pytest.raises(MessageError):
            read(data)


def test_each_message_of_a_family_is_told_by_its_name():
    family = Family({"part": Part, "empty": Empty})
    for message in (Part(3), Empty()):
        assert family.decode(family.encode(message)) == message
    assert family.encode(Part(3)) == b'["part",3]'
    for wrong in (b"[]", b'["other"]', b'["part"]', b'["empty",1]', b'"part"', b"[[]]", b"{}", b"null", b'[{"a":1}]'):
        with pytest.raises(MessageError):
            family.decode(wrong)


def test_what_json_has_no_form_of_is_refused_by_the_sender():
    assert encode(MappingProxyType({"a": (1, 2)})) == b'{"a":[1,2]}'
    for wrong in (object(), {1, 2}, [b"bytes"]):
        with pytest.raises(TypeError):
            encode(wrong)


def test_a_type_that_cannot_be_checked_is_refused_at_once():
    for of in (set, bytes, int | str, object):
        with pytest.raises((TypeError, ValueError)):
            Family({"of": dataclass(type("Of", (), {"__annotations__": {"field": of}}))})
