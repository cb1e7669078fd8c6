"""Elementary functions in plain C arithmetic, which a compiler can turn into vector code.

They are used instead of the C library's for float32, where they are faster and where the library
may have no vector version. Coefficients are least-maximum fits made for these intervals. The
largest errors, measured over the whole range of float32 against float64, are stated in `MAX_ULP`
and tested; with no fused multiply-add on the machine an error may be up to one unit in the last
place larger.
"""

from __future__ import annotations

MAX_ULP = {"fx_exp": 1.0, "fx_log": 1.0, "fx_tanh": 1.5, "fx_erf": 1.5, "fx_sigmoid": 2.5}

# One rounding where the machine can, as torch's vector code; elsewhere two, as torch's scalar code.
BASICS = """\
#ifdef __FMA__
static inline float fx_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fx_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static inline float fx_fma(float a, float b, float c) { return a * b + c; }
static inline double fx_fma(double a, double b, double c) { return a * b + c; }
#endif
static inline int fx_bits(float x) { return __builtin_bit_cast(int, x); }
static inline float fx_float(int bits) { return __builtin_bit_cast(float, bits); }
"""

# exp(x) = 2^n exp(r), |r| <= ln(2)/2. The scale is applied in two halves, so that results that
# overflow or are subnormal are rounded once.
_EXP = """\
static inline float fx_exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.8p+23f);
  float n = shifted - 0x1.8p+23f;
  float r = fx_fma(n, -0x1.62e4p-1f, x);
  r = fx_fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a23fp-10f;
  p = fx_fma(p, r, 0x1.123a0ap-7f);
  p = fx_fma(p, r, 0x1.5558f2p-5f);
  p = fx_fma(p, r, 0x1.555492p-3f);
  p = fx_fma(p, r, 0x1.fffffcp-2f);
  p = fx_fma(p, r * r, r) + 1.0f;
  int scale = fx_bits(shifted) - 0x4b400000;
  int half = scale >> 1;
  return p * fx_float((half + 127) << 23) * fx_float((scale - half + 127) << 23);
}
"""

# log(x) = n ln(2) + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)); subnormal x is scaled up first.
_LOG = """\
static inline float fx_log(float x) {
  bool tiny = x < 0x1p-126f;
  int bits = fx_bits(tiny ? x * 0x1p+23f : x) - 0x3f3504f3;
  float n = (float)(bits >> 23) - (tiny ? 23.0f : 0.0f);
  float f = fx_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float p = -0x1.38b57cp-4f;
  p = fx_fma(p, f, 0x1.055b6ap-3f);
  p = fx_fma(p, f, -0x1.0d8542p-3f);
  p = fx_fma(p, f, 0x1.22da1ep-3f);
  p = fx_fma(p, f, -0x1.547244p-3f);
  p = fx_fma(p, f, 0x1.99a008p-3f);
  p = fx_fma(p, f, -0x1.000226p-2f);
  p = fx_fma(p, f, 0x1.555554p-2f);
  float s = f * f;
  float low = fx_fma(n, 0x1.7f7d1cp-20f, s * f * p);
  low = fx_fma(s, -0.5f, low);
  float y = fx_fma(n, 0x1.62e4p-1f, f + low);
  y = x < __builtin_inff() ? y : x;
  y = x == 0.0f ? -__builtin_inff() : y;
  return x < 0.0f ? __builtin_nanf("") : y;
}
"""

# tanh(x) = x + x^3 P(x^2) near zero, else 1 - 2 / (exp(2|x|) + 1) with the sign of x.
_TANH = """\
static inline float fx_tanh(float x) {
  float a = __builtin_fabsf(x);
  float s = x * x;
  float p = -0x1.76ac18p-8f;
  p = fx_fma(p, s, 0x1.5256d6p-6f);
  p = fx_fma(p, s, -0x1.b84448p-5f);
  p = fx_fma(p, s, 0x1.110768p-3f);
  p = fx_fma(p, s, -0x1.555534p-2f);
  float near = fx_fma(p * s, x, x);
  float far = 1.0f - 2.0f / (fx_exp(2.0f * a) + 1.0f);
  return a < 0.625f ? near : __builtin_copysignf(far, x);
}
"""

