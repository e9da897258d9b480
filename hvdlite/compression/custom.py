"""
`CustomCompression`: calls a user's own compression, one tensor at a time, and checks the wire that it returns.

    tensor ── compress ── wire, checked ── (sent by the caller) ── decompress ── tensor

`ops.packing` calls it. In hvdlite's style a compression is an object with ``compress(buffer)`` and ``decompress(wire,
out)``. In Horovod's style it is a class whose two static methods pass a context along. Programs written for Horovod
derive from its classes, which are here too, or call their methods; `casts` maps these to hvdlite's own. Any exception
in a compression is raised again as a ValueError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import words_of


class Compressor:
    """The base class of Horovod's compressions. Your own overrides these two static methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Returns the decompressed tensor; ``ctx`` is the context that `compress` returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors that are wider than ``dtype`` to it. Sends other tensors uncompressed."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        is_wider = tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize
        return (tensor.to(cls.dtype) if is_wider else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Casts floating-point tensors to bfloat16, which Horovod does not have."""

    dtype = torch.bfloat16


class Compression:
    """The built-in compressions, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


@dataclass(slots=True)
class Packed:
    """The wire of one tensor, and the data needed to decompress it."""

    wire: Tensor
    # In Horovod's style: the context that ``compress`` returned.
    context: Any = None
    # In hvdlite's style: the tensor that ``compress`` was given, and that ``decompress`` must write into.
    given: Tensor | None = None
    # Whether the tensor is sent uncompressed.
    is_as_it_was: bool = False


class CustomCompression:
    """Calls a user's own compression, in hvdlite's or Horovod's style."""

    def __init__(self, given: Any, *, takes_each: bool) -> None:
        """``takes_each``: it is in Horovod's style, and gets each gradient alone, in its shape."""
        self._given = given
        self.takes_each = takes_each

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype by which gradients are scaled: their own, since the wire's is known only later."""
        return dtype

    def pack(self, tensor: Tensor, of: str) -> Packed:
        """Compresses a contiguous tensor, which messages call ``of``. The wire is contiguous, and may share its memory.

        A compression in hvdlite's style gets real floats only: complex numbers as pairs of floats, and no integers,
        which are sent uncompressed. Raises TypeError or ValueError for an invalid wire.
        """
        given = None
        if self.takes_each:
            call = "compress(tensor)"
            pair = self._call(call, of, self._given.compress, tensor)
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Tensor)):
                raise TypeError(f"compression={self!r}: {call} returned {_words(pair)}, not (tensor, ctx), for {of}")
            wire, context = pair
        else:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return Packed(tensor, is_as_it_was=True)
            call, context, given = "compress(buffer)", None, as_real(tensor)
            wire = self._call(call, of, self._given.compress, given)
            if not isinstance(wire, Tensor):
                raise TypeError(
                    f"compression={self!r}: {call} returned {_words(wire)}, not a tensor, for {of} (one in Horovod's "
                    "manner, which returns a pair, is passed as its class, or derived from Horovod's Compressor)"
                )
        self._require_carried(wire, tensor, f"{call} returned", of)
        # The same tensor object if possible, since `decompress` may rely on its identity.
        travels = wire.is_contiguous() and not (wire.is_conj() or wire.is_neg() or wire.requires_grad)
        carried = wire if travels else wire.detach().contiguous().resolve_conj().resolve_neg()
        return Packed(carried, context, given)

    def unpack(self, packed: Packed, out: Tensor, of: str) -> None:
        """Decompresses the wire, after the ranks' were combined, into ``out``, the tensor that was packed."""
        if packed.is_as_it_was:
            if packed.wire is not out:
                out.copy_(packed.wire)
            return
        if not self.takes_each:
            given = as_real(out) if packed.given is None else packed.given
            self._call("decompress(wire, out)", of, self._given.decompress, packed.wire, given)
            return
        call = "decompress(tensor, ctx)"
        result = self._call(call, of, self._given.decompress, packed.wire, packed.context)
        if not isinstance(result, Tensor):
            raise TypeError(f"compression={self!r}: {call} returned {_words(result)}, not a tensor, for {of}")
        self._require_carried(result, out, f"{call} returned", of)
        if result.shape != out.shape:
            raise ValueError(
                f"compression={self!r}: {call} returned a tensor of shape {tuple(result.shape)} for {of}, which has "
                f"shape {tuple(out.shape)}"
            )
        if result is not out:
            out.copy_(result)

    def _call(self, call: str, of: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with torch.no_grad():
                return method(*arguments)
        except Exception as error:
            raise ValueError(
                f"compression={self!r}: {call} raised {type(error).__name__} for {of}: {words_of(error)}"
            ) from error

    def _require_carried(self, result: Tensor, like: Tensor, what: str, of: str) -> None:
        """Raises ValueError unless ``result`` is a dense tensor on the device of ``like``."""
        is_dense = result.layout is torch.strided and not result.is_quantized and not result.is_nested
        if not is_dense:
            kind = "a quantized" if result.is_quantized else f"a {result.layout}"
            raise ValueError(f"compression={self!r}: {what} {kind} tensor for {of}, not a dense one")
        if result.device != like.device:
            raise ValueError(
                f"compression={self!r}: {what} a tensor on {result.device} for {of}, which is on {like.device}"
            )

    def __repr__(self) -> str:
        kind: Any = self._given if isinstance(self._given, type) else type(self._given)
        if kind is not self._given and kind.__repr__ is not object.__repr__:
            return repr(self._given)
        return f"{kind.__module__}.{kind.__qualname__}"


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _words(result: object) -> str:
    if result is None:
        return "None"
    if isinstance(result, tuple):
        return f"({', '.join([type(each).__name__ for each in result])})"
    return type(result).__name__
