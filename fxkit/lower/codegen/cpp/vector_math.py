"""Elementary functions in plain C arithmetic, which a compiler can turn into vector code.

They are used instead of the C library's for float32, where they are faster and where the library
may have no vector version. Coefficients are least-maximum fits made for these intervals. The
largest errors, measured over the whole range of float32 against float64, are stated in `MAX_ULP`
and tested; that of `fx_normal_cdf` is below 9e-8, and for negative x below 6e-8. With no fused
multiply-add on the machine an error may be up to one unit in the last place larger.
"""

from __future__ import annotations

from fxkit.lower.codegen.cpp.storage_math import BFLOAT16, FLOAT16
from fxkit.lower.codegen.cpp.trigonometric_math import COS, NEAR, SIN, TURN

MAX_ULP = {
    "fx_exp": 1.0, "fx_log": 1.0, "fx_tanh": 1.5, "fx_erf": 1.5, "fx_sigmoid": 2.5,
    "fx_sin": 1.0, "fx_cos": 1.0, "fx_expm1": 1.5, "fx_log1p": 1.5, "fx_exp_plus_one": 1.5,
    "fx_tanh_log1p": 2.5, "fx_exp_raised": 2.0,
}  # fmt: skip

# By how much functions may be off, as a part of the result, where that is rounded to bfloat16,
# whose numbers lie 2^-8 of themselves apart at least.
COARSE = 2.0**-13

# A loop with a call in it becomes no vector code, and the compiler by itself leaves calls of what
# is called twice. A fused multiply-add rounds once where the machine has one, as torch's vector
# code; elsewhere twice, as torch's scalar code. `fx_quotient` is a / b, rounded once, where r is
# 1 / b, a is above 2^-100 and none of them large: a division takes several times as long. Numbers
# that no integer is near become what the machine's instruction makes of them, as in torch: where
# the compiler knows such a number, it would put another integer in its place.
BASICS = """\
#define FX_INLINE static inline __attribute__((always_inline))
#ifdef __FMA__
FX_INLINE float fx_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FX_INLINE double fx_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
FX_INLINE float fx_fma(float a, float b, float c) { return a * b + c; }
FX_INLINE double fx_fma(double a, double b, double c) { return a * b + c; }
#endif
#ifdef __FMA__
FX_INLINE float fx_quotient(float a, float b, float r) {
  float q = a * r;
  return fx_fma(fx_fma(-q, b, a), r, q);
}
#else
FX_INLINE float fx_quotient(float a, float b, float) { return a / b; }
#endif
FX_INLINE int fx_bits(float x) { return __builtin_bit_cast(int, x); }
FX_INLINE long fx_bits(double x) { return __builtin_bit_cast(long, x); }
FX_INLINE float fx_float(int bits) { return __builtin_bit_cast(float, bits); }
FX_INLINE double fx_double(long bits) { return __builtin_bit_cast(double, bits); }
#ifdef __x86_64__
FX_INLINE int fx_int(float x) { return __builtin_fabsf(x) < 0x1p+31f ? (int)x : 1 << 31; }
FX_INLINE int fx_int(double x) { return __builtin_fabs(x) < 0x1p+31 ? (int)x : 1 << 31; }
FX_INLINE long fx_long(float x) { return __builtin_fabsf(x) < 0x1p+63f ? (long)x : 1L << 63; }
FX_INLINE long fx_long(double x) { return __builtin_fabs(x) < 0x1p+63 ? (long)x : 1L << 63; }
#else
template <class T> FX_INLINE int fx_int(T x) { return (int)x; }
template <class T> FX_INLINE long fx_long(T x) { return (long)x; }
#endif
FX_INLINE float fx_unsigned_zero(float x) { return fx_float(fx_bits(x) & -(int)(x != 0)); }
FX_INLINE double fx_unsigned_zero(double x) { return fx_double(fx_bits(x) & -(long)(x != 0)); }
"""

