"""Values of a message arrive with their types and bits, and only objects of unknown types are pickled."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch

from hvdlite.ops.typed_values import ValueDecoder, ValueEncoder

Point = namedtuple("Point", ["x", "y"])


def sent(value: Any) -> tuple[Any, list[str]]:
    """Returns the value as it arrives, and what was pickled of it."""
    encoder = ValueEncoder()
    message = json.dumps(encoder.encode(value, "it"))
    return ValueDecoder(encoder.tensors, "rank 0", "a test").decode(json.loads(message)), encoder.pickled


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


@pytest.mark.parametrize("value", [
    None, True, 0, -3, 2**53 + 1, -(2**70), "warm", "\ud800", b"\x00\xff", 1j, range(3, 2**60, 7),
    torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]),
    (1, (2.5, None)), [1, [2.0, "x"]], {3: "int", "3": "str", (1, 2): [3], None: 4}, {1, 2}, frozenset({"a"}),
    Counter({30: 1, 80: 2}), OrderedDict([("b", 1), ("a", 2)]), deque([1, 2], maxlen=3),
    defaultdict(list, {1: [2]}), defaultdict(None, {1: 2}),
])  # fmt: skip
def test_known_types_arrive_as_they_are_and_without_pickle(value):
    arrived, pickled = sent(value)
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)
    assert pickled == []


ODD_NAN = struct.unpack(">d", b"\xff\xf8" + b"\5" * 6)[0]


@pytest.mark.parametrize("number", [0.1, -0.0, math.inf, -math.inf, 5e-324, ODD_NAN])
def test_floats_keep_their_bits(number):
    arrived, _ = sent({"x": (number, complex(0.0, number))})
    assert bits(arrived["x"][0]) == bits(number)
    assert bits(arrived["x"][1].imag) == bits(number)


def test_a_container_that_occurs_twice_or_in_itself_arrives_as_one():
    shared: list[Any] = [1]
    shared.append(shared)
    first, (second, of_dict) = sent([shared, (shared, {"it": shared})])[0]
    assert first is second is of_dict["it"] is first[1]


def test_tensors_are_sent_once_behind_the_message():
    tensor = torch.arange(3)
    arrived, pickled = sent({"a": [tensor], "b": Point(tensor, 1)})
    assert torch.equal(arrived["a"][0], tensor)
    # Also within a pickle.
    assert arrived["b"].x is arrived["a"][0]
    assert pickled == ["it['b'] (Point)"]


def test_tensors_that_a_program_makes_for_a_moment_are_told_apart():
    sent = ValueEncoder()
    assert [sent.refer(torch.tensor(float(number))) for number in range(100)] == [["tensor", n] for n in range(100)]
    assert [tensor.item() for tensor in sent.tensors] == list(range(100))


def test_an_object_of_an_unknown_type_is_pickled_by_itself_and_named():
    point = Point(1, 2.0)
    arrived, pickled = sent([1, {"best": point, "again": point}])
    assert arrived == [1, {"best": point, "again": point}]
    assert arrived[1]["best"] is arrived[1]["again"]
    assert pickled == ["it[1]['best'] (Point)"]


def test_what_cannot_be_pickled_is_an_error_that_says_where_it_is():
    with pytest.raises(TypeError, match=r"it\[1\]\['lock'\] cannot be pickled: TypeError"):
        sent([1, {"lock": threading.Lock()}])
