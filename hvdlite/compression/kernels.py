"""
Scaling, casting and dividing of whole flat tensors, each in one pass over memory.

    scale_cast(source, factor, out)     out = source × factor, in out's dtype        bucket → wire, wire → bucket
    scale_by(tensor, factor)            tensor × factor, a tensor on the device      a sum of scaled terms → an average
    divide_by(tensor, divisor)          tensor / divisor, a tensor on the device     a sum → an average

`casts`, `buckets.settings` and `ops.reduction` call them. A quotient is rounded once. Multiplying by 1/divisor would
round twice, and could give a different number.

On a GPU these are cupy kernels, if cupy is installed and its results equal PyTorch's in every bit, which is tested once
for each device and pair of dtypes. Otherwise they are PyTorch's own operations. `codec_kernels` has further kernels,
and from here the arithmetic that rounds as PyTorch's does, `CupyProgram`, which launches kernels in PyTorch's stream,
and the trial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..log import log

T = TypeVar("T")

# The names of dtypes in the sources.
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8

# Each of these rounds once, to the nearest, ties to even. They are PTX, since cupy compiles with -ftz=true, which
# flushes plain products of tiny numbers to zero, and so that no product and sum become one operation (fma).
ARITHMETIC = r"""
typedef struct { unsigned short bits; } f16;
typedef struct { unsigned short bits; } bf16;
typedef float f32;
typedef double f64;

__device__ inline float times(float x, float y) {
    float z;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline double times(double x, double y) { return __dmul_rn(x, y); }
__device__ inline float over(float x, float y) {
    float z;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline double over(double x, double y) { return __ddiv_rn(x, y); }
__device__ inline float plus(float x, float y) {
    float z;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline double plus(double x, double y) { return __dadd_rn(x, y); }
__device__ inline float minus(float x, float y) {
    float z;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline double minus(double x, double y) { return __dsub_rn(x, y); }
__device__ inline float nearest(float x) {
    float y;
    asm("cvt.rni.f32.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline double nearest(double x) {
    double y;
    asm("cvt.rni.f64.f64 %0, %1;" : "=d"(y) : "d"(x));
    return y;
}
__device__ inline float narrowed(float x) { return x; }
__device__ inline float narrowed(double x) {
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}

__device__ inline void load(f16 x, float& y) { asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); }
__device__ inline void load(bf16 x, float& y) { y = __uint_as_float((unsigned int)x.bits << 16); }
__device__ inline void load(f32 x, float& y) { y = x; }
__device__ inline void load(f32 x, double& y) { asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x)); }
__device__ inline void load(f64 x, double& y) { y = x; }
template <class X> __device__ inline void load(X x, double& y) {
    float z;
    load(x, z);
    load(z, y);
}

template <class A> __device__ inline void store(A x, f16& y) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(narrowed(x)));
}
template <class A> __device__ inline void store(A x, bf16& y) {
    unsigned int bits = __float_as_uint(narrowed(x));
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = is_nan ? 0x7fff : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
template <class A> __device__ inline void store(A x, f32& y) { y = narrowed(x); }
__device__ inline void store(double x, f64& y) { y = x; }
"""


class Program(Protocol):
    """Compiled kernels."""

    def launch(self, kernel: str, threads: int, *arguments: float) -> None:
        """Runs a kernel on this many threads, or fewer, as a grid that has whole blocks of 256 and strides.

        Addresses and sizes are passed as 64-bit integers, and floats as doubles.
        """
        ...


class CupyProgram:
    """A `Program` for a GPU."""

    def __init__(self, device: torch.device, source: str, kernels: Sequence[str]) -> None:
        """Compiles ``source``, unless it is in cupy's cache on disk."""
        import cupy  # noqa: PLC0415 - optional, and slow to import

        self._cupy = cupy
        self._device = device
        self._most_blocks = torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS_PER_MULTIPROCESSOR
        # cupy compiles for the current device.
        with torch.cuda.device(device):
            module = cupy.RawModule(code=source)
            self._kernels = {name: module.get_function(name) for name in kernels}

    def launch(self, kernel: str, threads: int, *arguments: float) -> None:
        if threads == 0:
            return
        blocks = min(-(-threads // _THREADS), self._most_blocks)
        # PyTorch's current stream: its allocator reuses memory in this stream's order, and a CUDA graph may capture it.
        stream = self._cupy.cuda.Stream.from_external(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), stream:
            self._kernels[kernel]((blocks,), (_THREADS,), arguments)


def made_if_equal(what: str, make: Callable[[], T], gives_what_torch_gives: Callable[[T], bool]) -> T | None:
    """Returns what ``make`` makes with cupy, or None and logs why, if it fails or differs from PyTorch. It waits."""
    try:
        made = make()
        is_equal = gives_what_torch_gives(made)
    except Exception as error:  # noqa: BLE001 - whatever cupy, its compiler or the driver raises: PyTorch is used
        log.debug("%s with PyTorch, because cupy failed: %s: %s", what, type(error).__name__, error)
        return None
    if not is_equal:
        log.warning("%s with PyTorch, because cupy's kernel gives different numbers on this GPU", what)
        return None
    log.debug("%s with a cupy kernel", what)
    return made


def sample_of(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns numbers with every exponent of float32, both signs, ties and NaNs; neighbours are of like size."""
    values = torch.arange(-(2**16), 2**16 + 3, dtype=torch.int32, device=device)
    # The values are the upper bits of fp32. With these lower bits they are just below, at and just above the middle
    # between two 16-bit numbers.
    pieces = [((values << 16) + low).view(torch.float32) for low in (0, 0x7FFF, 0x8000, 0x1000, 0x1001)]
    return torch.cat([*pieces, random_numbers(1001, device)]).to(dtype)


def random_numbers(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns normally distributed numbers, the same each time, and leaves the program's own random numbers alone."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(numel, device=device, dtype=dtype, generator=generator)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether tensors of equal dtype and shape are equal in every bit. Any NaN is equal to any other."""
    integers = _BITS[got.itemsize]
    same = got.view(integers) == expected.view(integers)
    return bool((same | got.isnan() & expected.isnan()).all())


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
    arithmetic = "f64" if torch.float64 in (source, out) else "f32"
    names = {"SOURCE": NAMES[source], "OUT": NAMES[out], "ARITHMETIC": arithmetic}
    return "".join(f"#define {name} {value}\n" for name, value in names.items()) + ARITHMETIC + _CODE


def _kernels_for(source: Tensor, out: Tensor) -> ScalingKernels | None:
    return _cupy_kernels(source.device, source.dtype, out.dtype) if source.is_cuda else None


# Global for the process: compiled code does not depend on a world or optimizer.
@functools.cache
def _cupy_kernels(device: torch.device, source: torch.dtype, out: torch.dtype) -> ScalingKernels | None:
    names = ("scale_cast", "scale_by", "divide_by")
    return made_if_equal(
        f"scaling {source} to {out} on {device}",
        lambda: ScalingKernels(CupyProgram(device, source_of(source, out), names), source, out),
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
