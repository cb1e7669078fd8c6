"""Sine and cosine in plain C arithmetic: reduction of the argument, polynomials."""

from __future__ import annotations

# |x| = (q + f) pi/2 with f in [-1/2, 1/2], over the whole range: the mantissa of x times the bits
# of 2/pi that matter at its exponent, kept modulo 4 by the overflow of integers, with 62 bits of
# fraction. The remainder is a float and what the float leaves out.
TURN = """\
FX_INLINE unsigned fx_word(
    unsigned shift, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e) {
  unsigned word = shift < 64u ? a : b;
  word = shift < 96u ? word : c;
  word = shift < 128u ? word : d;
  return shift < 160u ? word : e;
}
FX_INLINE int fx_turn(float x, float* high, float* low) {
  int bits = fx_bits(x) & 0x7fffffff;
  unsigned shift = (unsigned)((bits >> 23) < 120 ? 32 : (bits >> 23) - 88);
  unsigned s = shift & 31u, t = 31u - s;
  unsigned w0 = fx_word(shift, 0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u);
  unsigned w1 = fx_word(shift, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u);
  unsigned w2 = fx_word(shift, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u);
  unsigned w3 = fx_word(shift, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu);
  unsigned m = (unsigned)((bits & 0x007fffff) | 0x00800000);
  unsigned long second = (unsigned long)m * ((w1 << s) | ((w2 >> 1) >> t));
  unsigned long third = (unsigned long)m * ((w2 << s) | ((w3 >> 1) >> t));
  unsigned long below = second + (third >> 32);
  unsigned turns = m * ((w0 << s) | ((w1 >> 1) >> t)) + (unsigned)(below >> 32);
  unsigned quarters = (turns + 0x20000000u) >> 30;
  int f = (int)(turns - (quarters << 30));
  float g = (float)f;
  float rest = (float)(f - (int)g) + (float)(int)((unsigned)below >> 1) * 0x1p-31f;
  float h = g * 0x1.921fb6p-30f;
  float l = fx_fma(g, 0x1.921fb6p-30f, -h) + fx_fma(rest, 0x1.921fb6p-30f, g * -0x1.777a5cp-55f);
  float sum = h + l;
  bool near = bits < 0x3f490fdb;
  *high = near ? fx_float(bits) : sum;
  *low = near ? 0.0f : l - (sum - h);
  return near ? 0 : (int)quarters;
}
FX_INLINE float fx_sine(int quarters, float r, float low) {
  float s = r * r;
  float p = 0x1.6cd87ap-19f;
  p = fx_fma(p, s, -0x1.a00f9ep-13f);
  p = fx_fma(p, s, 0x1.111108p-7f);
  p = fx_fma(p, s, -0x1.555556p-3f);
  float sine = r + fx_fma(p * s, r, low);
  float c = -0x1.242aeep-22f;
  c = fx_fma(c, s, 0x1.a0112p-16f);
  c = fx_fma(c, s, -0x1.6c16b8p-10f);
  c = fx_fma(c, s, 0x1.555556p-5f);
  float one = fx_fma(s, -0.5f, 1.0f);
  float rest = fx_fma(s, -0.5f, 1.0f - one);
  float cosine = one + fx_fma(c, s * s, fx_fma(-r, low, rest));
  float y = (quarters & 1) ? cosine : sine;
  return fx_float(fx_bits(y) ^ ((quarters & 2) << 30));
}
"""
SIN = """\
FX_INLINE float fx_sin(float x) {
  float r, low;
  int quarters = fx_turn(x, &r, &low);
  float y = fx_float(fx_bits(fx_sine(quarters, r, low)) ^ (fx_bits(x) & (int)0x80000000));
  return __builtin_fabsf(x) < __builtin_inff() ? y : x - x;
}
"""
COS = """\
FX_INLINE float fx_cos(float x) {
  float r, low;
  int quarters = fx_turn(x, &r, &low);
  float y = fx_sine(quarters + 1, r, low);
  return __builtin_fabsf(x) < __builtin_inff() ? y : x - x;
}
"""

# For |x| < 2^18 a product with pi/2 in three parts leaves all bits that count: `n` times the first
# part and the sum with x are exact. Elsewhere, and for NaN, the results are void.
NEAR = """\
FX_INLINE bool fx_is_far(float x) { return !(__builtin_fabsf(x) < 0x1p+18f); }
#ifdef __FMA__
FX_INLINE int fx_turn_near(float x, float* high, float* low) {
  float shifted = fx_fma(x, 0x1.45f306p-1f, 0x1.8p+23f);
  float n = shifted - 0x1.8p+23f;
  float r = fx_fma(n, -0x1.921fb6p+0f, x);
  float p = n * 0x1.777a5cp-25f;
  float rest = fx_fma(n, 0x1.ee59dap-50f, fx_fma(n, 0x1.777a5cp-25f, -p));
  float sum = r + p;
  float part = sum - r;
  *high = sum;
  *low = ((r - (sum - part)) + (p - part)) + rest;
  return fx_bits(shifted);
}
FX_INLINE float fx_sin_near(float x) {
  float r, low;
  int quarters = fx_turn_near(x, &r, &low);
  float y = fx_sine(quarters, r, low);
  return x == 0.0f ? x : y;
}
FX_INLINE float fx_cos_near(float x) {
  float r, low;
  int quarters = fx_turn_near(x, &r, &low);
  return fx_sine(quarters + 1, r, low);
}
#else
FX_INLINE float fx_sin_near(float x) { return fx_sin(x); }
FX_INLINE float fx_cos_near(float x) { return fx_cos(x); }
#endif
"""
