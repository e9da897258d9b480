"""
`ValueEncoder` and `ValueDecoder`: values as JSON, with exact types, floats by their bits, tensors by reference.

    value ── ValueEncoder ── JSON with references ──┐
                    └─ its tensors, as bytes behind it; metas ──┴── room_for ── ValueDecoder ── value

Known are Python's numbers, texts and containers, those of `collections`, and torch's dtypes, devices and sizes. A
container that occurs twice, or in itself, arrives as one object. An object of any other type is pickled by itself,
inside the JSON, and `ValueEncoder.pickled` says where it is. Optimizers' states are sent so, also those of checkpoints
and elastic programs.
"""

from __future__ import annotations

import base64
import io
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import words_of
from ..outside_graphs import keep_outside_graphs
from .broadcast import from_bytes, to_bytes
from .sendable import is_sendable, plain_tensor

# The owner of a tensor that does not belong to one parameter's state.
NOBODY = -1

# Beyond these, Python limits the digits of a number in JSON, and other readers its value.
_MOST = 1 << 53

_FACTORIES: dict[str, Any] = {each.__name__: each for each in (int, float, str, bool, list, dict, set)}


class ValueEncoder:
    """Encodes the values of one message, behind which its ``tensors`` are sent."""

    def __init__(self) -> None:
        # Set by `encode_state` while it encodes: numbers of parameters by `id`, and whose state is encoded.
        self.number_of: dict[int, int] = {}
        self.owner = NOBODY
        self.tensors: list[Tensor] = []
        self.metas: list[list[Any]] = []
        """What `room_for` needs on other ranks, as JSON: the shape, the dtype, whether it is on the CPU, the owner.

        The owner is the number of the parameter whose state it is, which determines its device on each rank.
        """
        self.pickled: list[str] = []
        """The place of each value that was pickled, and its type."""
        # By id: the place of a tensor, and the tensor, so that no other one gets the id.
        self._place_of: dict[int, tuple[int, Tensor]] = {}
        # Objects that may occur again, by id; kept, so that the id stays theirs.
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []

    def refer(self, value: object) -> list[Any] | None:
        """Returns a reference to a parameter, or to a tensor that is sent; None for all that is to be pickled."""
        if not isinstance(value, Tensor):
            return None
        number = self.number_of.get(id(value))
        if number is not None:
            return ["parameter", number]
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and not value.requires_grad
        if not is_plain or not is_sendable(value):
            return None
        if id(value) not in self._place_of:
            self._place_of[id(value)] = len(self.tensors), value
            self.tensors.append(plain_tensor(value))
            self.metas.append([list(value.shape), str(value.dtype), value.device.type == "cpu", self.owner])
        return ["tensor", self._place_of[id(value)][0]]

    def encode(self, value: Any, place: str) -> Any:
        """Returns the value as JSON; ``place`` names it in errors. A TypeError names what cannot be pickled."""
        kind = type(value)
        if value is None or kind is bool or kind is str or (kind is int and abs(value) <= _MOST):
            return value
        if kind in _NAME_OF:
            name = _NAME_OF[kind]
            return [name, _ATOMS[name][1](value)]
        if (reference := self.refer(value)) is not None:
            return ["tensor", reference]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, self._items(value, place)]
        number = self._numbers.get(id(value))
        if number is not None:
            return ["again", number]
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return self._encode_once(value, kind, place)

    def _encode_once(self, value: Any, kind: type, place: str) -> list[Any]:
        argument: Any = None
        if kind is deque:
            argument = value.maxlen
        elif kind is defaultdict and value.default_factory is not None:
            argument = getattr(value.default_factory, "__name__", "")
            if _FACTORIES.get(argument) is not value.default_factory:
                return self._pickle(value, place)
        if kind in (list, set, deque):
            return [kind.__name__, argument, self._items(value, place)]
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return [kind.__name__, argument, self._pairs(value, place)]
        return self._pickle(value, place)

    def _items(self, values: Iterable[Any], place: str) -> list[Any]:
        return [self.encode(each, f"{place}[{number}]") for number, each in enumerate(values)]

    def _pairs(self, values: Any, place: str) -> list[Any]:
        return [
            [self.encode(key, f"a key of {place}"), self.encode(each, f"{place}[{key!r}]")]
            for key, each in values.items()
        ]

    def _pickle(self, value: object, place: str) -> list[Any]:
        self.pickled.append(f"{place} ({type(value).__qualname__})")
        data, error = to_bytes(value, self.refer)
        if error is not None:
            raise TypeError(f"{place} cannot be pickled: {type(error).__name__}: {words_of(error)}") from error
        return ["pickle", base64.b64encode(data).decode()]


