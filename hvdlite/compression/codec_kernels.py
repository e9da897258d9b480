"""
`CodecKernels`: int8 and int4 on a GPU, in one pass over the values and residuals, or over the wires.

    encode        values × factor + residual ── wire, and a new residual
    add_decoded   wires ── sum × factor, in the values' dtype

`codecs` calls them, if cupy is installed and their results equal those of PyTorch's operations in every bit, which is
tested once for each device, dtype and codec. Otherwise it goes on with these operations.

A warp has a block of values: each of its 32 lanes four neighbours of the first half, and four of the second. So lanes
read 16 bytes of float32 at a time beside each other's, and write a word of codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .kernels import (
    ARITHMETIC,
    NAMES,
    CupyProgram,
    Program,
    made_if_equal,
    random_numbers,
    same_bits,
    sample_of,
)

# The kernels in the source.
KERNELS = ("encode", "add_decoded", "add_decoded_in_part")

_LANES = 32

# How many wires are decoded at a time: the kernels have as many arguments. Of more, a sum is kept in the working dtype.
MOST_WIRES = 8

# Products and sums are those of `codecs`, one after the other. Blocks with infinities or NaN get NaN as their scale,
# and codes of 0. The bits of floats that are not negative are in the order of their values, with NaN as the largest.
_CODE = r"""
constexpr int LANES = 32, HALF = BLOCK / 2, PER = HALF / LANES, WORDS = 2 / PER_BYTE;
static_assert(PER == 4, "a lane has as many codes as a word has bytes");
constexpr unsigned int INFINITE = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u;

__device__ inline unsigned int magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ inline unsigned long long magnitude(double x) {
    return (unsigned long long)__double_as_longlong(x) & 0x7fffffffffffffffull;
}
__device__ inline float number(unsigned int bits) { return __uint_as_float(bits); }
__device__ inline double number(unsigned long long bits) { return __longlong_as_double((long long)bits); }
template <class Bits> __device__ inline Bits greater(Bits x, Bits y) { return x > y ? x : y; }

__device__ inline int whole(float x) {
    int y;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
__device__ inline int whole(double x) {
    int y;
    asm("cvt.rni.s32.f64 %0, %1;" : "=r"(y) : "d"(x));
    return y;
}

template <class T> struct alignas(sizeof(T) * PER < 16 ? sizeof(T) * PER : 16) Four { T at[PER]; };

// One by one where they are not aligned, or beyond the end, where there are zeros.
template <class T> __device__ inline Four<T> read(const T* from, long long at, long long numel) {
    if (at + PER <= numel && (unsigned long long)(from + at) % alignof(Four<T>) == 0) {
        return *(const Four<T>*)(from + at);
    }
    Four<T> four = {};
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
        if (at + k < numel) four.at[k] = from[at + k];
    }
    return four;
}
template <class T> __device__ inline void write(T* to, long long at, long long numel, Four<T> four) {
    if (at + PER <= numel && (unsigned long long)(to + at) % alignof(Four<T>) == 0) {
        *(Four<T>*)(to + at) = four;
        return;
    }
    #pragma unroll
    for (int k = 0; k < PER; ++k) {
        if (at + k < numel) to[at + k] = four.at[k];
    }
}

// A byte has the code of a number in the first half of its block plus 16 times one of the second, or a code alone.
__device__ inline void pack(const int (&codes)[2][PER], unsigned int (&words)[WORDS]) {
    #pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        words[word] = 0;
        #pragma unroll
        for (int k = 0; k < PER; ++k) {
            int code = PER_BYTE == 1 ? codes[word][k] : codes[0][k] + 16 * codes[1][k];
            words[word] |= ((unsigned int)code & 0xffu) << (8 * k);
        }
    }
}
__device__ inline void unpack(const unsigned int (&words)[WORDS], WORK (&multiples)[2][PER]) {
    #pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        #pragma unroll
        for (int k = 0; k < PER; ++k) {
            WORK code = (WORK)(int)(signed char)(words[word] >> (8 * k));
            if (PER_BYTE == 1) {
                multiples[word][k] = code;
            } else {
                multiples[1][k] = nearest(times(code, (WORK)0.0625));
                multiples[0][k] = minus(code, times(multiples[1][k], (WORK)16));
            }
        }
    }
}

