"""
Codecs: formats whose wires cannot be summed, such as int8 with a scale per block, for slow links between hosts.

    values ── encode ── wire (bytes) ── sent ── decode ── values, summed over the ranks by `exchanges.host_sums`

A wire is encoded and decoded in pieces that stay in a core's cache, by `Codec.encode_all` and `Codec.add_decoded`.
Decoding is the same multiplication on every rank, and the sums are in rank order, so all ranks get equal bits.

The formats are those of CGX (arXiv 2111.08617) and ZeRO++ (arXiv 2306.10209): numbers are rounded to multiples of a
scale, which each block of neighbours has of its own. With error feedback (arXiv 1901.09847) a rank adds what rounding
has taken from a gradient to the next one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .codec_kernels import kernels_for
from .codec_kernels import working_dtype as working_dtype  # noqa: PLC0414 - others have it from here

# Elements that are encoded at a time: a piece and its copies stay in the cache, and are too few for OpenMP's threads.
# Where there are no such threads a piece of hvdlite's own formats is larger: each call takes as long as computing some
# thousands. Of other formats, a wire is that of one piece after the other, so pieces must be equal on all hosts.
_PIECE, _PIECE_OF_ONE_THREAD = 32 * 1024, 64 * 1024

_MOST = torch.finfo(torch.float32).max

# With a Python number a product takes longer.
_SIXTEENTH = torch.tensor(1 / 16, device="cpu", dtype=torch.float32)


class Codec(ABC):
    """The interface of a format that cannot be summed: turns floats into bytes, and these back into floats.

    It has no state, and gets whole blocks of `block` numbers: several, one after the other, in a flat tensor that is
    float32, or float64 for float64 gradients, on the gradients' device. Numbers that are not finite must decode to
    some that are not, so that a GradScaler finds them.
    """

    block: ClassVar[int] = 256
    """The number of elements that are encoded together. ``nbytes(block)`` must be a multiple of 4."""

    error_feedback: ClassVar[bool] = True
    """Whether what a wire cannot hold is kept, and added to the next step's gradients. It takes their memory."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Returns the size of the wire of ``numel`` values, a multiple of `block`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Writes the wire of ``values`` into ``out``, a flat tensor of uint8. It may overwrite ``values``."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Writes the values of a wire into ``out``, of the dtype that `encode` was given."""

    def encode_all(self, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None:
        """Writes the wire of ``values`` times ``factor`` plus ``residual``, which gets what the wire does not hold.

        In blocks where that is not finite, or near the largest float, the residual stays as it was. ``values`` are any
        number of floats of any dtype, in a flat tensor, and stay unchanged; the wire has `wire_bytes` of them. It calls
        `encode` and `decode` on pieces, of the same lengths on every rank.
        """
        if not values.numel():
            return
        step = _piece_of_wire(self.block)
        given = values.new_empty(step, dtype=working_dtype(values.dtype))
        parts = torch.split(values, step)
        kept_parts: Sequence[Tensor | None] = [None] * len(parts) if residual is None else torch.split(residual, step)
        for part, kept, sent in zip(parts, kept_parts, torch.split(wire, self.nbytes(step)), strict=True):
            padded, count = given[: _whole(len(part), self.block)], len(part)
            padded[count:].zero_()
            _write_sum(padded[:count], part, factor, kept)
            if kept is None:
                self.encode(padded, sent)
                continue
            wanted = padded.clone()
            self.encode(padded, sent)
            self.decode(sent, padded)
            # The sum may overflow where all terms are finite, but it is faster.
            if math.isfinite(float(padded.sum())) or bool(padded.isfinite().all()):
                torch.sub(wanted[:count], padded[:count], out=kept)

    def add_decoded(self, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Writes the sum of what equally long wires hold into ``out``, in the order of ``wires``, times ``factor``.

        ``out`` is flat, and what `encode_all` was given had its length. The sum is rounded to its dtype once.
        """
        if not out.numel():
            return
        step = _piece_of_wire(self.block)
        total = out.new_empty(step, dtype=working_dtype(out.dtype))
        term = torch.empty_like(total)
        pieces = [torch.split(wire, self.nbytes(step)) for wire in wires]
        for part, first, *others in zip(torch.split(out, step), *pieces, strict=True):
            length = _whole(len(part), self.block)
            self.decode(first, total[:length])
            for other in others:
                self.decode(other, term[:length])
                total[:length].add_(term[:length])
            if factor != 1.0:
                total[:length].mul_(factor)
            part.copy_(total[: len(part)])

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


class _Scaled(Codec):
    """Rounds to multiples of a float32 scale per block, up to ``most`` times it: all scales first, then the multiples.

    The scale is the largest number, or `tiny` if that is larger, divided by ``most``. A multiple is a number times the
    inverse of the scale, rounded to the nearest, ties to even. Each step is rounded by itself, to float32 or float64. A
    block with infinities or NaN has NaN as its scale.

    On a GPU kernels do it, with the same bits; see `codec_kernels`.
    """

    tiny: ClassVar[float] = 1e-30
    """Blocks whose largest number is smaller are rounded as if it was this: a scale must have an inverse."""

    most: ClassVar[float]

    per_byte: ClassVar[int]
    """How many parts of a block share bytes."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        self.encode_all(values, out, None)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        self.add_decoded([wire], out)

    @abstractmethod
    def _pack(self, parts: Sequence[Tensor], codes: Tensor) -> None:
        """Writes whole numbers, `per_byte` tensors of floats, into ``codes``, int8; all of shape (blocks, length)."""

    @abstractmethod
    def _unpack(self, codes: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes the whole numbers of ``codes`` into ``parts``, which are as in `_pack`."""

    def encode_all(self, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None:
        kernels = kernels_for(type(self), values, residual)
        if kernels is None:
            self.encode_in_torch(values, wire, residual, factor)
        else:
            kernels.encode(values, wire, residual, factor)

    def encode_in_torch(self, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None:
        """Does `encode_all` without kernels, on any device."""
        scales, codes = self._split(wire, values.numel())
        for run, of_blocks, size in self._runs(values):
            kept = None if residual is None else residual[run]
            self._encode(values[run], kept, scales[of_blocks], codes[of_blocks], size, factor)

    def _encode(
        self, values: Tensor, residual: Tensor | None, scales: Tensor, codes: Tensor, size: int, factor: float
    ) -> None:
        """Encodes ``size`` values at a time, of which there are a multiple. What can be is made before the loop."""
        blocks, count = -(-size // self.block), values.numel() // size
        wanted = torch.zeros(blocks, self.block, dtype=working_dtype(values.dtype), device=values.device)
        multiples = torch.empty_like(wanted)
        largest, inverse = wanted.new_empty(blocks, 1), wanted.new_empty(blocks, 1)
        given, held = wanted.view(-1)[:size], multiples.view(-1)[:size]
        in_parts = self._planes(multiples)
        # Tensors, since for Python numbers a call takes twice as long, and a GPU multiplies by the inverse.
        tiny, most = wanted.new_full((), self.tiny), wanted.new_full((), self.most)
        all_kept: Sequence[Tensor | None] = [None] * count if residual is None else torch.split(residual, size)
        pieces = zip(
            torch.split(values, size), all_kept, torch.split(scales, blocks), torch.split(codes, blocks), strict=True
        )
        for part, kept, scale, code in pieces:
            _write_sum(given, part, factor, kept)
            torch.abs(wanted, out=multiples)
            torch.amax(multiples, 1, keepdim=True, out=largest)
            torch.div(torch.maximum(largest, tiny, out=largest), most, out=scale)
            bad = self._bad_scales(scale)
            torch.reciprocal(scale.to(wanted.dtype), out=inverse)
            torch.mul(wanted, inverse, out=multiples).round_()
            self._pack(in_parts, code)
            if kept is None:
                continue
            multiples.mul_(scale)
            if bad is None:
                torch.sub(given, held, out=kept)
            else:
                is_bad = bad.expand_as(wanted).reshape(-1)[:size]
                kept.copy_(torch.where(is_bad, kept, given - held))

    def add_decoded(self, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        kernels = kernels_for(type(self), out)
        if kernels is None:
            self.add_decoded_in_torch(wires, out, factor)
        else:
            kernels.add_decoded(wires, out, factor)

    def add_decoded_in_torch(self, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Does `add_decoded` without kernels, on any device."""
        pairs = [self._split(wire, out.numel()) for wire in wires]
        for run, of_blocks, size in self._runs(out):
            self._decode([(scales[of_blocks], codes[of_blocks]) for scales, codes in pairs], out[run], size, factor)

    def _decode(self, wires: Sequence[tuple[Tensor, Tensor]], out: Tensor, size: int, factor: float) -> None:
        """Decodes as many values at a time as `_encode` does, from the scales and codes of each wire."""
        blocks = -(-size // self.block)
        total = out.new_empty(blocks, self.block, dtype=working_dtype(out.dtype))
        term = torch.empty_like(total)
        term_in_parts = self._planes(term)
        is_direct = out.dtype == total.dtype and size == total.numel()
        terms = zip(
            *(zip(torch.split(scales, blocks), torch.split(codes, blocks), strict=True) for scales, codes in wires),
            strict=True,
        )
        for part, ((scale, code), *others) in zip(torch.split(out, size), terms, strict=True):
            if is_direct:
                total = part.view(blocks, -1)
            self._unpack(code, self._planes(total))
            total.mul_(scale)
            for other_scale, other_code in others:
                self._unpack(other_code, term_in_parts)
                total.add_(term.mul_(other_scale))
            if factor != 1.0:
                total.mul_(factor)
            if not is_direct:
                part.copy_(total.view(-1)[:size])

    def _runs(self, values: Tensor) -> list[tuple[slice, slice, int]]:
        """Returns parts of the values, their blocks, and how many values each piece has: all alike, and the last."""
        numel = values.numel()
        # On a GPU all at once.
        step = max(numel, 1) if values.is_cuda else _piece_of(self.block)
        whole = numel // step * step
        runs = [(0, whole, step), (whole, numel, numel - whole)]
        return [
            (slice(start, stop), slice(start // self.block, -(-stop // self.block)), size)
            for start, stop, size in runs
            if start < stop
        ]

    def _planes(self, multiples: Tensor) -> Sequence[Tensor]:
        """Returns the parts of blocks that share bytes, as views of shape (blocks, length)."""
        return multiples.view(len(multiples), self.per_byte, -1).unbind(1)

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns the scales in a wire of ``numel`` values, of shape (blocks, 1), and its other bytes, (blocks, …)."""
        blocks = -(-numel // self.block)
        scales, codes = wire[: 4 * blocks].view(torch.float32), wire[4 * blocks :].view(torch.int8)
        return scales.view(-1, 1), codes.view(blocks, self.block // self.per_byte)

    def _bad_scales(self, scales: Tensor) -> Tensor | None:
        """Makes scales NaN whose multiples may be infinite, and returns which. On a CPU None, if there are none."""
        if not scales.is_cuda and scales.sum().item() * self.most < _MOST:
            return None
        bad = ~(scales * self.most).isfinite()
        scales.masked_fill_(bad, math.nan)
        return bad


class Int8(_Scaled):
    """8-bit integers, and a scale for each 256 of them: about a quarter of float32."""

    most = 127.0
    per_byte = 1

    def nbytes(self, numel: int) -> int:
        return numel + 4 * (numel // self.block)

    def _pack(self, parts: Sequence[Tensor], codes: Tensor) -> None:
        codes.copy_(parts[0])

    def _unpack(self, codes: Tensor, parts: Sequence[Tensor]) -> None:
        parts[0].copy_(codes)

    def __repr__(self) -> str:
        return "Compression.int8"


class Int4(_Scaled):
    """4-bit integers from -7 to 7, and a scale for each 256 of them: about an eighth of float32.

    A byte is a number of the first half of its block, plus 16 times one of the second half: from -119 to 119.
    """

    most = 7.0
    per_byte = 2

    def nbytes(self, numel: int) -> int:
        return numel // 2 + 4 * (numel // self.block)

    def _pack(self, parts: Sequence[Tensor], codes: Tensor) -> None:
        first, second = parts
        codes.copy_(torch.add(first, second, alpha=16))

    def _unpack(self, codes: Tensor, parts: Sequence[Tensor]) -> None:
        first, second = parts
        first.copy_(codes)
        # The first is at most 7, less than half of 16.
        torch.mul(first, _SIXTEENTH, out=second).round_()
        first.sub_(second, alpha=16)

    def __repr__(self) -> str:
        return "Compression.int4"


def check_blocks(codec: Codec) -> None:
    if not isinstance(codec.block, int) or codec.block < 1 or codec.nbytes(codec.block) % 4:
        raise ValueError(
            f"compression={codec!r}: its block must be a positive number of elements whose nbytes is a multiple "
            f"of 4, and it is {codec.block!r}"
        )


def words_of_wires(form: object) -> str:
    """Returns the words by which ranks compare a compression: its repr, and what wires of a user's codec depend on."""
    if not isinstance(form, Codec) or type(form) in (Int8, Int4):
        return repr(form)
    feedback = "with" if form.error_feedback else "without"
    return f"{form!r} (blocks of {form.block} numbers in {form.nbytes(form.block)} bytes, {feedback} error feedback)"


def wire_bytes(codec: Codec, numel: int) -> int:
    """Returns the size of the wire that `Codec.encode_all` writes for ``numel`` values, any number."""
    step = _piece_of_wire(codec.block)
    pieces, rest = divmod(numel, step)
    # Not the size for all of them at once: each piece may have bytes of its own, such as a header.
    return pieces * codec.nbytes(step) + (codec.nbytes(_whole(rest, codec.block)) if rest else 0)


def _whole(numel: int, block: int) -> int:
    return -(-numel // block) * block


def _piece_of_wire(block: int) -> int:
    """Returns the number of elements for each call of a codec's `encode` and `decode`, the same on every rank."""
    return max(1, _PIECE // block) * block


def _piece_of(block: int) -> int:
    """Returns the number of elements of the blocks that are encoded at a time, where no wire depends on it."""
    return max(1, elements_at_a_time() // block) * block


def elements_at_a_time() -> int:
    """Returns how many numbers to compute at a time, so that they stay in the cache, and on this thread."""
    return _PIECE if torch.get_num_threads() > 1 else _PIECE_OF_ONE_THREAD


def _write_sum(out: Tensor, values: Tensor, factor: float, residual: Tensor | None) -> None:
    """Writes ``values`` times ``factor``, plus ``residual``, into ``out``. All are equally long."""
    if residual is not None and factor == 1.0 and values.dtype == out.dtype:
        torch.add(values, residual, out=out)
        return
    out.copy_(values)
    if factor != 1.0:
        out.mul_(factor)
    if residual is not None:
        out.add_(residual)
