"""
Scaling, casting and dividing of whole flat tensors, each in one pass over memory.

    scale_cast(source, factor, out)     out = source × factor, in out's dtype        bucket → wire, wire → bucket
    scale_by(tensor, factor)            tensor × factor, a tensor on the device      a sum of scaled terms → an average
    divide_by(tensor, divisor)          tensor / divisor, a tensor on the device     a sum → an average

`casts`, `buckets.settings` and `ops.reduction` call them. A quotient is rounded once. Multiplying by 1/divisor would
round twice, and could give a different number.

On a GPU these are cupy kernels, if cupy is installed and its results equal PyTorch's in every bit, which is tested once
for each device and pair of dtypes. Otherwise they are PyTorch's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .cupy_program import ARITHMETIC, NAMES, CupyProgram, Program, made_if_equal, same_bits, sample_of

# Like PyTorch, these compute in fp64 if one side is fp64, else in fp32, and round once.
_CODE = r"""
// Sixteen bytes of the wider dtype at a time; PER of each.
constexpr int PER = 16 / (sizeof(SOURCE) > sizeof(OUT) ? sizeof(SOURCE) : sizeof(OUT));
template <class T> struct alignas(sizeof(T) * PER) Pack { T at[PER]; };

struct Times {
    ARITHMETIC factor;
    __device__ inline ARITHMETIC of(ARITHMETIC x) const { return times(x, factor); }
};
struct Over {
    ARITHMETIC divisor;
    __device__ inline ARITHMETIC of(ARITHMETIC x) const { return over(x, divisor); }
};

template <class Change> __device__ inline void convert(SOURCE from, OUT& to, Change change) {
    ARITHMETIC x;
    load(from, x);
    store(change.of(x), to);
}

template <class Change>
__device__ inline void run(const SOURCE* source, OUT* out, long long numel, Change change) {
    long long step = (long long)gridDim.x * blockDim.x;
    long long here = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long misplaced = (unsigned long long)source % sizeof(Pack<SOURCE>);
    misplaced += (unsigned long long)out % sizeof(Pack<OUT>);
    long long packs = misplaced ? 0 : numel / PER;
    for (long long i = here; i < packs; i += step) {
        Pack<SOURCE> from = ((const Pack<SOURCE>*)source)[i];
        Pack<OUT> to;
        #pragma unroll
        for (int k = 0; k < PER; ++k) convert(from.at[k], to.at[k], change);
        ((Pack<OUT>*)out)[i] = to;
    }
    for (long long i = packs * PER + here; i < numel; i += step) convert(source[i], out[i], change);
}

extern "C" __global__ void scale_cast(const SOURCE* source, OUT* out, long long numel, double factor) {
    Times by;
    store(factor, by.factor);
    run(source, out, numel, by);
}

extern "C" __global__ void scale_by(OUT* tensor, const OUT* factor, long long numel) {
    Times by;
    load(*factor, by.factor);
    // What is multiplied by 1 need not be read.
    if (by.factor != 1) run((const SOURCE*)tensor, tensor, numel, by);
}

extern "C" __global__ void divide_by(OUT* tensor, const OUT* divisor, long long numel) {
    Over by;
    load(*divisor, by.divisor);
    if (by.divisor != 1) run((const SOURCE*)tensor, tensor, numel, by);
}
"""


def scale_cast(source: Tensor, factor: float, out: Tensor) -> None:
    """Overwrites ``out`` with ``source`` times ``factor``.

    Both are flat and contiguous, of equal length, on one device, and do not overlap. Their floating dtypes are equal or
    of different widths. The product is computed in the wider one, fp32 at least, and rounded once to ``out``'s.
    """
    kernels = _kernels_for(source, out)
    if kernels is None:
        scale_cast_in_torch(source, factor, out)
    else:
        kernels.scale_cast(source, factor, out)


def scale_by(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies a flat, contiguous tensor, in place, by a scalar tensor of its dtype and device, without waiting.

    With cupy a factor of 1 costs only the launch.
    """
    kernels = _kernels_for(tensor, tensor)
    if kernels is None:
        tensor.mul_(factor)
    else:
        kernels.scale_by(tensor, factor)


