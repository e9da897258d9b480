"""The kernels of int8 and int4 give PyTorch's bits. Without a GPU their very source runs on the CPU."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from cuda_on_cpu import CpuProgram
from gradient_kinds import KINDS, samples
from hypothesis import example, given
from hypothesis import strategies as st
from ptx import ptx_of
from torch import Tensor

from hvdlite.compression import codec_kernels, codecs
from hvdlite.compression.codec_kernels import MOST_WIRES, CodecKernels, gives_what_torch_gives, source_of
from hvdlite.compression.codecs import Int4, Int8, wire_bytes, working_dtype
from hvdlite.compression.kernels import same_bits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Powers of ten, half of them in the range of 16-bit floats.
EXPONENTS = st.one_of(st.integers(-8, 4), st.integers(-320, 307))

both = pytest.mark.parametrize("codec", [Int8, Int4])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_cpu(codec: type, dtype: torch.dtype, change: tuple[str, str] = ("", "")) -> CodecKernels:
    """Returns the kernels, with a change in their source, to be run on the CPU."""
    source = source_of(codec, dtype)
    assert change[0] in source
    return CodecKernels(CpuProgram(source.replace(*change, 1) if change[0] else source), codec, dtype)


def amid(values: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Returns a larger tensor, full of sevens, and a copy of ``values`` in it, from ``start``."""
    whole = torch.full((start + len(values) + 9,), 7, dtype=values.dtype)
    part = whole[start : start + len(values)]
    part.copy_(values)
    return whole, part


def clear_undefined_codes(codec: codecs.Codec, wire: Tensor, numel: int) -> None:
    """Makes the codes of blocks whose scale is NaN 0: CPUs differ in what the integer of NaN is."""
    blocks = -(-numel // codec.block)
    is_undefined = wire[: 4 * blocks].view(torch.float32).isnan()
    wire[4 * blocks :].view(blocks, -1)[is_undefined] = 0


def check_both_ways(
    kernels: CodecKernels, codec: codecs.Codec, values: Tensor, residual: Tensor | None, factor: float, start: int
) -> Tensor:
    """Encodes and decodes as PyTorch does, ``start`` elements from where memory is aligned, and returns the wire."""
    before = values.clone()
    wires = [amid(torch.zeros(wire_bytes(codec, len(values)), dtype=torch.uint8), 4 * start) for _ in range(2)]
    residuals = [(None, None) if residual is None else amid(residual, start) for _ in range(2)]
    kernels.encode(amid(values, start)[1], wires[0][1], residuals[0][1], factor)
    codec.encode_in_torch(values, wires[1][1], residuals[1][1], factor)
    for _, wire in wires:
        clear_undefined_codes(codec, wire, len(values))
    assert torch.equal(wires[0][0], wires[1][0])
    assert residual is None or same_bits(residuals[0][0], residuals[1][0])
    assert same_bits(values, before)
    outs = [amid(torch.zeros_like(values), start) for _ in range(2)]
    kernels.add_decoded([wires[0][1]], outs[0][1], factor)
    codec.add_decoded_in_torch([wires[1][1]], outs[1][1], factor)
    assert same_bits(outs[0][0], outs[1][0])
    return wires[1][1]


@pytest.mark.slow
@both
@each_dtype
def test_they_pass_the_trial_that_they_have_on_a_gpu(codec, dtype):
    assert gives_what_torch_gives(on_cpu(codec, dtype), codec(), CPU, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("x = times(x, by)", ""),
        ("x = plus(x, kept.at[k])", "x = (float)((double)given.at[k] * by + kept.at[k])"),
        ("magnitude((WORK)TINY)", "magnitude((WORK)0)"),
        ("magnitude(times(scale, (float)MOST)) >= INFINITE", "scale != scale"),
        ("nearest(times(wanted[half][k], inverse))", "nearest(over(wanted[half][k], wide))"),
        ("0xffffffffu, largest, distance", "0xffffffffu, largest, 1"),
        ("if (residual && !is_bad)", "if (residual)"),
        ("minus(wanted[half][k], times(multiple, wide))", "minus(wanted[half][k], times(multiple, wide)) + 1e-38f"),
        ("i || before ? plus(total[half].at[k], term) : term", "plus(total[half].at[k], term)"),
        ("times(terms[half][k], scale)", "times(terms[half][k], times(scale, by))"),
        ("total[1] = read(before, place.value(block, 1), numel)", "total[1] = total[0]"),
    ],
)
def test_the_trial_finds_what_rounds_flushes_or_adds_otherwise(change):
    assert not gives_what_torch_gives(on_cpu(Int4, torch.float32, change), Int4(), CPU, torch.float32)


