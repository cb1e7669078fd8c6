"""What all CUDA texts begin with, and how C++ text becomes CUDA text.

Scalar expressions are those of the C++ printer: what a compiler of C++ has built in goes by another
name here, and functions are for the device. Elementary functions are CUDA's, as eager's are, where
they take fewer instructions than fxkit's own. Nothing is included, so that the same text runs on a
processor too, under definitions of the few words of CUDA in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.codegen.cpp.storage_math import BFLOAT16, FLOAT16
from fxkit.lower.codegen.cpp.vector_math import NORMAL_EXPONENT
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS, ScalarFunction

_HEAD = """\
#ifndef FX_LAUNCH
#define FX_LAUNCH(kernel, across, down, threads, stream, ...) \\
  kernel<<<dim3(across, down), threads, 0, (cudaStream_t)stream>>>(__VA_ARGS__)
#define FX_DEVICE(number) cudaSetDevice(number)
#define FX_ERROR() (int)cudaGetLastError()
#endif
"""

_BASICS = """\
#define FX_INLINE static __device__ __forceinline__
FX_INLINE float fx_fma(float a, float b, float c) { return fmaf(a, b, c); }
FX_INLINE double fx_fma(double a, double b, double c) { return fma(a, b, c); }
FX_INLINE int fx_bits(float x) { return __float_as_int(x); }
FX_INLINE long fx_bits(double x) { return __double_as_longlong(x); }
FX_INLINE float fx_float(int bits) { return __int_as_float(bits); }
FX_INLINE double fx_double(long bits) { return __longlong_as_double(bits); }
template <class T> FX_INLINE int fx_int(T x) { return (int)x; }
template <class T> FX_INLINE long fx_long(T x) { return (long)x; }
"""

# Operations on integers that wrap around.
WRAPPING = frozenset({"add", "sub", "mul", "neg", "abs", "shl"})

# Integers wrap in eager, since memory lies between its operators. For nvcc, which has no flag to
# say so, signed ones do not: it takes `x + 1 > x` for true. Unsigned ones do.
_INTEGERS = """\
template <class T> FX_INLINE T fx_add(T a, T b) { return a + b; }
template <class T> FX_INLINE T fx_mul(T a, T b) { return a * b; }
#define FX_WRAPPING(T, U) \\
  FX_INLINE T fx_add(T a, T b) { return (T)((U)a + (U)b); } \\
  FX_INLINE T fx_sub(T a, T b) { return (T)((U)a - (U)b); } \\
  FX_INLINE T fx_mul(T a, T b) { return (T)((U)a * (U)b); } \\
  FX_INLINE T fx_shl(T a, T b) { return (T)((U)a << b); } \\
  FX_INLINE T fx_neg(T a) { return (T)(0 - (U)a); } \\
  FX_INLINE T fx_abs(T a) { return a < 0 ? fx_neg(a) : a; }