// The places of a thread: its first block, and how many blocks further the next one is.
struct Place {
    int lane = threadIdx.x % LANES;
    long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    long long step = (long long)gridDim.x * blockDim.x / LANES;
    __device__ inline long long value(long long block, int half) const {
        return block * BLOCK + half * HALF + lane * PER;
    }
    __device__ inline long long word(long long block, int word) const { return (block * WORDS + word) * LANES + lane; }
};
__device__ inline long long blocks_of(long long numel) { return (numel + BLOCK - 1) / BLOCK; }

extern "C" __global__ void encode(const VALUE* values, float* wire, WORK* residual, long long numel, double factor) {
    const Place place;
    const long long blocks = blocks_of(numel);
    unsigned int* codes = (unsigned int*)(wire + blocks);
    WORK by;
    store(factor, by);
    for (long long block = place.first; block < blocks; block += place.step) {
        WORK wanted[2][PER];
        auto largest = magnitude((WORK)TINY);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long at = place.value(block, half);
            const Four<VALUE> given = read(values, at, numel);
            Four<WORK> kept = {};
            if (residual) kept = read((const WORK*)residual, at, numel);
            #pragma unroll
            for (int k = 0; k < PER; ++k) {
                WORK x;
                load(given.at[k], x);
                x = times(x, by);
                if (residual) x = plus(x, kept.at[k]);
                wanted[half][k] = at + k < numel ? x : 0;
                largest = greater(largest, magnitude(wanted[half][k]));
            }
        }
        #pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) {
            largest = greater(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        }
        float scale = narrowed(over(number(largest), (WORK)MOST));
        const bool is_bad = magnitude(times(scale, (float)MOST)) >= INFINITE;
        if (is_bad) scale = number(NOT_A_NUMBER);
        if (place.lane == 0) wire[block] = scale;
        WORK wide;
        load(scale, wide);
        const WORK inverse = over((WORK)1, wide);
        int multiples[2][PER];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four<WORK> kept;
            #pragma unroll
            for (int k = 0; k < PER; ++k) {
                const WORK multiple = nearest(times(wanted[half][k], inverse));
                multiples[half][k] = is_bad ? 0 : whole(multiple);
                kept.at[k] = minus(wanted[half][k], times(multiple, wide));
            }
            if (residual && !is_bad) write(residual, place.value(block, half), numel, kept);
        }
        unsigned int words[WORDS];
        pack(multiples, words);
        #pragma unroll
        for (int word = 0; word < WORDS; ++word) codes[place.word(block, word)] = words[word];
    }
}

// What a lane reads of the wires' same block, all of it before it computes.
struct Read {
    float scale;
    unsigned int words[WORDS];
};

template <class OUT>
__device__ inline void add(OUT* out, const WORK* before, long long numel, double factor, long long count,
                           const float* const (&wires)[MOST_WIRES]) {
    const Place place;
    const long long blocks = blocks_of(numel);
    WORK by;
    store(factor, by);
    for (long long block = place.first; block < blocks; block += place.step) {
        Read reads[MOST_WIRES];
        #pragma unroll
        for (int i = 0; i < MOST_WIRES; ++i) {
            if (i < count) {
                const unsigned int* codes = (const unsigned int*)(wires[i] + blocks);
                reads[i].scale = wires[i][block];
                #pragma unroll
                for (int word = 0; word < WORDS; ++word) reads[i].words[word] = codes[place.word(block, word)];
            }
        }
        Four<WORK> total[2] = {};
        if (before) {
            total[0] = read(before, place.value(block, 0), numel);
            total[1] = read(before, place.value(block, 1), numel);
        }
        #pragma unroll
        for (int i = 0; i < MOST_WIRES; ++i) {
            if (i < count) {
                WORK scale, terms[2][PER];
                load(reads[i].scale, scale);
                unpack(reads[i].words, terms);
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    #pragma unroll
                    for (int k = 0; k < PER; ++k) {
                        const WORK term = times(terms[half][k], scale);
                        // 0 plus -0 would be 0.
                        total[half].at[k] = i || before ? plus(total[half].at[k], term) : term;
                    }
                }
            }
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four<OUT> sum;
            #pragma unroll
            for (int k = 0; k < PER; ++k) store(times(total[half].at[k], by), sum.at[k]);
            write(out, place.value(block, half), numel, sum);
        }
    }
}