def test_a_shuffle_without_all_of_a_warp_is_found_where_the_source_runs_on_a_cpu():
    shuffle = "out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (unsigned int)threadIdx.x, 1);"
    out = torch.zeros(256, dtype=torch.int32)
    kernel = 'extern "C" __global__ void swap(unsigned int* out) {\n'
    CpuProgram(f"{kernel} {shuffle} }}").launch("swap", 256, out.data_ptr())
    assert out.equal(torch.arange(256, dtype=torch.int32) ^ 1)
    with pytest.raises(AssertionError, match="wait in a shuffle"):
        CpuProgram(f"{kernel} if (threadIdx.x != 40) {shuffle} }}").launch("swap", 256, out.data_ptr())


@both
@example(kind="ordinary", numel=20_000, seed=0, factor=1.0, start=0, keeps=True)
@given(
    kind=st.sampled_from(KINDS),
    numel=st.integers(1, 3000),
    seed=st.integers(0, 9),
    factor=st.sampled_from([1.0, 0.5, 1.0 / 3.0, 1e-30, 1e9]),
    start=st.integers(0, 4),
    keeps=st.booleans(),
)
def test_wires_residuals_and_values_have_pytorchs_bits(codec, kind, numel, seed, factor, start, keeps):
    values = samples(kind, numel, seed)
    residual = 0.3 * samples(kind, numel, seed + 1) if keeps else None
    check_both_ways(on_cpu(codec, torch.float32), codec(), values, residual, factor, start)


@both
@each_dtype
@given(
    numel=st.integers(1, 1500),
    exponents=st.tuples(EXPONENTS, EXPONENTS),
    factor=st.sampled_from([1.0, 1.0 / 3.0]),
    start=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_each_dtype_is_encoded_in_its_working_dtype(codec, dtype, numel, exponents, factor, start, seed):
    generator = torch.Generator().manual_seed(seed)
    value, kept = (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**each for each in exponents)
    check_both_ways(on_cpu(codec, dtype), codec(), value.to(dtype), kept.to(working_dtype(dtype)), factor, start)


@both
@each_dtype
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), "of both signs", "the largest"])
def test_blocks_that_are_not_finite_are_pytorchs_and_leave_their_residual_alone(codec, dtype, bad):
    values, residual = samples("ordinary", 1000, 0).to(dtype), samples("ordinary", 1000, 1).to(working_dtype(dtype))
    if bad == "of both signs":
        values[300], residual[300] = float("inf"), float("-inf")
    else:
        values[300] = torch.finfo(dtype).max if bad == "the largest" else bad
    for factor in (1.0, 0.5):
        check_both_ways(on_cpu(codec, dtype), codec(), values, residual, factor, 0)


@both
def test_zeros_of_both_signs_are_as_in_pytorch(codec):
    zeros = torch.tensor([0.0, -0.0]).repeat(300)
    for residual in (None, zeros, zeros.flip(0), -zeros.abs()):
        check_both_ways(on_cpu(codec, torch.float32), codec(), zeros, residual, 1.0, 0)


@both
@each_dtype
def test_any_number_of_wires_is_added_in_their_order_and_rounded_once(codec, dtype):
    kernels, own = on_cpu(codec, dtype), codec()
    wires = []
    for seed in range(2 * MOST_WIRES + 1):
        wires.append(torch.empty(wire_bytes(own, 700), dtype=torch.uint8))
        own.encode_in_torch(samples("mixed" if seed % 3 else "zeros", 700, seed), wires[-1], None)
    for count in (1, 2, 3, MOST_WIRES, MOST_WIRES + 1, 2 * MOST_WIRES, 2 * MOST_WIRES + 1):
        for factor in (1.0, 1.0 / 3.0):
            got, expected = torch.empty(700, dtype=dtype), torch.empty(700, dtype=dtype)
            kernels.add_decoded(wires[-count:], got, factor)
            own.add_decoded_in_torch(wires[-count:], expected, factor)
            assert same_bits(got, expected), (count, factor)