FX_WRAPPING(int, unsigned)
FX_WRAPPING(long, unsigned long)
"""

# Where the machine has an instruction for it; NaN is handed on by each.
_EXTREMES = """\
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
FX_INLINE float fx_max(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
FX_INLINE float fx_min(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#endif
"""

# Two numbers are rounded at a time: with nought as the lower one, the pair is the rounded float.
_BFLOAT16 = f"""\
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
FX_INLINE unsigned fx_pair_bf16(float high, float low) {{
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}}
FX_INLINE float fx_from_bf16(unsigned short h) {{ return fx_float((int)((unsigned)h << 16)); }}
FX_INLINE unsigned short fx_to_bf16(float x) {{ return (unsigned short)fx_pair_bf16(0.0f, x); }}
FX_INLINE float fx_round_bf16(float x) {{ return fx_float((int)fx_pair_bf16(x, 0.0f)); }}
#else
{BFLOAT16}#endif
"""

_FLOAT16 = f"""\
#ifdef __CUDA_ARCH__
FX_INLINE float fx_from_f16(unsigned short h) {{
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}}
FX_INLINE unsigned short fx_to_f16(float x) {{
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}}
FX_INLINE float fx_round_f16(float x) {{ return fx_from_f16(fx_to_f16(x)); }}
#else
{FLOAT16}#endif
"""

# Of a power that is at most one, so that what is divided by lies between one and two.
_SIGMOID = """\
FX_INLINE float fx_sigmoid(float x) {
  const float power = expf(-fabsf(x));
  const float size = 1.0f + power;
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(size));
  y = fmaf(fmaf(-size, y, 1.0f), y, y);
#else
  const float y = 1.0f / size;
#endif
  return x < 0.0f ? power * y : y;
}
"""

# What gelu multiplies by is a power of two, for which there is an instruction.
_NORMAL_CDF = f"""\
{NORMAL_EXPONENT}FX_INLINE float fx_normal_cdf(float x) {{
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fx_normal_exponent(x)));
#else
  const float power = exp2f(fx_normal_exponent(x));
#endif
  const float h = __builtin_fabsf(x) > 12.9f ? 0.0f : 0.5f * power;
  return x > 0.0f ? 1.0f - h : h;
}}
"""

_DEFINITIONS = {
    "fx_bf16": _BFLOAT16,
    "fx_f16": _FLOAT16,
    "fx_sigmoid": _SIGMOID,
    "fx_normal_cdf": _NORMAL_CDF,
}

# Division by what many numbers are divided by: a product with the inverse, put right by what is
# left over. Tiny and huge divisors, whose inverse may be none, divide as usual. A quotient that is
# infinite, or none, is right as it is, and so is one of zero, whose sign would be lost.
_QUOTIENT = """\
struct FxDivisor { float by, inverse; bool is_extreme; };
FX_INLINE FxDivisor fx_divisor(float b) {
  const float size = __builtin_fabsf(b);
  return FxDivisor{b, 1.0f / b, !(size > 0x1p-60f && size < 0x1p+60f)};
}
FX_INLINE float fx_quotient(float a, FxDivisor d) {
  if (d.is_extreme) return a / d.by;
  const float first = a * d.inverse;
  const float better = fx_fma(fx_fma(-first, d.by, a), d.inverse, first);
  return a != 0.0f && __builtin_fabsf(first) < __builtin_inff() ? better : first;
}
"""

# As in eager's own kernels, the error is raised by the next call that waits for the GPU.
_CHECK = """\
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
FX_INLINE bool fx_check(bool holds) {
  if (!holds) __assertfail("index out of bounds", "fxkit", 0, "kernel", 1);
  return holds;
}
"""

# Elements go through memory sixteen bytes at a time, or in one piece where there are fewer.
_MEMORY = """\
template <int BYTES> struct FxWord { typedef unsigned char type; };
template <> struct FxWord<2> { typedef unsigned short type; };
template <> struct FxWord<4> { typedef unsigned type; };
template <> struct FxWord<8> { typedef uint2 type; };
template <> struct FxWord<16> { typedef uint4 type; };
template <int N, class T> FX_INLINE void fx_load(T (&to)[N], const T* from) {
  constexpr int bytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  typedef typename FxWord<bytes>::type Word;
  #pragma unroll
  for (int k = 0; k < (int)(N * sizeof(T) / bytes); ++k) {
    const Word word = ((const Word*)from)[k];
    memcpy((char*)to + k * bytes, &word, bytes);
  }
}
template <int N, class T> FX_INLINE void fx_load(T (&to)[N], const T* from, int count) {
  if (count >= N) return fx_load(to, from);
  #pragma unroll
  for (int l = 0; l < N; ++l) to[l] = l < count ? from[l] : (T)0;
}
template <int N, class T> FX_INLINE void fx_store(T* to, const T (&from)[N]) {
  constexpr int bytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  typedef typename FxWord<bytes>::type Word;
  #pragma unroll
  for (int k = 0; k < (int)(N * sizeof(T) / bytes); ++k) {
    Word word;
    memcpy(&word, (const char*)from + k * bytes, bytes);
    ((Word*)to)[k] = word;
  }
}
template <int N, class T> FX_INLINE void fx_store(T* to, const T (&from)[N], int count) {
  if (count >= N) return fx_store(to, from);
  #pragma unroll
  for (int l = 0; l < N; ++l) {
    if (l < count) to[l] = from[l];
  }
}
"""

# `fx_fold` folds a value over the `GROUP` threads of a row, `fx_fold_down` over the `DEPTH` threads
# of a column, for each of `N` columns a thread: all of them get the result. `fx_scan` gives each
# thread of a row what all before it have come to, from `carry` on, and `carry` what all have.
_FOLDS = """\
struct FxAdd { template <class T> static __device__ T of(T a, T b) { return fx_add(a, b); } };
struct FxMul { template <class T> static __device__ T of(T a, T b) { return fx_mul(a, b); } };
struct FxMax { template <class T> static __device__ T of(T a, T b) { return fx_max(a, b); } };
struct FxMin { template <class T> static __device__ T of(T a, T b) { return fx_min(a, b); } };
template <class T> FX_INLINE T fx_exchange(T x, int distance) {
  if constexpr (sizeof(T) < 4) return (T)__shfl_xor_sync(0xffffffffu, (int)x, distance);
  else return __shfl_xor_sync(0xffffffffu, x, distance);
}
template <int WIDTH, class F, class T> FX_INLINE T fx_fold_warp(T x) {
  #pragma unroll
  for (int distance = WIDTH / 2; distance > 0; distance /= 2)
    x = F::of(x, fx_exchange(x, distance));
  return x;
}
template <int COUNT, class T> FX_INLINE T* fx_room() {
  __shared__ T room[COUNT];
  return room;
}
template <int GROUP, class F, class T> FX_INLINE T fx_fold(T x) {
  x = fx_fold_warp<(GROUP < 32 ? GROUP : 32), F>(x);
  if constexpr (GROUP > 32) {
    T* const part = fx_room<GROUP / 32, T>();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = fx_fold_warp<GROUP / 32, F>(part[threadIdx.x % (GROUP / 32)]);
    __syncthreads();
  }
  return x;
}
template <int DEPTH, class F, class T, int N> FX_INLINE void fx_fold_down(T (&x)[N]) {
  T* const part = fx_room<DEPTH * N * 32, T>() + threadIdx.x % 32;
  #pragma unroll
  for (int l = 0; l < N; ++l) part[(threadIdx.x / 32 * N + l) * 32] = x[l];
  __syncthreads();
  #pragma unroll
  for (int l = 0; l < N; ++l) {
    x[l] = part[l * 32];
    #pragma unroll
    for (int k = 1; k < DEPTH; ++k) x[l] = F::of(x[l], part[(k * N + l) * 32]);
  }
  __syncthreads();
}
template <int WIDTH, class T> FX_INLINE T fx_before(T x, int distance) {
  if constexpr (sizeof(T) < 4) return (T)__shfl_up_sync(0xffffffffu, (int)x, distance, WIDTH);
  else return __shfl_up_sync(0xffffffffu, x, distance, WIDTH);
}
template <int WIDTH, class T> FX_INLINE T fx_last(T x) {
  if constexpr (sizeof(T) < 4) return (T)__shfl_sync(0xffffffffu, (int)x, WIDTH - 1, WIDTH);
  else return __shfl_sync(0xffffffffu, x, WIDTH - 1, WIDTH);
}
template <int GROUP, class F, class T> FX_INLINE void fx_scan(T& own, T& carry) {
  constexpr int width = GROUP < 32 ? GROUP : 32;
  const int lane = threadIdx.x % width;
  T sum = own;
  #pragma unroll
  for (int distance = 1; distance < width; distance *= 2) {
    const T left = fx_before<width>(sum, distance);
    if (lane >= distance) sum = F::of(left, sum);
  }
  const T left = fx_before<width>(sum, 1);
  T first = carry;
  if constexpr (GROUP > 32) {
    T* const part = fx_room<GROUP / 32, T>();
    const int warp = threadIdx.x % GROUP / 32;
    if (lane == 31) part[warp] = sum;
    __syncthreads();
    for (int k = 0; k < GROUP / 32; ++k) {
      if (k == warp) first = carry;
      carry = F::of(carry, part[k]);
    }
    __syncthreads();
  } else {
    carry = F::of(carry, fx_last<width>(sum));
  }
  own = lane == 0 ? first : F::of(first, left);
}
template <int DEPTH, class F, class T> FX_INLINE T fx_fold_one_down(T x) {
  T one[1] = {x};
  fx_fold_down<DEPTH, F>(one);
  return one[0];
}
"""

_RENAMED = {
    '__builtin_nanf("")': "__int_as_float(0x7fc00000)",
    '__builtin_nan("")': "__longlong_as_double(0x7ff8000000000000LL)",
    "__builtin_inff()": "__int_as_float(0x7f800000)",
    "__builtin_inf()": "__longlong_as_double(0x7ff0000000000000LL)",
}


def preamble(kernels: Collection[Kernel]) -> str:
    """Return the definitions that the texts of some kernels need."""
    own: set[str] = set()
    composed: set[str] = set()
    for kernel in kernels:
        storage = {buffer.dtype for buffer in kernel.buffers}
        storage |= {i.detail for i in kernel.body if i.op == "round"}
        own |= cpp_text.own_functions(kernel.body, storage)
        composed |= cpp_text.composed_functions(kernel.body, is_guarded=False)
    basics = [_HEAD, _BASICS, _INTEGERS]
    if any(kernel.has_checks for kernel in kernels):
        basics.append(_CHECK)
    # Sines are fxkit's own: CUDA's put a table into memory.
    theirs_by_name = {f"fx_{f.op}": _definition(f) for f in SCALAR_FUNCTIONS.values() if f.cuda}
    functions = theirs_by_name | _DEFINITIONS
    theirs = [functions[name] for name in sorted(own & functions.keys())]
    ours = vector_math.definitions(own - functions.keys())
    parts = [cpp_text.MINMAX, _EXTREMES, _QUOTIENT, *sorted(composed), *theirs, ours]
    return "\n".join([*basics, *map(for_device, parts), _MEMORY, _FOLDS])


def _definition(function: ScalarFunction) -> str:
    return f"FX_INLINE float fx_{function.op}(float x) {{ return {function.cuda}; }}"


def for_device(text: str) -> str:
    """Return C++ text of the other printer as CUDA text."""
    for name, renamed in _RENAMED.items():
        text = text.replace(name, renamed)
    return re.sub(r"\b__builtin_(\w+)", r"\1", text)
