// What CUDA C++ needs to run on a CPU, one thread at a time. `cuda_on_cpu.py` puts it before a source, in which it has
// replaced each PTX instruction by a call of the function of `ptx` that has its name.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__

struct Index {
    unsigned int x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From> static To with_bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static unsigned int __float_as_uint(float x) { return with_bits_of<unsigned int>(x); }
static float __uint_as_float(unsigned int x) { return with_bits_of<float>(x); }
static long long __double_as_longlong(double x) { return with_bits_of<long long>(x); }
static double __longlong_as_double(long long x) { return with_bits_of<double>(x); }
static double __dmul_rn(double x, double y) { return x * y; }
static double __ddiv_rn(double x, double y) { return x / y; }
static double __dadd_rn(double x, double y) { return x + y; }
static double __dsub_rn(double x, double y) { return x - y; }

namespace ptx {
float mul_rn_f32(float x, float y) { return x * y; }
float div_rn_f32(float x, float y) { return x / y; }
float add_rn_f32(float x, float y) { return x + y; }
float sub_rn_f32(float x, float y) { return x - y; }
float cvt_rni_f32_f32(float x) { return std::nearbyint(x); }
double cvt_rni_f64_f64(double x) { return std::nearbyint(x); }
int cvt_rni_s32_f32(float x) { return (int)std::nearbyint(x); }
int cvt_rni_s32_f64(double x) { return (int)std::nearbyint(x); }
float cvt_rn_f32_f64(double x) { return (float)x; }
double cvt_f64_f32(float x) { return x; }
float cvt_f32_f16(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                      : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}
unsigned short cvt_rn_f16_f32(float x) {
    const unsigned short sign = std::signbit(x) << 15;
    const float size = std::fabs(x);
    if (std::isnan(x)) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    return sign | (((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}
}  // namespace ptx

// The 32 threads of a warp have a stack each. A thread runs until it meets the others in a shuffle, or until its end.
constexpr int WARP = 32;
static struct Thread {
    alignas(16) char stack[64 * 1024];
    jmp_buf place;
    bool has_ended;
} warp[WARP];
static jmp_buf at_the_warp;
static int running;
static bool is_odd[WARP];
static void (*body)(void*);
static void* arguments;

static void wait_for_the_warp() {
    if (!_setjmp(warp[running].place)) _longjmp(at_the_warp, 1);
}

static void run_thread() {
    body(arguments);
    warp[running].has_ended = true;
    _longjmp(at_the_warp, 1);
}

template <class T> static T __shfl_xor_sync(unsigned int mask, T x, int other) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "the hardware's sizes");
    // In turns, so that no thread writes what another has yet to read.
    static T given[2][WARP];
    if (mask != 0xffffffffu) std::abort();
    const int me = running;
    const bool turn = is_odd[me] = !is_odd[me];
    given[turn][me] = x;
    wait_for_the_warp();
    return given[turn][me ^ other];
}

static void resume(int thread, bool is_new, unsigned int first) {
    running = thread;
    threadIdx.x = first + thread;
    if (_setjmp(at_the_warp)) return;
    if (!is_new) _longjmp(warp[thread].place, 1);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = warp[thread].stack;
    context.uc_stack.ss_size = sizeof warp[thread].stack;
    context.uc_link = nullptr;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

// Runs a kernel on a grid, one warp after the other. Returns how many threads of a warp wait for some that have ended.
template <class Kernel> static int run_grid(unsigned int blocks, unsigned int threads, Kernel kernel) {
    gridDim.x = blocks;
    blockDim.x = threads;
    arguments = &kernel;
    body = [](void* kernel) { (*(Kernel*)kernel)(); };
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (unsigned int first = 0; first < threads; first += WARP) {
            int ended = 0;
            for (bool is_new = true; ended == 0; is_new = false) {
                for (int thread = 0; thread < WARP; ++thread) {
                    if (is_new) warp[thread].has_ended = false;
                    resume(thread, is_new, first);
                    ended += warp[thread].has_ended;
                }
            }
            if (ended < WARP) return WARP - ended;
        }
    }
    return 0;
}