# exp(x) = 2^n (1 + (exp(r) - 1)), |r| <= ln(2)/2, where n plus the bias of an exponent is read from
# the low bits of a float shifted by 2^23 and that bias. `fx_exp_within` serves -87 <= x <= 88.
# Elsewhere the scale is applied in two steps, so that results that are subnormal are rounded once.
# `fx_exp_down` serves x <= 40 and NaN, with the numbers of `fx_exp`. `fx_exp_raised` serves x <= 20
# and NaN, with 2^64 times the exponential, and 0 below -131; it is meant for shares of a sum, which
# would be subnormal where it is small but not 0.
# `fx_coarse_exp_raised` is that within a part of `COARSE`. `fx_exp_plus_one` rounds once what is
# computed of half of it: 2^128 is no float. `fx_coarse_gated` is y times the sigmoid of x, within a
# part of `COARSE`.
_EXP = """\
FX_INLINE float fx_exp_rest(float x, float n) {
  float r = fx_fma(n, -0x1.62e4p-1f, x);
  r = fx_fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a23fp-10f;
  p = fx_fma(p, r, 0x1.123a0ap-7f);
  p = fx_fma(p, r, 0x1.5558f2p-5f);
  p = fx_fma(p, r, 0x1.555492p-3f);
  p = fx_fma(p, r, 0x1.fffffcp-2f);
  return fx_fma(p, r * r, r);
}
FX_INLINE float fx_exp_within(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.8000fep+23f);
  float p = fx_exp_rest(x, shifted - 0x1.8000fep+23f);
  float scale = fx_float(fx_bits(shifted) << 23);
  return fx_fma(p, scale, scale);
}
FX_INLINE float fx_exp(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.8p+23f);
  float p = fx_exp_rest(x, shifted - 0x1.8p+23f);
  float first = fx_float((fx_bits(shifted) << 23) + (x > 0.0f ? 0x1f800000 : 0x5f800000));
  float y = fx_fma(p, first, first) * (x > 0.0f ? 0x1p+64f : 0x1p-64f);
  y = x > 0x1.62e42ep+6f ? __builtin_inff() : y;
  return x < -0x1.9fe368p+6f ? 0.0f : y;
}
FX_INLINE float fx_exp_down(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.80017ep+23f);
  float p = fx_exp_rest(x, shifted - 0x1.80017ep+23f);
  float first = fx_float(fx_bits(shifted) << 23);
  float y = fx_fma(p, first, first) * 0x1p-64f;
  return x < -0x1.9fe368p+6f ? 0.0f : y;
}
FX_INLINE float fx_exp_raised(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.80017ep+23f);
  float p = fx_exp_rest(x, shifted - 0x1.80017ep+23f);
  float first = fx_float(fx_bits(shifted) << 23);
  float y = fx_fma(p, first, first);
  return x < -131.0f ? 0.0f : y;
}
FX_INLINE float fx_coarse_exp_raised(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.80017ep+23f);
  float r = fx_fma(shifted - 0x1.80017ep+23f, -0x1.62e43p-1f, x);
  float p = fx_fma(r, 0x1.5225b6p-5f, 0x1.571caap-3f);
  p = fx_fma(fx_fma(p, r, 0x1.0006b4p-1f), r, 1.0f);
  float first = fx_float(fx_bits(shifted) << 23);
  float y = fx_fma(p, first * r, first);
  return x < -131.0f ? 0.0f : y;
}
FX_INLINE float fx_exp_plus_one(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.8000fcp+23f);
  float p = fx_exp_rest(x, shifted - 0x1.8000fcp+23f) + 1.0f;
  float half = fx_fma(p, fx_float(fx_bits(shifted) << 23), 0.5f);
  float y = x > 0x1.62e42ep+6f ? __builtin_inff() : 2.0f * half;
  return x < -86.0f ? 1.0f : y;
}
FX_INLINE float fx_coarse_gated(float y, float x) { return y / fx_exp_plus_one(-x); }
"""

