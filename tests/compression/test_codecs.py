"""int8 and int4 with a scale per block: as their formulas say, and what a wire does not hold is in the residual."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hvdlite.compression.codecs import Codec, Int4, Int8, add_decoded, encode_all, wire_bytes

CODECS = {"int8": (Int8(), 127.0), "int4": (Int4(), 7.0)}
KINDS = ["ordinary", "zeros", "huge", "denormal", "tiny", "mixed", "one large", "ties"]

both = pytest.mark.parametrize("name", CODECS)


def samples(kind: str, numel: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    ordinary = random.standard_normal(numel)
    values = {
        "ordinary": ordinary,
        "zeros": np.zeros(numel),
        "huge": ordinary * 1e38,
        "denormal": ordinary * 1e-40,
        "tiny": ordinary * 1e-29,
        "mixed": ordinary * 10.0 ** random.integers(-20, 20, numel),
        "one large": np.where(np.arange(numel) == numel // 2, 1e6, ordinary * 1e-3),
        "ties": random.integers(-254, 255, numel) / 2.0,
    }[kind]
    return torch.from_numpy(np.clip(values, -3e38, 3e38).astype(np.float32))


def formula(values: torch.Tensor, most: float, block: int = 256) -> np.ndarray:
    """Rounds each block to multiples of its largest number / ``most``."""
    padded = np.zeros(-(-len(values) // block) * block, np.float32)
    padded[: len(values)] = values.numpy()
    blocks = padded.reshape(-1, block)
    largest = np.abs(blocks).max(1, keepdims=True)
    scales = np.where(largest < 1e-30, 0, largest / np.float32(most)).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, 0, np.float32(1) / scales).astype(np.float32)
    return (np.rint(blocks * inverse) * scales).reshape(-1)[: len(values)]


def sent(codec: Codec, values: torch.Tensor, residual: torch.Tensor | None = None, factor: float = 1.0):
    wire = torch.empty(wire_bytes(codec, values.numel()), dtype=torch.uint8)
    encode_all(codec, values, wire, residual, factor)
    return wire


def received(codec: Codec, *wires: torch.Tensor, like: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    out = torch.empty_like(like)
    add_decoded(codec, wires, out, factor)
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
    assert got[:256].isfinite().all()
    assert torch.equal(residual, before)


@both
def test_a_wire_is_a_quarter_or_an_eighth_and_the_scales(name):
    codec, _ = CODECS[name]
    assert wire_bytes(codec, 1_000_000) == {"int8": 1_000_192 + 15_628, "int4": 500_096 + 15_628}[name]
    assert wire_bytes(codec, 0) == 0
