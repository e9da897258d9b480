"""Cupy's kernels compute the same bits as PyTorch, for all values, sizes and addresses, in any stream."""

from __future__ import annotations

import itertools

import pytest
import torch

from hvdlite.compression import kernels
from hvdlite.compression.kernels import (
    divide,
    divide_by,
    gives_what_torch_gives,
    scale_by,
    scale_cast,
    scale_cast_in_torch,
)

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIXTEEN_BITS = {torch.float16, torch.bfloat16}
PAIRS = [(a, b) for a, b in itertools.product(DTYPES, DTYPES) if {a, b} != SIXTEEN_BITS]
GPU = torch.device("cuda", 0)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    equal = got.view(integers) == expected.view(integers)
    return bool((equal | got.isnan() & expected.isnan()).all())


@pytest.mark.parametrize(("source", "out"), PAIRS)
def test_a_kernel_of_cupys_is_taken_for_each_pair_of_dtypes(source, out):
    found = kernels._cupy_kernels(GPU, source, out)
    assert found is not None
    assert gives_what_torch_gives(found.scale_cast, GPU, source, out)
    # The same as PyTorch computes on the CPU.
    sample = torch.randn(10_001, dtype=torch.float64).to(source)
    for factor in (1.0, 1.0 / 3.0, 1e-7, 3e4):
        there, here = torch.empty(10_001, dtype=out, device=GPU), torch.empty(10_001, dtype=out)
        scale_cast(sample.to(GPU), factor, there)
        scale_cast_in_torch(sample, factor, here)
        assert same_bits(there.cpu(), here), factor


@pytest.mark.parametrize(("source", "out"), PAIRS)
def test_every_size_and_place_in_memory_is_written_and_nothing_beside_it(source, out):
    sizes = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 255, 256, 257, 1023, 4096, 4099, 2**20 + 3]
    for numel, first, second in itertools.product(sizes, (0, 1, 2, 3, 8), (0, 1, 4)):
        values = torch.randn(first + numel, device=GPU).to(source)[first:]
        whole = torch.full((second + numel + 9,), 7.0, device=GPU, dtype=out)
        scale_cast(values, 0.3, whole[second : second + numel])
        expected = torch.full_like(whole, 7.0)
        scale_cast_in_torch(values, 0.3, expected[second : second + numel])
        assert torch.equal(whole, expected), (numel, first, second)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of a GPU's memory")
    values = torch.ones(2**31 + 5, dtype=torch.float16, device=GPU)
    out = torch.zeros(2**31 + 5, device=GPU)
    scale_cast(values, 0.25, out)
    assert out[:4].tolist() == out[-4:].tolist() == [0.25] * 4
    assert out.eq(0.25).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_by_a_scalar_of_the_device(dtype):
    for numel, start, factor in itertools.product((0, 1, 100, 4099), (0, 1), (1.0, 1.0 / 3.0, 0.0)):
        whole = torch.randn(start + numel + 3, device=GPU).to(dtype)
        scalar = torch.tensor(factor, device=GPU).to(dtype)
        expected = whole.clone()
        expected[start : start + numel].mul_(scalar)
        scale_by(whole[start : start + numel], scalar)
        assert same_bits(whole, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dividing_is_no_product_by_the_inverse(dtype):
    for numel, start, number in itertools.product((0, 1, 100, 4099), (0, 1), (1, 3, 7)):
        whole = torch.randn(start + numel + 3, device=GPU).to(dtype)
        expected = whole.cpu()
        expected[start : start + numel].div_(number)
        by_program = whole.clone()
        divide_by(whole[start : start + numel], torch.tensor(number, device=GPU).to(dtype))
        divide(by_program[start : start + numel], number)
        assert same_bits(whole.cpu(), expected)
        assert same_bits(by_program.cpu(), expected)


def test_a_kernel_runs_in_pytorchs_stream_and_is_captured_with_it():
    source, out = torch.zeros(2**22, device=GPU), torch.zeros(2**22, device=GPU, dtype=torch.float16)
    scale_cast(source, 0.5, out)
    slow = torch.full((4096, 4096), 1 / 4096, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow
        source.fill_(3.0)
        scale_cast(source, 0.5, out)
        copied = out.clone()
    stream.synchronize()
    assert copied.eq(1.5).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_cast(source, 0.5, out)
    source.fill_(4.0)
    assert out.eq(1.5).all()
    graph.replay()
    assert out.eq(2.0).all()


def test_they_run_on_the_device_of_their_tensors_whichever_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    source, out = torch.ones(1000, device=other), torch.zeros(1000, device=other, dtype=torch.bfloat16)
    scale_cast(source, 0.5, out)
    assert out.eq(0.5).all()
    assert torch.cuda.current_device() == 0