extern "C" __global__ void add_decoded(VALUE* out, const WORK* before, long long numel, double factor, long long count,
                                       const float* a, const float* b, const float* c, const float* d,
                                       const float* e, const float* f, const float* g, const float* h) {
    const float* const wires[MOST_WIRES] = {a, b, c, d, e, f, g, h};
    add(out, before, numel, factor, count, wires);
}

extern "C" __global__ void add_decoded_in_part(WORK* out, const WORK* before, long long numel, double factor,
                                               long long count, const float* a, const float* b, const float* c,
                                               const float* d, const float* e, const float* f, const float* g,
                                               const float* h) {
    const float* const wires[MOST_WIRES] = {a, b, c, d, e, f, g, h};
    add(out, before, numel, factor, count, wires);
}
"""


class ScaledCodec(Protocol):
    """A codec with a scale per block, and its operations of PyTorch, whose bits the kernels give. See `codecs`."""

    block: ClassVar[int]
    most: ClassVar[float]
    per_byte: ClassVar[int]
    tiny: ClassVar[float]

    def encode_in_torch(self, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None: ...

    def add_decoded_in_torch(self, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None: ...


class CodecKernels:
    """The compiled kernels of a codec for values of one dtype."""

    def __init__(self, program: Program, codec: type[ScaledCodec], dtype: torch.dtype) -> None:
        self._program = program
        self._codec = codec
        self._working = working_dtype(dtype)

    def encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None:
        """Does what `Codec.encode_all` does, in one pass. The residual is of the working dtype."""
        numel = values.numel()
        kept = 0 if residual is None else residual.data_ptr()
        assert residual is None or residual.numel() == numel
        self._launch("encode", numel, values.data_ptr(), self._address(wire, numel), kept, numel, float(factor))

    def add_decoded(self, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Does what `Codec.add_decoded` does, in one pass over the wires."""
        numel = out.numel()
        addresses = [self._address(wire, numel) for wire in wires]
        *parts, last = [addresses[start : start + MOST_WIRES] for start in range(0, len(wires), MOST_WIRES)]
        total, before = out, 0
        if parts and out.dtype != self._working:
            total = torch.empty_like(out, dtype=self._working)
        for part in parts:
            self._launch("add_decoded_in_part", numel, total.data_ptr(), before, numel, 1.0, *_arguments(part))
            before = total.data_ptr()
        self._launch("add_decoded", numel, out.data_ptr(), before, numel, float(factor), *_arguments(last))

    def _launch(self, kernel: str, numel: int, *arguments: float) -> None:
        self._program.launch(kernel, -(-numel // self._codec.block) * _LANES, *arguments)

    def _address(self, wire: Tensor, numel: int) -> int:
        """Returns the address of a wire, after a look at its size and place: kernels read and write without one."""
        blocks = -(-numel // self._codec.block)
        nbytes = blocks * (4 + self._codec.block // self._codec.per_byte)
        assert (wire.dtype, wire.shape, wire.is_contiguous()) == (torch.uint8, (nbytes,), True)
        assert wire.data_ptr() % 4 == 0, "scales and words of codes are aligned"
        return wire.data_ptr()


def _arguments(addresses: Sequence[int]) -> Iterable[int]:
    return len(addresses), *addresses, *[0] * (MOST_WIRES - len(addresses))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the sums and residuals of gradients of ``dtype``, which is real."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def source_of(codec: type[ScaledCodec], dtype: torch.dtype) -> str:
    names = {
        "VALUE": NAMES[dtype],
        "WORK": NAMES[working_dtype(dtype)],
        "BLOCK": codec.block,
        "MOST": codec.most,
        "PER_BYTE": codec.per_byte,
        "TINY": codec.tiny,
        "MOST_WIRES": MOST_WIRES,
    }
    return "".join(f"#define {name} {value}\n" for name, value in names.items()) + ARITHMETIC + _CODE


def kernels_for(codec: type[ScaledCodec], values: Tensor, residual: Tensor | None = None) -> CodecKernels | None:
    """Returns the kernels that encode or decode such flat values, or None if PyTorch's operations are to do it."""
    if not values.is_cuda or not values.is_contiguous():
        return None
    if residual is not None and not (residual.is_contiguous() and residual.dtype == working_dtype(values.dtype)):
        return None
    return _cupy_kernels(codec, values.device, values.dtype)


# Global for the process: compiled code does not depend on a world or optimizer.
@functools.cache
def _cupy_kernels(codec: type[ScaledCodec], device: torch.device, dtype: torch.dtype) -> CodecKernels | None:
    return made_if_equal(
        f"{codec.__name__} of {dtype} on {device}",
        lambda: CodecKernels(CupyProgram(device, source_of(codec, dtype), KERNELS), codec, dtype),
        lambda kernels: gives_what_torch_gives(kernels, codec(), device, dtype),
    )


def gives_what_torch_gives(kernels: CodecKernels, codec: ScaledCodec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels equal PyTorch's operations in every bit, for blocks of every size, infinities and NaNs."""
    # Beyond the exponents of float32, too.
    exponents = torch.arange(-1080, 1024, dtype=torch.float64, device=device).exp2().view(-1, 1)
    rows = random_numbers(40 * len(exponents), device, torch.float64).view(-1, 40) * exponents
    sample = torch.cat([sample_of(device, dtype), rows.view(-1).to(dtype)])
    wires = []
    # The last is not aligned.
    for values, factor, keeps in ((sample, 1.0, False), (sample, 1.0 / 3.0, True), (sample[1:], 1.0, True)):
        got = _encoded(kernels.encode, codec, values, factor, keeps)
        expected = _encoded(codec.encode_in_torch, codec, values, factor, keeps)
        if not all(same_bits(a, b) for a, b in zip(got[1:], expected[1:], strict=True)):
            return False
        wires.append(expected[0])
    for count, start, factor in ((1, 0, 1.0), (2, 1, 1.0 / 3.0), (MOST_WIRES + 3, 0, 0.5)):
        sums = [torch.empty(start + len(sample), dtype=dtype, device=device)[start:] for _ in range(2)]
        for add_decoded, out in zip((kernels.add_decoded, codec.add_decoded_in_torch), sums, strict=True):
            add_decoded([wires[i % 2] for i in range(count)], out, factor)
        if not same_bits(*sums):
            return False
    return True


def _encoded(
    encode: Callable[[Tensor, Tensor, Tensor | None, float], None],
    codec: ScaledCodec,
    values: Tensor,
    factor: float,
    keeps: bool,
) -> tuple[Tensor, ...]:
    """Returns the wire, its scales, its codes, those of NaN as 0, and the residual, if there is one."""
    blocks = -(-len(values) // codec.block)
    wire = values.new_empty(blocks * (4 + codec.block // codec.per_byte), dtype=torch.uint8)
    residual = 0.3 * values.to(working_dtype(values.dtype)).roll(3) if keeps else None
    encode(values, wire, residual, factor)
    scales, codes = wire[: 4 * blocks].view(torch.float32), wire[4 * blocks :].view(blocks, -1)
    codes = codes.masked_fill(scales.isnan().view(-1, 1), 0)
    return wire, scales, codes, *(() if residual is None else (residual,))