# erf(x) = x + x P(x^2) near zero, else 1 - exp(Q(|x|)) with the sign of x; 1 from |x| = 4 on.
_ERF = """\
static inline float fx_erf(float x) {
  float a = __builtin_fabsf(x);
  float s = x * x;
  float p = 0x1.5f953cp-14f;
  p = fx_fma(p, s, -0x1.ab105cp-11f);
  p = fx_fma(p, s, 0x1.54df1ap-8f);
  p = fx_fma(p, s, -0x1.b810e8p-6f);
  p = fx_fma(p, s, 0x1.ce2e24p-4f);
  p = fx_fma(p, s, -0x1.812744p-2f);
  p = fx_fma(p, s, 0x1.06eba8p-3f);
  float near = fx_fma(p, x, x);
  a = a > 4.0f ? 4.0f : a;
  float q = -0x1.5d71d6p-16f;
  q = fx_fma(q, a, 0x1.c4590ep-12f);
  q = fx_fma(q, a, -0x1.106250p-8f);
  q = fx_fma(q, a, 0x1.9aebaep-6f);
  q = fx_fma(q, a, -0x1.bb4548p-4f);
  q = fx_fma(q, a, -0x1.444d1ep-1f);
  q = fx_fma(q, a, -0x1.212626p+0f);
  q = fx_fma(q, a, 0x1.62d8a4p-13f);
  float far = 1.0f - fx_exp(q);
  return a < 0.92f ? near : __builtin_copysignf(far, x);
}
"""

_SIGMOID = """\
static inline float fx_sigmoid(float x) { return 1.0f / (1.0f + fx_exp(-x)); }
"""

# Rounding is to nearest, ties to even; a NaN stays one.
_BFLOAT16 = """\
static inline float fx_from_bf16(unsigned short h) { return fx_float((int)((unsigned)h << 16)); }
static inline unsigned short fx_to_bf16(float x) {
  unsigned bits = (unsigned)fx_bits(x);
  unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (unsigned short)(x != x ? 0x7fc0u : rounded);
}
static inline float fx_round_bf16(float x) { return fx_from_bf16(fx_to_bf16(x)); }
"""

# A subnormal half is a normal float once scaled by 2^112; the sum with `magic` rounds in hardware.
_FLOAT16 = """\
static inline float fx_from_f16(unsigned short h) {
  unsigned magnitude = ((unsigned)h & 0x7fffu) << 13;
  float normal = fx_float((int)magnitude) * 0x1p+112f;
  float y = magnitude >= 0x0f800000u ? fx_float((int)(magnitude | 0x7f800000u)) : normal;
  return fx_float(fx_bits(y) | (int)(((unsigned)h & 0x8000u) << 16));
}
static inline unsigned short fx_to_f16(float x) {
  unsigned sign = (unsigned)fx_bits(x) & 0x80000000u;
  unsigned bits = (unsigned)fx_bits(x) ^ sign;
  unsigned tiny = (unsigned)fx_bits(fx_float((int)bits) + 0.5f) - 0x3f000000u;
  unsigned normal = (bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1u)) >> 13;
  unsigned large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  unsigned y = bits < 0x38800000u ? tiny : normal;
  y = bits >= 0x47800000u ? large : y;
  return (unsigned short)(y | (sign >> 16));
}
static inline float fx_round_f16(float x) { return fx_from_f16(fx_to_f16(x)); }
"""

# Each function's text, after the texts that it needs. Order is the order of printing.
_SOURCES = {
    "fx_exp": (_EXP, ()),
    "fx_log": (_LOG, ()),
    "fx_tanh": (_TANH, ("fx_exp",)),
    "fx_erf": (_ERF, ("fx_exp",)),
    "fx_sigmoid": (_SIGMOID, ("fx_exp",)),
    "fx_bf16": (_BFLOAT16, ()),
    "fx_f16": (_FLOAT16, ()),
}


def definitions(names: set[str]) -> str:
    """Return the C++ definitions of the functions in `names` and of those that they call."""
    needed = set(names)
    for name in names:
        needed.update(_SOURCES[name][1])
    texts = [text for name, (text, _) in _SOURCES.items() if name in needed]
    return "\n".join(texts)
