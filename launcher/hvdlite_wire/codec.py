"""
Encodes dataclasses as JSON, and decodes them strictly: the types of their fields say what is allowed.

    @dataclass
    class Started:
        worker: Annotated[int, Between(0, 10**6)]      field 1
        hosts: tuple[str, ...]                         field 2

    encode(Started(3, ("a",))) ── b'[3,["a"]]' ── decode(Started, …) ── Started(3, ("a",)), or a `MessageError`

A dataclass is a list of its fields, in their order. Types may be those of JSON, None, `Any`, enums, literals, tuples,
lists, frozensets, mappings with keys that are str or int, dataclasses, NamedTuples, and each of them or None.
``Annotated[type, check]`` adds a check: a function that returns the value or another in its place, or raises a
ValueError or TypeError. A `Family` is several dataclasses, each of which begins with its name. The functions that read
a type are made once.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Message = TypeVar("Message")
_Reader = Callable[[Any], Any]

# What goes wrong in a check, in a cut JSON text, or in one that is nested too deep.
_WRONG = (ValueError, TypeError, OverflowError, RecursionError, AttributeError)


class MessageError(ValueError):
    """What another process has sent is no message of the expected type."""


@dataclass(frozen=True, slots=True)
class Between:
    """Checks that a number is not below ``least`` and not above ``most``."""

    least: float
    most: float

    def __call__(self, value: Any) -> Any:
        if not self.least <= value <= self.most:
            raise MessageError(f"{_brief(value)} is not a number from {self.least} to {self.most}")
        return value


def encode(value: object) -> bytes:
    """Returns a value of one of these types as JSON; a TypeError, ValueError or RecursionError if it is none."""
    return _to_text(value).encode()


def decode(of: type[Message], data: bytes | str) -> Message:
    """Returns the value of this type; raises a `MessageError` if the bytes are no encoding of one."""
    read: Callable[[Any], Message] = _reader_of(cast(Hashable, of))
    try:
        return read(json.loads(data))
    except _WRONG as error:
        raise MessageError(f"{_brief(data)} is not {getattr(of, '__name__', of)} ({error})") from error


class Family(Generic[Message]):
    """Dataclasses that one connection carries; each is sent as a list of its name and its fields."""

    def __init__(self, by_name: Mapping[str, type[Any]]) -> None:
        self._readers = {name: _fields_reader(of) for name, of in by_name.items()}
        self._forms = {of: (name, _values_of(cast(Hashable, of))) for name, of in by_name.items()}

    def encode(self, message: Message) -> bytes:
        name, values_of = self._forms[type(message)]
        return _to_text((name, *values_of(message))).encode()

    def decode(self, data: bytes | str) -> Message:
        """Returns the message; raises a `MessageError` if the bytes are the encoding of none of the family."""
        try:
            packed = json.loads(data)
            return self._readers[packed[0]](packed, 1)  # type: ignore[no-any-return]
        except (*_WRONG, LookupError) as error:
            raise MessageError(f"{_brief(data)} is no message that is expected here ({error})") from error


@functools.cache
def _reader_of(hint: Any) -> _Reader:  # noqa: PLR0911  # a case for each kind of type
    """Returns the function that checks and converts what JSON gives for a value of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _as_it_is
    if hint is float:
        return _finite
    if hint in (int, str, bool):
        return _exactly(hint)
    if origin is Annotated:
        inner = _reader_of(arguments[0])
        return functools.reduce(lambda read, check: lambda value: check(read(value)), hint.__metadata__, inner)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        read = _reader_of(inner)
        return lambda value: None if value is None else read(value)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _all(tuple, _reader_of(arguments[0]))
    if origin is tuple:
        return _row(lambda *values: values, [_reader_of(each) for each in arguments])
    if origin is frozenset:
        return _all(frozenset, _reader_of(arguments[0]))
    if origin in (list, Sequence):
        return _all(list, _reader_of(arguments[0]))
    if origin in (dict, Mapping):
        return _mapping(*arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(tuple(each.value for each in hint), hint)
    return _fields_reader(hint)


def _as_it_is(value: Any) -> Any:
    return value


def _exactly(of: type) -> _Reader:
    def check(value: Any) -> Any:
        if type(value) is not of:
            raise MessageError(f"{_brief(value)} is not {of.__name__}")
        return value

    return check


def _finite(value: Any) -> float:
    # JSON has one type of numbers.
    if type(value) not in (float, int) or not math.isfinite(value):
        raise MessageError(f"{_brief(value)} is not float")
    return float(value)


def _one_of(allowed: tuple[Any, ...], convert: Callable[[Any], Any] = _as_it_is) -> _Reader:
    def check(value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise MessageError(f"{_brief(value)} is not one of {allowed}")
        return convert(value)

    return check


def _all(of: Callable[[Iterable[Any]], Any], inner: _Reader) -> _Reader:
    def check(value: Any) -> Any:
        if type(value) is not list:
            raise MessageError(f"{_brief(value)} is not a list")
        return of([inner(each) for each in value])

    return check


def _row(make: Callable[..., Any], readers: Sequence[_Reader]) -> Callable[..., Any]:
    """Returns the reader of a list with one value for each reader, behind the first ``start`` items."""
    count = len(readers)

    def check(value: Any, start: int = 0) -> Any:
        if type(value) is not list or len(value) != start + count:
            raise MessageError(f"{_brief(value)} is not a list of {start + count}")
        return make(*[inner(each) for inner, each in zip(readers, value[start:], strict=True)])

    return check


def _mapping(key_type: Any, value_type: Any) -> _Reader:
    read_key, read_value = _reader_of(key_type), _reader_of(value_type)
    is_number = key_type is int or get_args(key_type)[:1] == (int,)

    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise MessageError(f"{_brief(value)} is not a mapping")
        return {read_key(int(key) if is_number else key): read_value(each) for key, each in value.items()}

    return check


def _fields_reader(of: Any) -> Callable[..., Any]:
    return _row(of, [_reader_of(hint) for _, hint in _hints_of(of)])


def _written(value: Any) -> Any:
    """Returns, in JSON's types, a value that JSON has no form of."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return list(value)
    return _values_of(cast(Hashable, type(value)))(value)


# `json.dumps` would make an encoder for each message. Messages have no circles.
_to_text = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_written).encode


@functools.cache
def _values_of(of: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the function that gives the values of a dataclass's fields."""
    names = [name for name, _ in _hints_of(of)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _hints_of(of: Any) -> list[tuple[str, Any]]:
    if not (is_dataclass(of) or hasattr(of, "_fields")):
        raise TypeError(f"{of} cannot be sent")
    hints = get_type_hints(of, include_extras=True)
    names = of._fields if hasattr(of, "_fields") else [field.name for field in fields(of)]
    return [(name, hints[name]) for name in names]


def _brief(value: object) -> str:
    return repr(value[:40] if isinstance(value, (bytes, str)) else value)[:80]


def _plain(text: str) -> str:
    # Lone surrogates may stand for bytes that are not UTF-8.
    if "\0" in text:
        raise ValueError("it has a zero")
    text.encode(errors="surrogateescape")
    return text


def _address(text: str) -> str:
    return str(ipaddress.ip_address(text))


Text = Annotated[str, _plain]
Address = Annotated[str, _address]
WorkerNumber = Annotated[int, Between(0, 10**6)]
Count = Annotated[int, Between(0, 10**9)]
Bytes = Annotated[int, Between(0, 1 << 60)]
Pid = Annotated[int, Between(1, 2**31 - 1)]
Seconds = Annotated[float, Between(0, 10**6)]


@dataclass(frozen=True)
class HostLinks:
    """A worker's own addresses on connections to other hosts, and how long nothing has come from other addresses."""

    addresses: tuple[Address, ...] = ()
    silent_s: Mapping[Address, Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusals:
    """A worker's own addresses for connections to other hosts, and those that have refused one, if known."""

    addresses: tuple[Address, ...]
    refused_by: tuple[Address, ...]
