"""Tensors of every kind that PyTorch has, and other values: how to make each, and whether collectives accept it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

Call = Callable[[object], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of value that is passed to collectives.

    ``make(rank)`` makes the value of a rank; equal ranks give equal values. ``moves``: functions that only send it, as
    broadcast does, accept it. ``reduces``: functions that do arithmetic accept it. ``writable``: functions that
    overwrite it accept it. ``around(call, value)`` calls ``call(value)`` in the context that makes the value of this
    kind; ``is_of_thread`` is False if only one thread at a time can be in that context.
    """

    make: Callable[[int], Any]
    moves: bool = False
    reduces: bool = False
    writable: bool = True
    is_of_thread: bool = True
    around: Callable[[Call, Any], Any] = lambda call, value: call(value)


def base(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Makes a (4, 2) tensor of numbers that differ by rank and are small enough for every dtype."""
    return (torch.arange(8) + 8 * rank).view(4, 2).to(dtype)


def bits(rank: int, dtype: torch.dtype) -> Tensor:
    """Makes a (4, 2) tensor of a dtype to which no number can be converted, as a view of bytes."""
    return (torch.arange(8 * dtype.itemsize, dtype=torch.uint8) + 8 * rank).view(dtype).view(4, 2)


class Tagged(Tensor):
    """A subclass that adds a method."""

    def tag(self) -> str:
        return "tagged"


class Mute(Tensor):
    """A subclass that raises in every function of PyTorch's."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("Mute knows no functions")


class Counting(Tensor):
    """A subclass with its own ``__torch_dispatch__``, which raises for every operator."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("Counting knows no operators")


def emptied(rank: int) -> Tensor:
    """Makes a tensor whose storage was resized to 0, as FSDP does."""
    tensor = base(rank)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut(rank: int) -> Tensor:
    """Makes a tensor whose storage is smaller than its values."""
    tensor = base(rank)
    tensor.untyped_storage().resize_(16)
    return tensor


def under_inference(rank: int) -> Tensor:
    with torch.inference_mode():
        return base(rank)


def of_numpy(rank: int) -> Tensor:
    """Makes a tensor over the memory of a read-only NumPy array; PyTorch does not know that it is read-only."""
    array = base(rank).numpy()
    array.flags.writeable = False
    with _quiet():
        return torch.from_numpy(array)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quietly(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """Wraps ``make`` so that PyTorch's warnings about prototype features are not shown."""

    def made(rank: int) -> Any:
        with _quiet():
            return make(rank)

    return made


def fake(rank: int) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(base(rank))


def inside_fake_mode(call: Call, value: Any) -> Any:
    with FakeTensorMode():
        return call(value)


def inside_meta(call: Call, value: Any) -> Any:
    with torch.device("meta"):
        return call(value)


def left_by_vmap(rank: int) -> Tensor:
    kept: list[Tensor] = []
    torch.vmap(lambda x: (kept.append(x), x)[1])(base(rank))
    return kept[0]


def left_by_functionalize(rank: int) -> Tensor:
    return torch._to_functional_tensor(base(rank))


def inside_vmap(call: Call, value: Any) -> Any:
    return torch.vmap(call)(value)


def inside_grad(call: Call, value: Any) -> Any:
    return torch.func.grad(lambda x: (call(x), x.sum())[1])(value)


def beside_grad(call: Call, value: Any) -> Any:
    return torch.func.grad(lambda x: (call(value), x.sum())[1])(value)


def inside_functionalize(call: Call, value: Any) -> Any:
    return torch.func.functionalize(call)(value)


def inside_jvp(call: Call, value: Any) -> Any:
    # The dual level is one per process, not one per thread.
    with _DUAL, forward_ad.dual_level():
        return call(forward_ad.make_dual(value, torch.ones_like(value)))


_DUAL = threading.Lock()


def zero_of_autograd(rank: int) -> Tensor:
    return torch._efficientzerotensor((4, 2))


_MESH: list[DeviceMesh] = []


@contextmanager
def a_mesh() -> Iterator[None]:
    """Provides a device mesh for the DTensor kind; if there is no default group, one of this process alone."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _MESH.append(DeviceMesh("cpu", list(range(dist.get_world_size()))))
        yield
    finally:
        _MESH.clear()
        if is_alone:
            dist.destroy_process_group()


FLOATS = [torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
MOVED_ONLY = [torch.uint16, torch.uint32, torch.uint64]
EIGHTS = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
BITS = [torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.bits8, torch.bits16, torch.float4_e2m1fn_x2]
TINY = [getattr(torch, f"{sign}int{width}") for sign in ("", "u") for width in range(1, 8)]


def quantized(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.quantize_per_tensor(base(rank), 0.5, 3, dtype)


def quantized_per_channel(rank: int, dtype: torch.dtype = torch.qint8) -> Tensor:
    return torch.quantize_per_channel(base(rank), torch.ones(2), torch.zeros(2), 1, dtype)


def _square(rank: int) -> Tensor:
    return torch.ones(4, 4) * (rank + 1)


TRAVELLERS = {
    "plain": Kind(base, moves=True, reduces=True),
    **{str(dtype): Kind(lambda rank, dtype=dtype: base(rank, dtype), True, True) for dtype in [*FLOATS, *WHOLE]},
    **{
        str(dtype): Kind(lambda rank, dtype=dtype: base(rank, dtype) * (1 + 2j), True, True)
        for dtype in (torch.complex64, torch.complex128)
    },
    "conjugated": Kind(lambda rank: torch.complex(base(rank), base(rank) + 1).conj(), True, True),
    "conjugated and transposed": Kind(
        lambda rank: torch.complex(base(rank), base(rank)).view(2, 4).t().conj(), True, True
    ),
    "negated": Kind(lambda rank: torch.complex(base(rank), base(rank) + 1).conj().imag, True, True),
    "negated and contiguous": Kind(lambda rank: torch._neg_view(base(rank)), True, True),
    "transposed": Kind(lambda rank: base(rank).view(2, 4).t(), True, True),
    "a slice": Kind(lambda rank: torch.cat([base(rank), base(rank)], 1)[:, 1:3], True, True),
    "channels last": Kind(
        lambda rank: base(rank).view(4, 2, 1, 1).expand(4, 2, 3, 3).contiguous(memory_format=torch.channels_last),
        True,
        True,
    ),
    "overlapping": Kind(lambda rank: base(rank).view(-1).as_strided((4, 2), (1, 1)), True, True),
    "expanded": Kind(lambda rank: base(rank)[:, :1].expand(4, 2), True, True, writable=False),
    "of length 0": Kind(lambda rank: torch.empty(0, 2), True, True),
    "of a dimension of 0": Kind(lambda rank: torch.empty(4, 0), True, True),
    "a scalar": Kind(lambda rank: torch.tensor(1.5 + rank), True, True),
    "one that requires a gradient": Kind(lambda rank: base(rank).requires_grad_(), True, True),
    "one with history": Kind(lambda rank: base(rank).requires_grad_() * 2, True, True),
    "a parameter": Kind(lambda rank: nn.Parameter(base(rank)), True, True),
    "a buffer": Kind(lambda rank: nn.Buffer(base(rank)), True, True),
    "of a subclass": Kind(lambda rank: base(rank).as_subclass(Tagged), True, True),
    "of a subclass that knows no functions": Kind(lambda rank: Tensor._make_subclass(Mute, base(rank)), True, True),
    "of inference mode": Kind(under_inference, True, True, writable=False),
    "over numpy's read-only memory": Kind(of_numpy, True, True),
    "where a device is the default": Kind(base, True, True, around=inside_meta),
    "copied on writing": Kind(lambda rank: torch._lazy_clone(base(rank)), True, True),
    **{str(dtype): Kind(lambda rank, dtype=dtype: base(rank).to(dtype), True) for dtype in MOVED_ONLY},
    **{str(dtype): Kind(lambda rank, dtype=dtype: base(rank).to(dtype), True) for dtype in EIGHTS},
    **{str(dtype): Kind(lambda rank, dtype=dtype: bits(rank, dtype), True) for dtype in BITS},
    "torch.complex32": Kind(quietly(lambda rank: base(rank, torch.complex64).to(torch.complex32)), True),
    "complex32, conjugated": Kind(quietly(lambda rank: base(rank, torch.complex64).to(torch.complex32).conj()), True),
}

NO_TRAVELLERS = {
    "sparse COO": Kind(lambda rank: base(rank).to_sparse()),
    "sparse CSR": Kind(quietly(lambda rank: base(rank).to_sparse_csr())),
    "sparse CSC": Kind(quietly(lambda rank: base(rank).to_sparse_csc())),
    "sparse BSR": Kind(quietly(lambda rank: _square(rank).to_sparse_bsr((2, 2)))),
    "sparse BSC": Kind(quietly(lambda rank: _square(rank).to_sparse_bsc((2, 2)))),
    "quint8": Kind(lambda rank: quantized(rank, torch.quint8)),
    "qint8": Kind(lambda rank: quantized(rank, torch.qint8)),
    "qint32": Kind(lambda rank: quantized(rank, torch.qint32)),
    "quantized by channel": Kind(quantized_per_channel),
    "quint4x2": Kind(lambda rank: quantized_per_channel(rank, torch.quint4x2)),
    "quantized bytes without a scale": Kind(lambda rank: base(rank, torch.uint8).view(torch.quint8)),
    "mkldnn": Kind(lambda rank: base(rank).to_mkldnn()),
    "meta": Kind(lambda rank: torch.empty(4, 2, device="meta")),
    "a fake one": Kind(fake),
    "inside FakeTensorMode": Kind(base, around=inside_fake_mode),
    "nested": Kind(quietly(lambda rank: torch.nested.nested_tensor([base(rank), base(rank)[:2]]))),
    "nested and jagged": Kind(
        quietly(lambda rank: torch.nested.nested_tensor([base(rank), base(rank)[:2]], layout=torch.jagged))
    ),
    "masked": Kind(quietly(lambda rank: masked_tensor(base(rank), base(rank) > 2))),
    "of two tensors": Kind(lambda rank: TwoTensor(base(rank), base(rank))),
    "of a subclass with operators of its own": Kind(lambda rank: Tensor._make_subclass(Counting, base(rank))),
    "distributed": Kind(lambda rank: DTensor.from_local(base(rank), _MESH[0])),
    "a lazy parameter": Kind(lambda rank: nn.UninitializedParameter()),
    "a lazy buffer": Kind(lambda rank: nn.UninitializedBuffer()),
    "of a storage that was emptied": Kind(emptied),
    "of a storage that was cut": Kind(cut),
    "zeros of autograd": Kind(zero_of_autograd),
    "inside vmap": Kind(base, around=inside_vmap),
    "inside grad": Kind(base, around=inside_grad),
    "beside grad": Kind(base, around=beside_grad),
    "inside functionalize": Kind(base, around=inside_functionalize),
    "left by vmap": Kind(left_by_vmap),
    "left by functionalize": Kind(left_by_functionalize),
    "inside jvp": Kind(base, around=inside_jvp, is_of_thread=False),
    **{str(dtype): Kind(lambda rank, dtype=dtype: base(rank, torch.uint8).view(dtype)) for dtype in TINY},
    "None": Kind(lambda rank: None),
    "an int": Kind(lambda rank: 3),
    "a float": Kind(lambda rank: 1.5),
    "True": Kind(lambda rank: True),
    "a str": Kind(lambda rank: "abc"),
    "bytes": Kind(lambda rank: b"abc"),
    "an empty str": Kind(lambda rank: ""),
    "an array": Kind(lambda rank: base(rank).numpy()),
    "an array of objects": Kind(lambda rank: np.array([None, "a"], dtype=object)),
    "a number of numpy's": Kind(lambda rank: np.float32(1.5)),
    "a list of numbers": Kind(lambda rank: [1.0, 2.0]),
    "a dictionary": Kind(lambda rank: {"a": base(rank)}),
    "a generator": Kind(lambda rank: (row for row in base(rank))),
    "a class": Kind(lambda rank: Tensor),
    "a storage": Kind(lambda rank: base(rank).untyped_storage()),
    "a module": Kind(lambda rank: nn.Linear(2, 2)),
}

if torch.__version__.startswith(("2.11.", "2.12.")):
    # In these versions, a FakeTensorMode that was entered in a thread crashes the process later.
    del NO_TRAVELLERS["a fake one"], NO_TRAVELLERS["inside FakeTensorMode"]

KINDS = {**TRAVELLERS, **NO_TRAVELLERS}
