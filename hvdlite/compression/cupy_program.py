"""
CUDA C++ that cupy compiles: `CupyProgram` launches its kernels in PyTorch's stream. `kernels` and `codec_kernels` have
the sources; this module has what they share: arithmetic that rounds as PyTorch's does, and the trial.

cupy is optional. Kernels are used only where they give what PyTorch gives, in every bit.
"""

from __future__ import annotations

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
    """Returns what ``make`` makes with cupy, or None if it does not work here, and logs why. It waits for the device.

    ``what`` says what the kernels do, such as "scaling".
    """
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