# log(1 + f) = f - f^2 / 2 + f^3 P(f) for 1 + f in [sqrt(1/2), sqrt(2)).
_LOG_REST = """\
FX_INLINE float fx_log_rest(float f) {
  float p = -0x1.38b57cp-4f;
  p = fx_fma(p, f, 0x1.055b6ap-3f);
  p = fx_fma(p, f, -0x1.0d8542p-3f);
  p = fx_fma(p, f, 0x1.22da1ep-3f);
  p = fx_fma(p, f, -0x1.547244p-3f);
  p = fx_fma(p, f, 0x1.99a008p-3f);
  p = fx_fma(p, f, -0x1.000226p-2f);
  return fx_fma(p, f, 0x1.555554p-2f);
}
"""

# log(x) = n ln(2) + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)); subnormal x is scaled up first.
_LOG = """\
FX_INLINE float fx_log(float x) {
  bool tiny = x < 0x1p-126f;
  int bits = fx_bits(tiny ? x * 0x1p+23f : x) - 0x3f3504f3;
  float n = (float)(bits >> 23) - (tiny ? 23.0f : 0.0f);
  float f = fx_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float s = f * f;
  float low = fx_fma(n, 0x1.7f7d1cp-20f, s * f * fx_log_rest(f));
  low = fx_fma(s, -0.5f, low);
  float y = fx_fma(n, 0x1.62e4p-1f, f + low);
  y = x < __builtin_inff() ? y : x;
  y = x == 0.0f ? -__builtin_inff() : y;
  return x < 0.0f ? __builtin_nanf("") : y;
}
"""

# tanh(x) = x + x^3 P(x^2) near zero, else 1 - 2 / (exp(2|x|) + 1) with the sign of x; 1 from 10 on.
# tanh(log(1 + x)) = ((1 + x)^2 - 1) / ((1 + x)^2 + 1); `fx_tanh_softplus` is that of exp(x), and 1
# long before it could overflow.
_TANH = """\
FX_INLINE float fx_tanh(float x) {
  float a = __builtin_fabsf(x);
  float s = x * x;
  float p = -0x1.76ac18p-8f;
  p = fx_fma(p, s, 0x1.5256d6p-6f);
  p = fx_fma(p, s, -0x1.b84448p-5f);
  p = fx_fma(p, s, 0x1.110768p-3f);
  p = fx_fma(p, s, -0x1.555534p-2f);
  float near = fx_fma(p * s, x, x);
  float b = a > 10.0f ? 10.0f : a;
  float far = 1.0f - 2.0f / (fx_exp_within(2.0f * b) + 1.0f);
  return __builtin_copysignf(a < 0.625f ? near : far, x);
}
FX_INLINE float fx_tanh_log1p(float x) {
  float a = x > 0x1p+30f ? 0x1p+30f : x;
  float n = fx_fma(a, a, 2.0f * a);
  float y = n / (n + 2.0f);
  return x < -1.0f ? __builtin_nanf("") : y;
}
FX_INLINE float fx_tanh_softplus(float x) {
  float a = fx_exp_down(x > 40.0f ? 40.0f : x);
  float n = fx_fma(a, a, 2.0f * a);
  return n / (n + 2.0f);
}
"""

# erf(x) = x + x P(x^2) near zero, else 1 - exp(Q(|x|)) with the sign of x; 1 from |x| = 4 on.
_ERF = """\
FX_INLINE float fx_erf(float x) {
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
  float far = 1.0f - fx_exp_within(q);
  return a < 0.92f ? near : __builtin_copysignf(far, x);
}
"""

# The numerator and the denominator are half of what they are called, as in `fx_exp_plus_one`.
_SIGMOID = """\
FX_INLINE float fx_sigmoid(float x) {
  float shifted = fx_fma(x, -0x1.715476p+0f, 0x1.8000fcp+23f);
  float p = fx_exp_rest(-x, shifted - 0x1.8000fcp+23f) + 1.0f;
  float y = 0.5f / fx_fma(p, fx_float(fx_bits(shifted) << 23), 0.5f);
  y = x < -0x1.62e42ep+6f ? 0.0f : y;
  return x > 86.0f ? 1.0f : y;
}
FX_INLINE float fx_coarse_sigmoid(float x) { return fx_sigmoid(x); }
"""