class ValueDecoder:
    """Decodes what one `ValueEncoder` has encoded, in the same order.

    The sender must be known: a message with pickled objects can run any code.
    """

    def __init__(self, tensors: Sequence[Tensor], sender: str, what: str, params: Sequence[Tensor] = ()) -> None:
        """``tensors`` came behind the message. ``sender`` and ``what`` say in errors whose objects of what they are."""
        self._tensors, self._params = tensors, params
        self._sender, self._what = sender, what
        self._seen: list[Any] = []

    def decode(self, encoded: Any) -> Any:
        """Returns the value; a TypeError if this rank cannot unpickle an object in it."""
        if not isinstance(encoded, list):
            return encoded
        kind, *rest = encoded
        if kind in _ATOMS:
            return _ATOMS[kind][2](rest[0])
        if kind in _FIXED:
            return _FIXED[kind](self.decode(each) for each in rest[0])
        if kind in _EMPTY:
            return self._fill(_EMPTY[kind](rest[0]), rest[1])
        others: dict[str, Callable[[Any], Any]] = {
            "tensor": self._resolve,
            "again": lambda at: self._seen[at],
            "pickle": self._unpickle,
        }
        return others[kind](rest[0])

    def _resolve(self, reference: Any) -> Tensor:
        kind, number = reference
        tensor: Tensor = (self._params if kind == "parameter" else self._tensors)[number]
        return tensor

    def _fill(self, made: Any, contents: Iterable[Any]) -> Any:
        # Before its contents, which may refer to it.
        self._seen.append(made)
        if isinstance(made, dict):
            for key, each in contents:
                # The key first, as it was encoded.
                decoded = self.decode(key)
                made[decoded] = self.decode(each)
        elif isinstance(made, set):
            made.update(self.decode(each) for each in contents)
        else:
            made.extend(self.decode(each) for each in contents)
        return made

    def _unpickle(self, data: str) -> Any:
        def loads(data: bytes) -> Any:
            unpickler = pickle.Unpickler(io.BytesIO(data))
            unpickler.persistent_load = self._resolve  # type: ignore[method-assign]  # as for the pickler
            return unpickler.load()

        number = len(self._seen)
        self._seen.append(None)
        value = self._seen[number] = from_bytes(base64.b64decode(data), self._sender, self._what, None, loads)
        return value


def _bits(value: float) -> str:
    # Not as a number: that would lose the bits of a NaN.
    return struct.pack(">d", value).hex()


def _float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


# By name: the type, and the conversions to JSON and back.
_ATOMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, _bits, _float),
    "complex": (
        complex,
        lambda value: [_bits(value.real), _bits(value.imag)],
        lambda parts: complex(*map(_float, parts)),
    ),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (
        range,
        lambda value: [hex(each) for each in (value.start, value.stop, value.step)],
        lambda parts: range(*(int(each, 16) for each in parts)),
    ),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    "device": (torch.device, str, torch.device),
    "size": (torch.Size, list, torch.Size),
}
_NAME_OF = {of: name for name, (of, _, _) in _ATOMS.items()}

_FIXED: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}

# Empty containers, by the name of their type and their one argument.
_EMPTY: dict[str, Callable[[Any], Any]] = {
    "list": lambda _: [],
    "set": lambda _: set(),
    "deque": lambda most: deque(maxlen=most),
    "dict": lambda _: {},
    "OrderedDict": lambda _: OrderedDict(),
    "Counter": lambda _: Counter(),
    "defaultdict": lambda factory: defaultdict(factory and _FACTORIES[factory]),
}


def room_for(metas: Sequence[Any], params: Sequence[Tensor]) -> list[Tensor]:
    """Allocates memory for the tensors of `ValueEncoder.metas`; ``params`` are this rank's. Without any, on the CPU."""
    room = []
    for shape, dtype, is_on_cpu, owner in metas:
        device = "cpu" if is_on_cpu or not params else params[max(0, owner)].device
        room.append(torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device))
    return room


keep_outside_graphs(globals())