@both
def test_every_byte_and_scale_is_decoded_as_by_pytorch(codec):
    own = codec()
    scales = torch.tensor([0.0, -0.0, 1e-45, 1e-40, 3.0, 3e38, float("inf"), float("nan")])
    codes = torch.arange(256).repeat(len(scales) // codec.per_byte).to(torch.uint8)
    wire = torch.cat([scales.view(torch.uint8), codes])
    got, expected = torch.empty(256 * len(scales)), torch.empty(256 * len(scales))
    on_cpu(codec, torch.float32).add_decoded([wire, wire], got)
    own.add_decoded_in_torch([wire, wire], expected)
    assert same_bits(got, expected)


@both
def test_nothing_is_an_empty_wire(codec):
    nothing, wire = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    kernels = on_cpu(codec, torch.float32)
    kernels.encode(nothing, wire, nothing)
    kernels.add_decoded([wire], nothing)


@both
def test_a_wire_of_another_size_or_beside_a_words_place_is_no_kernels(codec):
    kernels, values = on_cpu(codec, torch.float32), torch.zeros(256)
    wire = torch.zeros(wire_bytes(codec(), 256) + 4, dtype=torch.uint8)
    for wrong in (wire, wire[: wire_bytes(codec(), 256) - 4], wire[1:-3]):
        with pytest.raises(AssertionError):
            kernels.encode(values, wrong, None)
        with pytest.raises(AssertionError):
            kernels.add_decoded([wrong], values)


@both
def test_a_codec_takes_them_where_they_are_and_pytorch_elsewhere(codec, monkeypatch):
    kernels, own, asked = on_cpu(codec, torch.float32), codec(), []

    def kernels_for(*about: object) -> CodecKernels:
        asked.append(about)
        return kernels

    values, residual = samples("ordinary", 1000, 0), samples("ordinary", 1000, 1)
    wire = check_both_ways(kernels, own, values, residual, 0.5, 0)
    assert not asked
    monkeypatch.setattr(codecs, "kernels_for", kernels_for)
    for name in ("encode_in_torch", "add_decoded_in_torch"):
        monkeypatch.delattr(codecs._Scaled, name)
    got, out = torch.empty_like(wire), torch.empty(1000)
    own.encode_all(values, got, residual, 0.5)
    assert torch.equal(got, wire)
    own.add_decoded([wire], out)
    assert asked == [(codec, values, residual), (codec, out)]
    own.encode(values, got)
    own.decode(got, out)
    assert [len(about) for about in asked] == [3, 2, 3, 2]


def test_values_on_a_cpu_have_no_kernels():
    assert codec_kernels.kernels_for(Int8, torch.empty(3)) is None


def test_without_cupy_or_a_driver_pytorch_encodes_and_the_log_says_why_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy", None)
    codec_kernels._cupy_kernels.cache_clear()
    with caplog.at_level("DEBUG", "hvdlite"):
        for _ in range(2):
            assert codec_kernels._cupy_kernels(Int8, torch.device("cuda", 0), torch.float32) is None
    codec_kernels._cupy_kernels.cache_clear()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("Int8 of torch.float32 on cuda:0 with PyTorch, because cupy failed: ModuleNotFoundError: ")


def test_they_compile_where_cupy_is_installed_and_neither_flush_tiny_numbers_nor_fuse_products_and_sums():
    for codec in (Int8, Int4):
        for dtype in DTYPES:
            ptx = ptx_of(source_of(codec, dtype))
            assert set(re.findall(r"\.entry (\w+)", ptx)) == set(codec_kernels.KERNELS)
            assert not re.search(r"\.ftz|\bfma\.", ptx)
            for operation in ("mul.rn", "add.rn", "sub.rn", "div.rn", "cvt.rni"):
                assert re.search(rf"{re.escape(operation)}\.f{64 if dtype == torch.float64 else 32}\b", ptx), operation
            # Four neighbours at a time, a word of codes, and all in registers.
            packed = {torch.float32: "v4.f32", torch.float64: "v2.f64"}.get(dtype, "v4.u16")
            for access in (f"ld.global.{packed}", f"st.global.{packed}", "ld.global.u32", "st.global.u32"):
                assert access in ptx
            assert ".local" not in ptx