# Probability that a standard normal variable is below x: 2^Q(|x|) / 2 for x <= 0, mirrored above.
# It is what gelu multiplies x with, and does not cancel for negative x, as 1 + erf(x) does. Q is
# evaluated in pairs, which wait less for each other than Horner's steps. Where the result would be
# subnormal it is 0.
NORMAL_EXPONENT = """\
FX_INLINE float fx_normal_exponent(float x) {
  float a = __builtin_fabsf(x);
  float s = x * x;
  float s2 = s * s;
  float q01 = -0x1.26af04p+0f * a;
  float q23 = fx_fma(-0x1.aec888p-5f, a, -0x1.d6335cp-2f);
  float q45 = fx_fma(-0x1.dbc908p-13f, a, 0x1.d75960p-8f);
  float q67 = fx_fma(0x1.41f7ccp-15f, a, -0x1.4bfe16p-13f);
  float q89 = fx_fma(0x1.daafeep-23f, a, -0x1.16810ap-18f);
  float q03 = fx_fma(q23, s, q01);
  float q47 = fx_fma(q67, s, q45);
  float q8 = fx_fma(-0x1.4008eap-28f, s, q89);
  return fx_fma(fx_fma(q8, s2, q47), s2, q03);
}
"""

_NORMAL_CDF = """\
FX_INLINE float fx_normal_cdf(float x) {
  float q = fx_normal_exponent(x);
  float shifted = q + 0x1.8000fcp+23f;
  float f = q - (shifted - 0x1.8000fcp+23f);
  float p = 0x1.417a9ap-13f;
  p = fx_fma(p, f, 0x1.5f0948p-10f);
  p = fx_fma(p, f, 0x1.3b2dd2p-7f);
  p = fx_fma(p, f, 0x1.c6af7ap-5f);
  p = fx_fma(p, f, 0x1.ebfbdcp-3f);
  p = fx_fma(p, f, 0x1.62e43p-1f);
  p = fx_fma(p, f, 1.0f);
  float h = p * fx_float(fx_bits(shifted) << 23);
  h = __builtin_fabsf(x) > 12.9f ? 0.0f : h;
  return x > 0.0f ? 1.0f - h : h;
}
"""

_NEXTAFTER = """\
FX_INLINE float fx_nextafter(float a, float b) {
  float y = fx_float(fx_bits(a) + ((b > a) == (a > 0.0f) ? 1 : -1));
  y = a == 0.0f ? fx_float((fx_bits(b) & (int)0x80000000) | 1) : y;
  y = a == b ? b : y;
  return (a != a) | (b != b) ? a + b : y;
}
"""

# The quotient of a and b is never rounded below a whole number that it reaches, and where it is
# rounded up to one that it does not reach, what is left over is negative, and exact too.
_FMOD = """\
FX_INLINE bool fx_is_far(float a, float b) {
  const float size = __builtin_fabsf(b);
  return !((__builtin_fabsf(a) < 0x1p+22f * size) & (size < 0x1p+100f));
}
FX_INLINE bool fx_is_far(double a, double b) {
  const double size = __builtin_fabs(b);
  return !((__builtin_fabs(a) < 0x1p+51 * size) & (size < 0x1p+960));
}
#ifdef __FMA__
FX_INLINE float fx_fmod_near(float a, float b) {
  float rest = fx_fma(-__builtin_truncf(a / b), b, a);
  rest = (a < 0.0f ? -rest : rest) < 0.0f ? rest + __builtin_copysignf(b, a) : rest;
  return __builtin_copysignf(rest, a);
}
FX_INLINE double fx_fmod_near(double a, double b) {
  double rest = fx_fma(-__builtin_trunc(a / b), b, a);
  rest = (a < 0.0 ? -rest : rest) < 0.0 ? rest + __builtin_copysign(b, a) : rest;
  return __builtin_copysign(rest, a);
}
#else
FX_INLINE float fx_fmod_near(float a, float b) { return __builtin_fmodf(a, b); }
FX_INLINE double fx_fmod_near(double a, double b) { return __builtin_fmod(a, b); }
#endif
"""

