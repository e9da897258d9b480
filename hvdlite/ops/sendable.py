"""
Checks that tensors can be sent to other ranks: for every function that takes tensors, before any rank is asked.

    tensor ── check_sendable ── it cannot: a TypeError or a ValueError, with the way out
                             └─ it can: plain_tensor ── a plain tensor over the same memory, whose bytes are sent

Dense tensors on the CPU or a GPU can, also conjugated, negated and expanded ones, and those of a subclass that only
adds methods. Tensors that keep their values in another form, such as sparse ones, or have no memory, cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..errors import WrongTypeError

_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)
# Those that PyTorch can copy: without, a tensor cannot be brought into memory of its own.
DTYPES = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))

# What has neither hooks of its own nor another memory than it seems to have.
_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_NO_DISPATCH = Tensor.__torch_dispatch__

# What can be done with the tensors of subclasses that are known, by the names of these.
_INSIDE = {
    "DTensor": "pass this rank's part, as tensor.to_local()",
    "FakeTensor": "it has no values: make it outside of FakeTensorMode",
    "MaskedTensor": "pass its values and its mask, as tensor.get_data() and tensor.get_mask()",
    "AsyncCollectiveTensor": "wait for it first, as tensor.wait()",
}


def is_sendable(tensor: Tensor) -> bool:
    """Whether `check_sendable` lets it pass."""
    try:
        check_sendable(tensor, "")
    except (TypeError, ValueError):
        return False
    return True


def check_sendable(tensor: object, what: str, subject: str = "the tensor") -> Tensor:
    """The tensor, if its values can travel; else a TypeError or a ValueError, which begins with ``what``.

    One of a subclass comes back as a plain one, with its history and over the same memory.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: {type(tensor).__name__} is not a tensor: wrap it, as torch.tensor(value)")
    check_is_outside(what)
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{what}: {subject} has no shape yet: pass one batch through its lazy module first")
    # A subclass may answer what is asked below in its own way.
    with torch._C.DisableTorchFunctionSubclass():
        for is_so, words in _OTHER_FORMS:
            if is_so(tensor):
                # Horovod, where it comes so far, has a ValueError for them.
                raise WrongTypeError(f"{what}: {subject} is {words(tensor)}")
        for is_so, words in _WITHOUT_VALUES:
            if is_so(tensor):
                raise ValueError(f"{what}: {subject} {words(tensor)}")
        return tensor if type(tensor) in _PLAIN_TYPES else tensor.as_subclass(Tensor)


def check_writable(tensor: Tensor, what: str, subject: str = "the tensor") -> None:
    """Raise a ValueError if a tensor could not be overwritten; in the middle of an operation the others would hang."""
    with torch._C.DisableTorchFunctionSubclass():
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{what}: elements of {subject} share their memory, as expand() makes them: clone() it")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{what}: {subject} was made in torch.inference_mode(), and is to change there only")


def layout_of(value: object) -> torch.layout | None:
    """The layout of a tensor, whatever its subclass says; None if it is no tensor, or has not got one yet."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return value.layout


def plain_tensor(tensor: Tensor) -> Tensor:
    """A plain tensor over the same memory, without history and methods of its own; it has passed the check."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _is_of_own_making(tensor: Tensor) -> bool:
    return type(tensor) not in _PLAIN_TYPES and type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def check_is_outside(what: str) -> None:
    """Raise a TypeError inside FakeTensorMode or a torch.func transform."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise TypeError(f"{what}: this is inside FakeTensorMode, in which nothing has values: call it outside")
    # In torch.func.functionalize too.
    if torch._C._are_functorch_transforms_active():
        raise TypeError(
            f"{what}: this is inside a transform of torch.func, as vmap or grad, which knows of no other ranks: call "
            "it outside"
        )


def _is_without_memory(tensor: Tensor) -> bool:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = int(tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < needed


def _has_tangent(tensor: Tensor) -> bool:
    # The level is that of the dual tensors that there are; below 0 there are none.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]  # torch's


# Whether it is so, and the words for it.
_Case = tuple[Callable[[Tensor], bool], Callable[[Tensor], str]]

_DENSE = "pass a dense one, as tensor.to_dense()"

# In what form values are kept that cannot travel, and the way out. The order counts: the later ones can be asked only
# of what the earlier ones are not true of.
_OTHER_FORMS: tuple[_Case, ...] = (
    (lambda tensor: tensor.is_nested, lambda _: "a nested one: pass each of tensor.unbind()"),
    (
        lambda tensor: tensor.is_quantized or tensor.dtype in _QUANTIZED,
        lambda _: "quantized: pass tensor.int_repr(), or tensor.dequantize()",
    ),
    (
        _is_of_own_making,
        lambda tensor: f"a {_kind(tensor)}: {_INSIDE.get(_kind(tensor), 'pass the plain tensor that it is made of')}",
    ),
    (
        torch._C._functorch.is_functorch_wrapped_tensor,
        lambda _: "one of a transform of torch.func, as vmap or grad: pass the one that was given to it",
    ),
    (torch._is_functional_tensor, lambda _: "one of a transform that has ended: pass the one that was given to it"),
    (
        lambda tensor: tensor.layout is torch.sparse_coo,
        lambda tensor: f"{tensor.layout}: {_DENSE}, or sum it with hvd.sparse_allreduce_async",
    ),
    (lambda tensor: tensor.layout != torch.strided, lambda tensor: f"{tensor.layout}: {_DENSE}"),
    (
        lambda tensor: tensor.dtype not in DTYPES,
        lambda tensor: (
            f"of dtype {tensor.dtype}, which PyTorch cannot copy: pass its bytes, as tensor.view(torch.uint8)"
        ),
    ),
)

# Why there are no values to be read, or not all of what there is, and the way out.
_WITHOUT_VALUES: tuple[_Case, ...] = (
    (
        lambda tensor: tensor.is_meta,
        lambda _: "is on the meta device and has no values: make it on a real one, as to_empty() does",
    ),
    (
        lambda tensor: tensor.device.type not in ("cpu", "cuda"),
        lambda tensor: f"is on {tensor.device.type}: pass one on the CPU or a GPU, as tensor.cpu()",
    ),
    (
        lambda tensor: tensor._is_zerotensor(),
        lambda _: "has no memory, as zeros that PyTorch made up in autograd: clone() it",
    ),
    (
        _is_without_memory,
        lambda _: "has lost its memory, as where its storage was resized to 0: call this while it has values",
    ),
    (
        _has_tangent,
        lambda _: "carries a derivative of torch.autograd.forward_ad, which would be lost: detach() it",
    ),
)


def _kind(tensor: Tensor) -> str:
    return type(tensor).__name__
