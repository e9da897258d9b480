"""Scaling and casting in one pass gives the same bits as PyTorch's two steps, in every case that a bucket can be in."""

from __future__ import annotations

import copy
import itertools
import re
import sys

import pytest
import torch
from cuda_on_cpu import CpuProgram
from models import Plain, batches, build, part_loss
from ptx import ptx_of
from ranks import run_ranks
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.compression import casts, kernels
from hvdlite.compression.kernels import (
    ScalingKernels,
    divide,
    divide_by,
    gives_what_torch_gives,
    scale_by,
    scale_cast,
)
from hvdlite.exchanges import builtin_exchanges

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROWER = {frozenset((torch.float16, torch.bfloat16))}


@pytest.mark.parametrize(
    ("source", "out"), [pair for pair in itertools.product(DTYPES, DTYPES) if frozenset(pair) not in NARROWER]
)
def test_a_product_is_made_in_the_wider_dtype_and_rounded_once(source, out):
    values = torch.tensor([0.1, -3.0, 6e-8, 65519.0, 1e-40, float("inf"), float("nan")], dtype=torch.float64).to(source)
    wide = max(source, out, torch.float32, key=lambda dtype: dtype.itemsize)
    for numel, start in itertools.product((0, 1, 5, 7), (0, 1, 3)):
        whole = torch.full((12,), 9.0, dtype=out)
        scale_cast(values[:numel], 1.0 / 3.0, whole[start : start + numel])
        expected = (values[:numel].to(wide) * (1.0 / 3.0)).to(out)
        torch.testing.assert_close(whole[start : start + numel], expected, rtol=0, atol=0, equal_nan=True)
        assert whole[:start].eq(9).all()
        assert whole[start + numel :].eq(9).all()


def test_the_trial_of_a_kernel_passes_pytorch_and_finds_what_rounds_or_flushes_otherwise():
    def towards_zero(source: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        out.view(torch.int16).copy_((source * factor).view(torch.int32) >> 16)

    def flushing(source: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        product = source * factor
        scale_cast(torch.where(product.abs() < torch.finfo(torch.float32).tiny, 0 * product, product), 1.0, out)

    def trial(scale: object) -> bool:
        return gives_what_torch_gives(scale, torch.device("cpu"), torch.float32, torch.bfloat16)

    assert trial(scale_cast)
    assert not trial(towards_zero)
    assert not trial(flushing)


def test_the_kernels_compile_where_cupy_is_installed_and_flush_no_tiny_number_to_zero():
    for source, out in itertools.product(DTYPES, DTYPES):
        ptx = ptx_of(kernels.source_of(source, out))
        assert re.search(r"mul\.rn\.f(32|64)", ptx)
        assert not re.search(r"(mul|cvt|fma|add)\S*\.ftz", ptx)
        # Sixteen bytes of the wider dtype at a time.
        assert re.search(r"[ls][dt]\.global\.v(2\.f64|4\.f32|4\.u32)", ptx)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float16),
        (torch.float64, torch.float32),
    ],
)
def test_the_kernels_give_pytorchs_bits_where_their_source_runs_on_a_cpu(source, out):
    found = ScalingKernels(CpuProgram(kernels.source_of(source, out)), source, out)
    assert gives_what_torch_gives(found.scale_cast, torch.device("cpu"), source, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_scale_and_divide_as_pytorch_does_where_their_source_runs_on_a_cpu(dtype):
    found = ScalingKernels(CpuProgram(kernels.source_of(dtype, dtype)), dtype, dtype)
    for numel, start, number in itertools.product((0, 1, 100, 4099), (0, 1), (1.0, 3.0, 1.0 / 7.0)):
        scalar = torch.tensor(number, dtype=dtype)
        for own, of_torch in ((found.scale_by, torch.Tensor.mul_), (found.divide_by, torch.Tensor.div_)):
            whole = torch.randn(start + numel + 3).to(dtype)
            expected = whole.clone()
            of_torch(expected[start : start + numel], scalar)
            own(whole[start : start + numel], scalar)
            assert torch.equal(whole, expected)


def test_without_cupy_or_a_driver_pytorch_does_it_and_the_log_says_why_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy", None)
    asked = torch.device("cuda", 0), torch.float32, torch.float16
    kernels._cupy_kernels.cache_clear()
    with caplog.at_level("DEBUG", "hvdlite"):
        assert kernels._cupy_kernels(*asked) is None
        assert kernels._cupy_kernels(*asked) is None
    kernels._cupy_kernels.cache_clear()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("scaling torch.float32 to torch.float16 on cuda:0 with PyTorch, because cupy failed: Module")


def test_scaling_by_a_scalar_of_the_device_is_a_product():
    tensor = torch.tensor([1.0, 3.0]).half()
    scale_by(tensor, torch.tensor(1.0 / 3.0).half())
    assert tensor.equal(torch.tensor([1.0, 3.0]).half() * torch.tensor(1.0 / 3.0).half())


def test_a_quotient_is_rounded_as_such_and_is_no_product_by_the_inverse():
    values = torch.arange(1.0, 2000.0)
    for number in (1, 3, 7):
        expected = torch.tensor([value / number for value in values.tolist()], dtype=torch.float64).float()
        by_program, on_the_device = values.clone(), values.clone()
        divide(by_program, number)
        divide_by(on_the_device, torch.tensor(float(number)))
        assert by_program.equal(expected)
        assert on_the_device.equal(expected)
    assert not (values * (1 / 7)).equal(expected), "it makes a difference"


def test_scaled_on_the_way_to_the_wire_or_before_gradients_have_the_same_bits(monkeypatch):
    start, (x, y) = build(Plain), batches(2, 1, 6)

    def rank(group: Group) -> list[torch.Tensor]:
        ends = []
        for predivide, set_to_none in itertools.product((1.0, 3.0), (True, False)):
            model = copy.deepcopy(start)
            optimizer = wrap(
                group, model.parameters(), lr=0.1, compression=hvd.Compression.fp16, gradient_predivide_factor=predivide
            )
            for step in range(2):
                optimizer.zero_grad(set_to_none)
                part_loss(model, x[step, 0], y[step, 0], group.rank, 2).backward()
                optimizer.step()
            ends += [param.detach() for param in model.parameters()]
        return ends

    before = run_ranks(2, rank)[0]
    # As on a GPU.
    monkeypatch.setattr(builtin_exchanges, "SCALES_ON_THE_WAY", {"cpu"})
    scales = []
    monkeypatch.setattr(casts, "scale_cast", lambda *args: scales.append(args[1]) or scale_cast(*args))
    on_the_way = run_ranks(2, rank)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, on_the_way, strict=True))
    # Gradients that are views already are scaled on the way; with a predivide factor all are, on the way back.
    assert sorted(set(scales)) == [1 / 3, 1 / 2, 3 / 2]