# exp(x) - 1 = 2^n p + (2^n - 1) with p = exp(r) - 1; half of it is summed, since 2^128 is no float.
_EXPM1 = """\
FX_INLINE float fx_expm1(float x) {
  float shifted = fx_fma(x, 0x1.715476p+0f, 0x1.8000fcp+23f);
  float n = shifted - 0x1.8000fcp+23f;
  float r = fx_fma(n, -0x1.62e4p-1f, x);
  r = fx_fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.a1a43p-13f;
  p = fx_fma(p, r, 0x1.6d790cp-10f);
  p = fx_fma(p, r, 0x1.11108ep-7f);
  p = fx_fma(p, r, 0x1.5554aap-5f);
  p = fx_fma(p, r, 0x1.555556p-3f);
  p = fx_fma(p, r, 0.5f);
  p = fx_fma(p, r * r, r);
  float scale = fx_float(fx_bits(shifted) << 23);
  float y = 2.0f * fx_fma(p, scale, scale - 0.5f);
  y = n == 0.0f ? p : y;
  y = x < -18.0f ? -1.0f : y;
  y = x > 0x1.62e42ep+6f ? __builtin_inff() : y;
  return __builtin_copysignf(y, x);
}
"""

# log(1 + x) = n ln(2) + log(1 + f) with 1 + f = (1 + x) / 2^n, where f is made of x itself.
_LOG1P = """\
FX_INLINE float fx_log1p(float x) {
  int bits = fx_bits(1.0f + x) - 0x3f3504f3;
  int n = bits >> 23;
  float large = fx_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float scale = fx_float((127 - n) << 23);
  float f = n > 24 ? large : fx_fma(x, scale, scale - 1.0f);
  float s = f * f;
  float low = fx_fma((float)n, 0x1.7f7d1cp-20f, s * f * fx_log_rest(f));
  low = fx_fma(s, -0.5f, low);
  float y = __builtin_copysignf(fx_fma((float)n, 0x1.62e4p-1f, f + low), x);
  y = x < __builtin_inff() ? y : x;
  y = x == -1.0f ? -__builtin_inff() : y;
  return x < -1.0f ? __builtin_nanf("") : y;
}
"""

# Each function's text, after the texts that it needs. Order is the order of printing.
_SOURCES = {
    "fx_exp": (_EXP, ()),
    "fx_log_rest": (_LOG_REST, ()),
    "fx_log": (_LOG, ("fx_log_rest",)),
    "fx_tanh": (_TANH, ("fx_exp",)),
    "fx_erf": (_ERF, ("fx_exp",)),
    "fx_sigmoid": (_SIGMOID, ("fx_exp",)),
    "fx_normal_exponent": (NORMAL_EXPONENT, ()),
    "fx_normal_cdf": (_NORMAL_CDF, ("fx_normal_exponent",)),
    "fx_turn": (TURN, ()),
    "fx_sin": (SIN, ("fx_turn",)),
    "fx_cos": (COS, ("fx_turn",)),
    "fx_near": (NEAR, ("fx_turn", "fx_sin", "fx_cos")),
    "fx_nextafter": (_NEXTAFTER, ()),
    "fx_fmod": (_FMOD, ()),
    "fx_expm1": (_EXPM1, ()),
    "fx_log1p": (_LOG1P, ("fx_log_rest",)),
    "fx_bf16": (BFLOAT16, ()),
    "fx_f16": (FLOAT16, ()),
}


def definitions(names: set[str]) -> str:
    """Return the C++ definitions of the functions in `names` and of those that they call."""
    needed = set(names)
    for name in names:
        needed.update(_SOURCES[name][1])
    texts = [text for name, (text, _) in _SOURCES.items() if name in needed]
    return "\n".join(texts)
