"""int8 and int4 with a scale per block: as their formulas say, and what a wire does not hold is in the residual."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_kinds import KINDS, samples
from hypothesis import example, given
from hypothesis import strategies as st

from hvdlite.compression.codecs import Codec, Int4, Int8, wire_bytes

CODECS = {"int8": (Int8(), 127.0), "int4": (Int4(), 7.0)}

both = pytest.mark.parametrize("name", CODECS)


def formula(values: torch.Tensor, most: float, block: int = 256) -> np.ndarray:
    """Rounds each block to multiples of its largest number, 1e-30 at least, / ``most``."""
    padded = np.zeros(-(-len(values) // block) * block, np.float32)
    padded[: len(values)] = values.numpy()
    blocks = padded.reshape(-1, block)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(1e-30)) / np.float32(most)
    inverse = np.float32(1) / scales
    return (np.rint(blocks * inverse) * scales).reshape(-1)[: len(values)]


class ScalesFirst(Codec):
    """Bytes with a scale for each block; all scales first, and before them a header."""

    block = 64

    def nbytes(self, numel: int) -> int:
        return 4 + numel + 4 * (numel // self.block)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        blocks = values.view(-1, self.block)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-20).div(127)
        behind = 4 + 4 * len(blocks)
        out[:4].fill_(7)
        out[4:behind].view(torch.float32).copy_(scales.view(-1))
        out[behind:].view(torch.int8).copy_((blocks / scales).round().view(-1))

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        behind = 4 + 4 * (len(out) // self.block)
        scales = wire[4:behind].view(torch.float32).view(-1, 1)
        torch.mul(wire[behind:].view(torch.int8).view(-1, self.block), scales, out=out.view(-1, self.block))


@pytest.fixture
def threads():
    """Restores the number of PyTorch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sent(codec: Codec, values: torch.Tensor, residual: torch.Tensor | None = None, factor: float = 1.0):
    wire = torch.empty(wire_bytes(codec, values.numel()), dtype=torch.uint8)
    codec.encode_all(values, wire, residual, factor)
    return wire


def received(codec: Codec, *wires: torch.Tensor, like: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    out = torch.empty_like(like)
    codec.add_decoded(wires, out, factor)
    return out


@both
@example(kind="ordinary", numel=100_000, seed=0)
@given(kind=st.sampled_from(KINDS), numel=st.integers(1, 3000), seed=st.integers(0, 9))
def test_a_wire_holds_what_the_formula_says(name, kind, numel, seed):
    codec, most = CODECS[name]
    values = samples(kind, numel, seed)
    before = values.clone()
    np.testing.assert_array_equal(
        received(codec, sent(codec, values), like=values).numpy(), formula(values, most), strict=True
    )
    assert torch.equal(values, before)


@both
@given(kind=st.sampled_from(KINDS), numel=st.integers(1, 3000), seed=st.integers(0, 9))
def test_what_was_sent_and_the_residual_are_exactly_what_was_to_be_sent(name, kind, numel, seed):
    codec, _ = CODECS[name]
    values, residual = samples(kind, numel, seed), samples("ordinary", numel, seed + 1)
    wanted = values + residual
    wire = sent(codec, values, residual)
    got = received(codec, wire, like=values)
    assert torch.equal(got.double() + residual.double(), wanted.double())


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_wires_of_all_ranks_are_added_in_their_order_and_rounded_once(name, dtype):
    codec, _ = CODECS[name]
    parts = [samples("ordinary", 40_000, seed).to(dtype) for seed in range(3)]
    wires = [sent(codec, part) for part in parts]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    one, two, three = (received(codec, wire, like=part.to(wide)) for wire, part in zip(wires, parts, strict=True))
    assert torch.equal(received(codec, *wires, like=parts[0]), (one + two + three).to(dtype))
    half = received(codec, *wires, like=parts[0], factor=0.5)
    assert torch.equal(half, ((one + two + three) * 0.5).to(dtype))


@both
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_arrive_as_such_and_leave_no_trace_in_the_residual(name, bad):
    codec, _ = CODECS[name]
    values, residual = samples("ordinary", 1000, 0), samples("ordinary", 1000, 1)
    values[300] = bad
    before = residual.clone()
    got = received(codec, sent(codec, values, residual), like=values)
    assert not got[256:512].isfinite().any()
    assert torch.equal(residual[256:512], before[256:512])
    for others in (slice(0, 256), slice(512, 1000)):
        assert torch.equal(got[others].double() + residual[others], (values + before)[others].double())


@both
@pytest.mark.parametrize("size", [3e38, 3.4e38, torch.finfo(torch.float32).max])
def test_the_largest_of_all_floats_leave_no_infinity_in_the_residual(name, size):
    codec, most = CODECS[name]
    values, residual = torch.full((40_000,), size), torch.zeros(40_000)
    got = received(codec, sent(codec, values, residual), like=values)
    assert residual.isfinite().all()
    with np.errstate(over="ignore"):
        assert got.isfinite().all() == np.isfinite(formula(values, most)).all()
    assert got.isfinite().all() or not got.isfinite().any()


@both
def test_a_wire_is_a_quarter_or_an_eighth_and_the_scales(name):
    codec, _ = CODECS[name]
    assert wire_bytes(codec, 1_000_000) == {"int8": 1_000_192 + 15_628, "int4": 500_096 + 15_628}[name]
    assert wire_bytes(codec, 0) == 0


@pytest.mark.parametrize("numel", [0, 100, 64 * 1024, 100_000])
def test_a_wire_of_ones_own_codec_is_read_alike_with_any_number_of_threads(numel, threads):
    codec, values = ScalesFirst(), samples("ordinary", numel, 0)
    torch.set_num_threads(1)
    wire = sent(codec, values)
    alone = received(codec, wire, like=values)
    torch.set_num_threads(2)
    assert torch.equal(received(codec, wire, like=values), alone)
    assert torch.equal(sent(codec, values), wire)
    assert torch.allclose(alone, values, atol=0.02)
