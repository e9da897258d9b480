"""
Reduces tensors over ranks, including ops and dtypes that gloo and NCCL lack.

    flat tensor ── scale ── compress ── all ranks combined ── decompress ── divide ── scale ── in place

`allreduce`, `rows`, `packing` and `exchanges` call it; it uses the collectives of `comm.group`. An average is the sum,
divided: so the average of equal tensors is exactly that tensor. Tensors sent in 16 bits are divided before the sum
instead, so that the sum overflows no sooner than its terms. Integers are summed in wider types, and their average is
truncated towards zero. For booleans, a sum and a maximum are "any"; a product, a minimum and an average are "all".
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.flat_bytes import flat_of, fused, is_plain, own_memory, pieces_of, result_memory
from ..comm.group import Group
from ..comm.reduce_op import OP_OF_ENGINE, Adasum, Average, Max, Min, Product, ReduceOp, Sum
from ..comm.work import Work
from ..compression.casts import (
    AnyCompression,
    Compression,
    ResolvedCompression,
    check_compression,
    is_narrow,
)
from ..compression.custom import CustomCompression
from ..compression.kernels import divide
from ..errors import UnsupportedError, WrongTypeError
from ..log import log
from ..values import real_number, shown, whole_number
from .adasum import adasum_all_reduce

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# By the names that are sent, such as torch.int8.
DTYPE_OF = {str(dtype): dtype for dtype in (*WHOLE, *_FRACTIONS)}
DTYPES = frozenset(DTYPE_OF.values())

COMPRESSIONS: dict[str, ResolvedCompression] = {
    repr(known): known for known in (Compression.none, Compression.fp16, Compression.bf16)
}

# For a tensor of this size a collective of its own takes less time than a copy to those beside it, and back.
_LEAST_ALONE_BYTES = 2**20

_warned_of_integers = threading.Event()

_OP_OF_BOOLEANS = {Sum: Max, Max: Max, Min: Min, Product: Min}


@dataclass(frozen=True, slots=True)
class Reduction:
    """The arguments of a reduction over all ranks; equal on all of them."""

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: ResolvedCompression = Compression.none

    def check_dtype(self, tensor: Tensor, what: str) -> None:
        """Raises a ValueError if this reduction does not support the tensor's dtype."""
        if tensor.dtype not in DTYPES:
            # Horovod's words.
            raise ValueError(f"Tensor type {tensor.type()} is not supported. ({what})")
        if tensor.is_complex() and self.op in (Min, Max):
            raise ValueError(f"{what}: op=hvd.{self.op.name} does not work for complex tensors, which have no order")
        if self.op is Adasum and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedError(f"{what}: op=hvd.Adasum needs floats, and the tensor is {tensor.dtype}: use hvd.Sum")

    def check_wire(self, tensor: Tensor, wire: Tensor, of: str) -> None:
        """Raises a ValueError if this reduction does not support the wire that a compression has made of a tensor."""
        self.check_dtype(wire, of)
        if self.op is Adasum and real_numel(wire) != real_numel(tensor):
            raise ValueError(f"{of}: op=hvd.Adasum needs a compression that keeps the number of elements")

    def warn_of_averaged_integers(self, sources: Sequence[Tensor], divisor: int, group: Group, what: str) -> None:
        """Warns once, on rank 0, of averaged integers: Horovod truncates silently, and an accuracy can become 0."""
        if self.op is not Average or divisor == 1 or group.rank != 0 or _warned_of_integers.is_set():
            return
        if all(source.device.type == "cpu" and source.numel() == 1 and not source.item() for source in sources):
            return  # Horovod's idiom for a barrier: hvd.allreduce(torch.tensor(0), name="barrier")
        whole = next((source.dtype for source in sources if source.dtype in WHOLE and source.dtype != torch.bool), None)
        if whole is not None:
            _warned_of_integers.set()
            log.warning(
                "%s averages integers (%s), and truncates the averages, as Horovod does: the average of 3 and 4 is "
                "3. Average tensor.float() instead, or add up with op=hvd.Sum. This warning is shown once",
                what,
                whole,
            )

    def fused(self, group: Group, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Yields the indices of the tensors to send in one collective; equal on all ranks."""
        # Other engines add in an order that depends on the place in the collective.
        may_be_alone = self.op is not Adasum and all(map(group.reduces_in_one_pass, tensors))
        return fused(tensors, _LEAST_ALONE_BYTES if may_be_alone else None)

    def all_reduce(self, group: Group, flat: Tensor, segments: Sequence[int], divisor: int, what: str) -> None:
        """Replaces a flat contiguous tensor, in place, by its reduction over all ranks. Blocks until that is done.

        ``segments`` are the element counts of the tensors that it consists of, which Adasum treats separately. An
        average is the sum divided by ``divisor``. The result's bits are the same on every rank.
        """
        self.begin(group, flat, segments, divisor, what).finish()

    def all_reduced(self, group: Group, tensors: Sequence[Tensor], divisor: int, what: str) -> list[Tensor]:
        """Returns what `all_reduce` would make of each tensor, in new memory; they are of one dtype and device."""
        if len(tensors) == 1 and is_plain(tensors[0]) and self._needs_no_copy(group, tensors[0], divisor):
            return [self._all_reduced_in_one_pass(group, tensors[0], divisor, what)]
        counts = [tensor.numel() for tensor in tensors]
        flat = flat_of(tensors)
        self.all_reduce(group, flat, counts, divisor, what)
        pieces = zip(pieces_of(flat, counts), tensors, strict=True)
        return [own_memory(piece, flat).view(tensor.shape) for piece, tensor in pieces]

    def _all_reduced_in_one_pass(self, group: Group, tensor: Tensor, divisor: int, what: str) -> Tensor:
        """The same for one tensor, which the engine reads in place."""
        result = result_memory(tensor.shape, tensor)
        divides_there = self._is_averaged_by_engine(group, tensor, divisor)
        op = Sum if self.op is Average and not divides_there else self.op
        group.all_reduce_into(result, tensor, what, op).wait()
        if self._divides_after(result) and not divides_there:
            divide(result.view(-1), divisor)
        scale(result, self.postscale_factor)
        return result

    def begin(self, group: Group, flat: Tensor, segments: Sequence[int], divisor: int, what: str) -> Underway:
        """Begins `all_reduce`, and returns it as an `Underway`: the tensor must not be touched before its end."""
        if flat.numel() == 0:
            return Underway(None, lambda: None)
        values = self._as_real(flat)
        scale(values, self._factor_before(values, divisor))
        wire = self._compress(values)
        counts = [count * values.numel() // flat.numel() for count in segments]
        divides_there = self._is_averaged_by_engine(group, wire, divisor)
        work, total = self._begin_combining(group, wire, counts, what, Average if divides_there else Sum)

        def write() -> None:
            if self.op is Average and not _is_inexact(total):
                average(total, divisor)
            if total is not wire:
                wire.copy_(total)
            self._decompress(wire, values)
            if self._divides_after(wire) and not divides_there:
                divide(values, divisor)
            scale(values, self.postscale_factor)

        return Underway(work, write)

    def reduce_scatter(self, group: Group, parts: Sequence[Tensor], divisor: int, what: str) -> Tensor:
        """Returns this rank's part of the sum or average of all ranks' ``parts``, which are flat, and overwritten."""
        values = [self._as_real(part) for part in parts]
        for value in values:
            scale(value, self._factor_before(value, divisor))
        wires = [self._compress(value) for value in values]
        mine = wires[group.rank]
        sent, op = torch.cat(wires), Sum
        if mine.dtype is torch.bool and self.op is Sum:
            sent, op = sent.view(torch.uint8), Max
        elif mine.dtype is torch.int16 or (self.op is Average and not _is_inexact(mine)):
            sent = sent.to(_wide(mine.dtype))
        total = sent.new_empty(mine.numel())
        group.reduce_scatter(total, sent, [wire.numel() for wire in wires], what, op).wait()
        if self.op is Average and not _is_inexact(mine):
            average(total, divisor)
        mine.copy_(total)
        self._decompress(mine, values[group.rank])
        if self._divides_after(mine):
            divide(values[group.rank], divisor)
        scale(values[group.rank], self.postscale_factor)
        return parts[group.rank]

    def same(self) -> dict[str, Any]:
        """The values that ranks compare; a user's own compression is compared by its repr."""
        return {
            "op": self.op.name,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "compression": repr(self.compression),
        }

    def own(self) -> str | None:
        """The repr of a user's own compression, else None; ranks that have joined do not have that compression."""
        return repr(self.compression) if isinstance(self.compression, CustomCompression) else None

    def neutral(self, dtype: torch.dtype) -> float | int | bool:
        """The value that leaves a result unchanged, for a rank that has none to give; it must not be scaled."""
        if self.op is Product:
            return 1
        if self.op not in (Min, Max):
            return 0
        if dtype is torch.bool:
            return self.op is Min
        if dtype.is_floating_point:
            return float("inf") if self.op is Min else float("-inf")
        limits = torch.iinfo(dtype)
        return limits.max if self.op is Min else limits.min

    def wire_dtype(self, tensor: Tensor) -> torch.dtype:
        """The dtype in which the tensor is sent, unless a user's own compression packs it."""
        return self.compression.wire_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype

    def _as_real(self, tensor: Tensor) -> Tensor:
        """Returns complex numbers as pairs of real ones in the same memory; unchanged for a product."""
        return torch.view_as_real(tensor).view(-1) if tensor.is_complex() and self.op is not Product else tensor

    def _factor_before(self, values: Tensor, divisor: int) -> float:
        if self.op is Average and values.is_floating_point() and is_narrow(self.wire_dtype(values)):
            return self.prescale_factor / divisor
        return self.prescale_factor

    def _divides_after(self, wire: Tensor) -> bool:
        """Whether a sum of floats must be divided after the collective."""
        return self.op is Average and _is_inexact(wire) and not is_narrow(wire.dtype)

    def _is_averaged_by_engine(self, group: Group, wire: Tensor, divisor: int) -> bool:
        """Whether the engine also divides; equal on all ranks, since they must ask the engine for the same op."""
        return self._divides_after(wire) and divisor == group.size and group.reduces_in_one_pass(wire)

    def _needs_no_copy(self, group: Group, tensor: Tensor, divisor: int) -> bool:
        """Whether the engine can read the tensor as it is, and write the result elsewhere."""
        dtype = tensor.dtype
        return (
            tensor.numel() > 0
            and group.reduces_in_one_pass(tensor)
            and self.op in OP_OF_ENGINE.keys() | {Average}
            and (tensor.is_floating_point() or (dtype in WHOLE and dtype not in (torch.bool, torch.int16)))
            and (self.op is not Average or tensor.is_floating_point())
            and self.wire_dtype(tensor) is dtype
            and self._factor_before(tensor, divisor) == 1.0
        )

    def _compress(self, values: Tensor) -> Tensor:
        assert not isinstance(self.compression, CustomCompression), "`packing` calls those"
        return self.compression.compress(values) if values.is_floating_point() else values

    def _decompress(self, wire: Tensor, values: Tensor) -> None:
        if values.is_floating_point() and not isinstance(self.compression, CustomCompression):
            self.compression.decompress(wire, values)

    def _begin_combining(
        self, group: Group, wire: Tensor, segments: Sequence[int], what: str, average_by: ReduceOp
    ) -> tuple[Work | None, Tensor]:
        """Begins the collective; returns its work, or None if it is done, and the tensor that will have the result."""
        if self.op is Adasum:
            adasum_all_reduce(group, wire, segments, what)
            return None, wire
        if wire.is_complex():
            parts = group.all_gather(wire, what, [wire.nbytes] * group.size)
            wire.fill_(1)
            for part in parts:
                wire.mul_(part.view(wire.dtype))
            return None, wire
        if self.op is Average and not _is_inexact(wire):
            total = wire.to(_wide(wire.dtype))
            return group.all_reduce(total, what), total
        if wire.dtype is torch.bool:
            return group.all_reduce(wire.view(torch.uint8), what, _OP_OF_BOOLEANS[self.op]), wire
        total = wire.to(torch.int32) if wire.dtype is torch.int16 else wire
        return group.all_reduce(total, what, average_by if self.op is Average else self.op), total


class Underway(NamedTuple):
    """An all-reduce that has begun: its work, if there is something to wait for, and what is called once, after it."""

    work: Work | None
    write: Callable[[], None]

    def finish(self) -> None:
        """Waits, and writes the result into the tensor."""
        if self.work is not None:
            self.work.wait()
        self.write()


def make_reduction(
    what: str,
    average: bool | None,
    op: object,
    prescale_factor: float,
    postscale_factor: float,
    compression: AnyCompression = Compression.none,
) -> Reduction:
    """Checks the user's arguments, and returns the `Reduction`; ``average`` is Horovod's older form of ``op``."""
    if average is not None:
        # Horovod's words, both.
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if isinstance(average, str):
            raise ValueError(
                f"{what}: the argument after the tensor is `average`, Horovod's older form of `op`, and "
                f"{shown(average)} is neither True nor False: if it is the operation's name, pass name={shown(average)}"
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=4,
        )
        if real_number(average) not in (0.0, 1.0):
            raise ValueError(f"{what}: average={shown(average)} is neither True nor False: use op=hvd.Average instead")
        op = Average if average else Sum
    return Reduction(
        Average if op is None else _known_op(what, op),
        _check_factor(what, "prescale_factor", prescale_factor),
        _check_factor(what, "postscale_factor", postscale_factor),
        check_compression(compression),
    )


def _known_op(what: str, op: object) -> ReduceOp:
    try:
        # Horovod's numbers for the ops do not include bools.
        return ReduceOp(whole_number(op))  # type: ignore[arg-type]  # None is refused by it
    except ValueError:
        names = ", ".join(f"hvd.{member.name}" for member in ReduceOp)
        kind = WrongTypeError if whole_number(op) is None else UnsupportedError
        raise kind(f"{what}: op={shown(op)} is not one of {names}") from None


def _check_factor(what: str, argument: str, value: object) -> float:
    factor = real_number(value)
    if factor is None:
        raise TypeError(f"{what}: {argument}={shown(value)} is not a number: pass one, such as 0.5")
    if not math.isfinite(factor):
        raise UnsupportedError(f"{what}: {argument}={shown(value)} is not finite: pass a finite number, such as 0.5")
    return factor


def scale(values: Tensor, factor: float) -> None:
    """Multiplies in place; integers are truncated towards zero."""
    if factor == 1.0:
        return
    if _is_inexact(values):
        values.mul_(factor)
    else:
        values.copy_((values.double() * factor).to(torch.int64))


def average(total: Tensor, divisor: int) -> None:
    """Divides a contiguous tensor in place; integers are truncated towards zero."""
    if _is_inexact(total):
        divide((torch.view_as_real(total) if total.is_complex() else total).view(-1), divisor)
    else:
        total.div_(divisor, rounding_mode="trunc")


def real_numel(tensor: Tensor) -> int:
    """Returns the number of real numbers of a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _is_inexact(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which many of these integers, or booleans, can be summed."""
    return torch.int32 if dtype.itemsize <= 2 else torch.int64
