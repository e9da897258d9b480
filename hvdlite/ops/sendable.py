"""
Checks that tensors can be sent to other ranks, for every function that takes tensors, before it sends anything.

    tensor ── check_sendable ── not sendable: a TypeError or a ValueError, with the way out
                             └─ sendable: plain_tensor ── a plain tensor over the same memory, whose bytes are sent

`ops` and `optim` call it. Dense tensors on the CPU or a GPU can be sent, including conjugated, negated and expanded
ones, and those of a subclass that only adds methods. Tensors that store their values in another form, such as sparse
ones, or have no memory, cannot.
"""

from __future__ import annotations

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
# The dtypes that PyTorch can copy; a tensor of another one cannot be put into contiguous memory.
DTYPES = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))

# Types without dispatch hooks, whose memory is what it seems to be.
_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_NO_DISPATCH = Tensor.__torch_dispatch__

# The way out for tensors of known subclasses, by the subclass's name.
_INSIDE = {
    "DTensor": "pass this rank's part, as tensor.to_local()",
    "FakeTensor": "it has no values: make it outside of FakeTensorMode",
    "MaskedTensor": "pass its values and its mask, as tensor.get_data() and tensor.get_mask()",
    "AsyncCollectiveTensor": "call tensor.wait() first, and pass its result",
}


def is_sendable(tensor: Tensor) -> bool:
    """Whether `check_sendable` accepts the tensor."""
    try:
        check_sendable(tensor, "")
    except (TypeError, ValueError):
        return False
    return True


def check_sendable(tensor: object, what: str, subject: str = "the tensor") -> Tensor:
    """Returns the tensor, as a plain one with its history, if its values can be sent; else raises an error."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: {type(tensor).__name__} is not a tensor: pass torch.tensor(value)")
    check_is_outside(what)
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{what}: {subject} is not initialized yet: run a batch through its lazy module first")
    # A subclass may override the properties that are read below.
    with torch._C.DisableTorchFunctionSubclass():
        if (form := _other_form(tensor)) is not None:
            # Horovod raises a ValueError for them, where it gets that far.
            raise WrongTypeError(f"{what}: {subject} is {form}")
        if (lack := _lack(tensor)) is not None:
            raise ValueError(f"{what}: {subject} {lack}")
        return tensor if type(tensor) in _PLAIN_TYPES else tensor.as_subclass(Tensor)


def check_writable(tensor: Tensor, what: str, subject: str = "the tensor") -> None:
    """Raises a ValueError if a tensor cannot be overwritten: an error during the operation would hang the others."""
    with torch._C.DisableTorchFunctionSubclass():
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{what}: elements of {subject} share memory, as after expand(): clone() it")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{what}: {subject} was made in torch.inference_mode() and can change only there: clone() it"
            )


def layout_of(value: object) -> torch.layout | None:
    """The layout of a tensor, whatever its subclass reports; None for a lazy tensor or another object."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return value.layout


def plain_tensor(tensor: Tensor) -> Tensor:
    """Returns a plain tensor over the same memory, without history or subclass, of one that has passed the check."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def check_is_outside(what: str) -> None:
    """Raises a TypeError inside FakeTensorMode or a torch.func transform."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise TypeError(f"{what}: called inside FakeTensorMode, where tensors have no values: call it outside")
    # This includes torch.func.functionalize.
    if torch._C._are_functorch_transforms_active():
        raise TypeError(
            f"{what}: called inside a torch.func transform, such as vmap or grad, which cannot use collectives: call "
            "it outside"
        )


def _is_without_memory(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = int(tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < needed


def _has_tangent(tensor: Tensor) -> bool:
    # A level below 0 means that there are no dual tensors.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]  # torch's


_DENSE = "pass a dense one, as tensor.to_dense()"


def _other_form(tensor: Tensor) -> str | None:  # noqa: PLR0911  # a line for each form
    """In what form the values are that cannot be sent, and the way out; None if they can be sent as they are.

    A later check is valid only for a tensor for which all earlier ones are false.
    """
    if tensor.is_nested:
        return "a nested one: pass each of tensor.unbind()"
    if tensor.is_quantized or tensor.dtype in _QUANTIZED:
        return "quantized: pass tensor.int_repr(), or tensor.dequantize()"
    if type(tensor) not in _PLAIN_TYPES and type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        kind = type(tensor).__name__
        return f"a {kind}: {_INSIDE.get(kind, 'pass a plain tensor')}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of a torch.func transform, such as vmap or grad: pass the tensor that the transform was given"
    if torch._is_functional_tensor(tensor):
        return "a tensor of a transform that has ended: pass the tensor that the transform was given"
    if tensor.layout is torch.sparse_coo:
        return f"{tensor.layout}: {_DENSE}, or sum it with hvd.sparse_allreduce_async"
    if tensor.layout != torch.strided:
        return f"{tensor.layout}: {_DENSE}"
    if tensor.dtype not in DTYPES:
        return f"of dtype {tensor.dtype}, which PyTorch cannot copy: pass its bytes, as tensor.view(torch.uint8)"
    return None


def _lack(tensor: Tensor) -> str | None:
    """Why values are missing or would be lost, and the way out; None if all is well. The order matters as above."""
    if tensor.is_meta:
        return "is on the meta device and has no values: move its module to a real device first, as with to_empty()"
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"is on {tensor.device.type}: pass one on the CPU or a GPU, as tensor.cpu()"
    if tensor._is_zerotensor():
        return "has no memory, because autograd made it as a symbolic zero: clone() it"
    if _is_without_memory(tensor):
        return "has lost its memory, as after its storage was resized to 0: call this while it has values"
    if _has_tangent(tensor):
        return "carries a derivative of torch.autograd.forward_ad, which would be lost: detach() it"
    return None
