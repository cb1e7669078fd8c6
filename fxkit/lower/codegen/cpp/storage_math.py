"""C++ conversions between float32 and the 16-bit formats of memory."""

from __future__ import annotations

# Rounding is to nearest, ties to even; a NaN stays one: in the functions that are named so, only a
# quiet one whose lower half is nought. `held` is what bfloat16 has.
BFLOAT16 = """\
FX_INLINE float fx_from_bf16(unsigned short h) { return fx_float((int)((unsigned)h << 16)); }
FX_INLINE unsigned short fx_to_bf16(float x) {
  unsigned bits = (unsigned)fx_bits(x);
  unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (unsigned short)(x != x ? 0x7fc0u : rounded);
}
FX_INLINE float fx_round_bf16(float x) { return fx_from_bf16(fx_to_bf16(x)); }
FX_INLINE unsigned short fx_to_held_bf16(float x) {
  return (unsigned short)((unsigned)fx_bits(x) >> 16);
}
FX_INLINE unsigned short fx_to_quiet_bf16(float x) {
  unsigned bits = (unsigned)fx_bits(x);
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
FX_INLINE float fx_round_quiet_bf16(float x) {
  unsigned bits = (unsigned)fx_bits(x);
  return fx_float((int)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u));
}
"""

# A subnormal half is a normal float once scaled by 2^112. To round a float, what is added to it and
# taken off again is one and a half times the number whose last place is that of a half so large:
# the sum rounds in hardware. What is `lone` stands in no loop that becomes vector code.
FLOAT16 = """\
FX_INLINE float fx_from_f16(unsigned short h) {
  float y = fx_float((int)((unsigned)(short)h << 13) & (int)0x8fffe000) * 0x1p+112f;
  return (h & 0x7c00) == 0x7c00 ? fx_float(fx_bits(y) | 0x7f800000) : y;
}
FX_INLINE unsigned short fx_to_f16(float x) {
  unsigned sign = (unsigned)fx_bits(x) & 0x80000000u;
  unsigned bits = (unsigned)fx_bits(x) ^ sign;
  unsigned tiny = (unsigned)fx_bits(fx_float((int)bits) + 0.5f) - 0x3f000000u;
  unsigned normal = (bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1u)) >> 13;
  unsigned large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  unsigned y = bits < 0x38800000u ? tiny : normal;
  y = bits >= 0x47800000u ? large : y;
  return (unsigned short)(y | (sign >> 16));
}
FX_INLINE float fx_round_f16(float x) {
  int exponent = fx_bits(x) & 0x7f800000;
  exponent = exponent > 0x38800000 ? exponent : 0x38800000;
  float magic = fx_float(exponent + 0x06c00000);
  float y = (x + magic) - magic;
  y = __builtin_fabsf(x) >= 65520.0f ? __builtin_inff() : y;
  return __builtin_copysignf(y, x);
}
#if defined(__F16C__) && defined(__clang__)
typedef _Float16 fx_half;
#define FX_HALF
#elif defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE)
typedef __fp16 fx_half;
#define FX_HALF
#endif
#if defined(FX_HALF)
FX_INLINE float fx_from_lone_f16(unsigned short h) { return __builtin_bit_cast(fx_half, h); }
FX_INLINE unsigned short fx_to_lone_f16(float x) {
  return __builtin_bit_cast(unsigned short, (fx_half)x);
}
#elif defined(__F16C__)
typedef short fx_lone_halves __attribute__((vector_size(16)));
typedef float fx_lone_floats __attribute__((vector_size(16)));
FX_INLINE float fx_from_lone_f16(unsigned short h) {
  return ((fx_lone_floats)__builtin_ia32_vcvtph2ps(fx_lone_halves{(short)h}))[0];
}
FX_INLINE unsigned short fx_to_lone_f16(float x) {
  return (unsigned short)((fx_lone_halves)__builtin_ia32_vcvtps2ph(fx_lone_floats{x}, 0))[0];
}
#else
FX_INLINE float fx_from_lone_f16(unsigned short h) { return fx_from_f16(h); }
FX_INLINE unsigned short fx_to_lone_f16(float x) { return fx_to_f16(x); }
#endif
FX_INLINE float fx_round_lone_f16(float x) { return fx_from_lone_f16(fx_to_lone_f16(x)); }
"""
