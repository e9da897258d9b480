"""int8 and int4 have the same bits by cupy's kernels, by PyTorch, and on a CPU, at all sizes and addresses."""

from __future__ import annotations

import itertools

import pytest
import torch
from gradient_kinds import KINDS, samples
from torch import Tensor

from hvdlite.compression import codec_kernels
from hvdlite.compression.codec_kernels import MOST_WIRES, gives_what_torch_gives, kernels_for
from hvdlite.compression.codecs import Int4, Int8, wire_bytes, working_dtype
from hvdlite.compression.kernels import same_bits

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GPU = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

both = pytest.mark.parametrize("codec", [Int8, Int4])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def amid(values: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Returns a larger tensor of the GPU's, full of sevens, and a copy of ``values`` in it, from ``start``."""
    whole = torch.full((start + len(values) + 9,), 7, dtype=values.dtype, device=GPU)
    part = whole[start : start + len(values)]
    part.copy_(values)
    return whole, part


@both
@each_dtype
def test_a_kernel_of_cupys_is_taken_for_each_dtype(codec, dtype):
    found = kernels_for(codec, torch.empty(1, dtype=dtype, device=GPU))
    assert found is not None
    assert found is codec_kernels._cupy_kernels(codec, GPU, dtype)
    assert gives_what_torch_gives(found, codec(), GPU, dtype)


@both
@each_dtype
def test_wires_residuals_and_sums_are_those_of_a_cpu(codec, dtype):
    own = codec()
    for kind, keeps, factor in itertools.product(KINDS, (False, True), (1.0, 1.0 / 3.0)):
        values = samples(kind, 20_001, 0).to(dtype)
        residual = 0.3 * samples(kind, 20_001, 1).to(working_dtype(dtype)) if keeps else None
        there = None if residual is None else residual.to(GPU)
        here, wire = (torch.empty(wire_bytes(own, len(values)), dtype=torch.uint8, device=d) for d in ("cpu", GPU))
        own.encode_all(values.to(GPU), wire, there, factor)
        own.encode_all(values, here, residual, factor)
        # Blocks of 16-bit floats may have infinities; their codes are not defined.
        blocks = -(-len(values) // codec.block)
        good = here[: 4 * blocks].view(torch.float32).isfinite()
        assert same_bits(wire.cpu()[: 4 * blocks].view(torch.float32), here[: 4 * blocks].view(torch.float32))
        codes = [each[4 * blocks :].view(blocks, -1)[good] for each in (wire.cpu(), here)]
        assert torch.equal(*codes), kind
        if residual is not None and there is not None:
            assert same_bits(there.cpu(), residual), kind
        for count in (1, 2, MOST_WIRES + 1):
            sums = [torch.empty_like(values, device=device) for device in (GPU, "cpu")]
            own.add_decoded([wire] * count, sums[0], factor)
            own.add_decoded([here] * count, sums[1], factor)
            assert same_bits(sums[0].cpu(), sums[1]), (kind, count)


@both
@each_dtype
def test_every_size_and_place_in_memory_is_written_and_nothing_beside_it(codec, dtype):
    own = codec()
    for numel, start in itertools.product([1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257, 4099, 2**20 + 3], (0, 1, 2, 4)):
        values, kept = (samples("ordinary", numel, seed) for seed in (0, 1))
        values, kept = values.to(dtype), kept.to(working_dtype(dtype))
        nothing = torch.zeros(wire_bytes(own, numel), dtype=torch.uint8)
        ends = []
        for encode, add_decoded in (
            (own.encode_all, own.add_decoded),
            (own.encode_in_torch, own.add_decoded_in_torch),
        ):
            (wire, wire_part), (residual, residual_part) = amid(nothing, 4 * start), amid(kept, start)
            encode(amid(values, start)[1], wire_part, residual_part, 0.5)
            out, part = amid(values, start)
            add_decoded([wire_part, wire_part], part, 0.5)
            ends.append((wire, residual, out))
        assert all(same_bits(*each) for each in zip(*ends, strict=True)), (numel, start)


@both
def test_numbers_that_are_not_finite_arrive_as_such_and_leave_no_trace_in_the_residual(codec):
    own = codec()
    for bad in (float("inf"), float("-inf"), float("nan"), torch.finfo(torch.float32).max):
        values, residual = samples("ordinary", 1000, 0).to(GPU), samples("ordinary", 1000, 1).to(GPU)
        values[300] = bad
        before, got = residual.clone(), torch.empty_like(values)
        wire = torch.empty(wire_bytes(own, 1000), dtype=torch.uint8, device=GPU)
        own.encode_all(values, wire, residual)
        own.add_decoded([wire], got)
        is_lost = got.isfinite().logical_not()
        assert torch.equal(residual[is_lost], before[is_lost])
        assert torch.equal((got.double() + residual)[~is_lost], (values + before).double()[~is_lost])
        if bad != torch.finfo(torch.float32).max:
            assert is_lost.nonzero().view(-1).tolist() == list(range(256, 512))


@both
def test_pytorchs_operations_are_not_called_where_there_are_kernels(codec, monkeypatch):
    assert kernels_for(codec, torch.empty(1, device=GPU)) is not None
    for name in ("encode_in_torch", "add_decoded_in_torch"):
        monkeypatch.delattr(codec.__mro__[1], name)
    values, wire = torch.ones(256, device=GPU), torch.empty(wire_bytes(codec(), 256), dtype=torch.uint8, device=GPU)
    codec().encode_all(values, wire, torch.zeros_like(values))
    codec().add_decoded([wire, wire], values, 0.5)
    assert values.eq(1).all()


@both
def test_more_than_two_to_the_31_values(codec):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of a GPU's memory")
    values = torch.ones(2**31 + 5, dtype=torch.float16, device=GPU)
    wire = torch.empty(wire_bytes(codec(), len(values)), dtype=torch.uint8, device=GPU)
    codec().encode_all(values, wire, None, 2.0)
    values.zero_()
    codec().add_decoded([wire], values)
    assert values.eq(2).all()


@both
def test_kernels_run_in_pytorchs_stream_and_are_captured_with_it(codec):
    own, count = codec(), 2**22
    values, out, residual = (
        torch.zeros(count, device=GPU),
        torch.zeros(count, device=GPU),
        torch.zeros(count, device=GPU),
    )
    wire = torch.empty(wire_bytes(own, count), dtype=torch.uint8, device=GPU)

    def there_and_back() -> None:
        own.encode_all(values, wire, residual)
        own.add_decoded([wire, wire], out, 0.5)

    there_and_back()
    slow = torch.full((4096, 4096), 1 / 4096, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow
        values.fill_(3.0)
        there_and_back()
        copied = out.clone()
    stream.synchronize()
    assert copied.eq(3).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
    values.fill_(4.0)
    assert out.eq(3).all()
    graph.replay()
    assert out.eq(4).all()


@both
def test_they_run_on_the_device_of_their_tensors_whichever_is_current(codec):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    values, wire = torch.ones(999, device=other), torch.empty(wire_bytes(codec(), 999), dtype=torch.uint8, device=other)
    codec().encode_all(values, wire, None, 3.0)
    codec().add_decoded([wire], values)
    assert values.eq(3).all()
    assert torch.cuda.current_device() == 0