def divide(tensor: Tensor, divisor: float) -> None:
    """Divides a flat, contiguous tensor of floats, in place, by a Python number."""
    if divisor == 1:
        return
    if tensor.device.type == "cpu":
        tensor.div_(divisor)
    else:
        # On a GPU PyTorch does not divide by a Python number: it multiplies by the inverse.
        divide_by(tensor, torch.full((), divisor, dtype=tensor.dtype, device=tensor.device))


def divide_by(tensor: Tensor, divisor: Tensor) -> None:
    """Divides a flat, contiguous tensor, in place, by a scalar tensor of its dtype and device, without waiting.

    With cupy a divisor of 1 costs only the launch.
    """
    kernels = _kernels_for(tensor, tensor)
    if kernels is None:
        tensor.div_(divisor)
    else:
        kernels.divide_by(tensor, divisor)


def scale_cast_in_torch(source: Tensor, factor: float, out: Tensor) -> None:
    """Does `scale_cast` without cupy. On a GPU this too is one pass, unless ``out`` is wider and there is a factor."""
    if source.dtype.itemsize < out.dtype.itemsize:
        # `torch.mul` would round the product to the source's dtype first.
        out.copy_(source)
        if factor != 1.0:
            out.mul_(factor)
    else:
        torch.mul(source, factor, out=out)


class ScalingKernels:
    """The compiled kernels for one pair of dtypes."""

    def __init__(self, program: Program, source: torch.dtype, out: torch.dtype) -> None:
        """``program`` is compiled from `source_of` these dtypes."""
        self._program = program
        self._per = 16 // max(source.itemsize, out.itemsize)

    def scale_cast(self, source: Tensor, factor: float, out: Tensor) -> None:
        self._launch("scale_cast", out.numel(), source.data_ptr(), out.data_ptr(), out.numel(), float(factor))

    def scale_by(self, tensor: Tensor, factor: Tensor) -> None:
        self._launch("scale_by", tensor.numel(), tensor.data_ptr(), factor.data_ptr(), tensor.numel())

    def divide_by(self, tensor: Tensor, divisor: Tensor) -> None:
        self._launch("divide_by", tensor.numel(), tensor.data_ptr(), divisor.data_ptr(), tensor.numel())

    def _launch(self, kernel: str, numel: int, *arguments: float) -> None:
        self._program.launch(kernel, -(-numel // self._per), *arguments)


def source_of(source: torch.dtype, out: torch.dtype) -> str:
    """Returns the kernels in CUDA C++, for one pair of dtypes."""
    arithmetic = "f64" if torch.float64 in (source, out) else "f32"
    names = {"SOURCE": NAMES[source], "OUT": NAMES[out], "ARITHMETIC": arithmetic}
    return "".join(f"#define {name} {value}\n" for name, value in names.items()) + ARITHMETIC + _CODE


def _kernels_for(source: Tensor, out: Tensor) -> ScalingKernels | None:
    return _cupy_kernels(source.device, source.dtype, out.dtype) if source.is_cuda else None


# Global for the process: compiled code does not depend on a world or optimizer.
@functools.cache
def _cupy_kernels(device: torch.device, source: torch.dtype, out: torch.dtype) -> ScalingKernels | None:
    """Returns the kernels, or None if they do not work here. The first call waits for the device."""

    def make() -> ScalingKernels:
        names = ("scale_cast", "scale_by", "divide_by")
        return ScalingKernels(CupyProgram(device, source_of(source, out), names), source, out)

    return made_if_equal(
        f"scaling {source} to {out} on {device}",
        make,
        lambda kernels: gives_what_torch_gives(kernels.scale_cast, device, source, out),
    )


def gives_what_torch_gives(
    scale: Callable[[Tensor, float, Tensor], None], device: torch.device, source: torch.dtype, out: torch.dtype
) -> bool:
    """Whether ``scale`` equals PyTorch in every bit on a sample with every exponent, both signs, ties and NaNs."""
    sample = sample_of(device, source)
    for factor in (1.0, 1.0 / 3.0, 1e-4):
        got, expected = (torch.empty_like(sample, dtype=out) for _ in range(2))
        scale(sample, factor, got)
        scale_cast_in_torch(sample, factor, expected)
        if not same_bits(got, expected):
            return False
    return True
