// Elementary functions of as many floats as AVX-512 handles at once, with the errors that
// `vector_math.MAX_ULP` states. They look values up in tables that stay in registers.

#if FX_WIDE > 1
// What a table of 16, or of 32 in two halves, holds at the lowest bits of an index.
FX_INLINE fx_floats fx_looked_up(fx_floats table, fx_ints index) {
  fx_floats y;
  asm("vpermps %1, %2, %0" : "=v"(y) : "v"(table), "v"(index));
  return y;
}
FX_INLINE fx_floats fx_looked_up(fx_floats low, fx_floats high, fx_ints index) {
  asm("vpermt2ps %2, %1, %0" : "+v"(low) : "v"(index), "v"(high));
  return low;
}
FX_INLINE fx_floats fx_looked_up(const float* table, fx_ints index) {
  return fx_looked_up(fx_load(table), fx_load(table + 16), index);
}
// x times two to the whole number below n, rounded once.
FX_INLINE fx_floats fx_scaled(fx_floats x, fx_floats n) {
  fx_floats y;
  asm("vscalefps %2, %1, %0" : "=v"(y) : "v"(x), "v"(n));
  return y;
}

// exp(x) = 2^n (1 + (exp(r) - 1)), |r| <= ln(2) / 32, where n is a multiple of 1/16: its whole part
// becomes an exponent, and the rest is looked up. By how much the table is too low, as a part of it,
// is in the next. ln(2) is FX_LN2 less FX_LN2_LESS.
#define FX_LN2 0x1.62e43p-1f
#define FX_LN2_LESS 0x1.05c61p-29f
alignas(64) static const float fx_powers[16] = {
    0x1p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f, 0x1.3dea64p+0f,
    0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f,
    0x1.9c4918p+0f, 0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f,
};
alignas(64) static const float fx_powers_rest[16] = {
    0, 0x1.8d96d2p-25f, -0x1.9c0c22p-27f, 0x1.964902p-25f, 0x1.125002p-25f, 0x1.370be4p-25f,
    -0x1.0a3552p-25f, -0x1.00d8acp-27f, 0x1.26055cp-26f, -0x1.05cb44p-25f, 0x1.67a1cap-28f,
    0x1.a3b5e4p-28f, -0x1.f9c306p-27f, -0x1.6961b4p-28f, -0x1.a5217cp-28f, 0x1.61428ep-28f,
};
// What the lowest bits of an index add to the exponent, in the bits of a float, when all of the
// index is put there.
alignas(64) static const unsigned fx_sixteenths[16] = {
    0, 1 << 19, 2 << 19, 3 << 19, 4 << 19, 5 << 19, 6 << 19, 7 << 19, 8 << 19, 9 << 19, 10 << 19,
    11 << 19, 12 << 19, 13 << 19, 14 << 19, 15 << 19,
};
typedef struct {
  fx_floats n, r;
  fx_ints index;
} fx_exponent;

// The index is 16 n, with as much added to n as `raised` says.
FX_INLINE fx_exponent fx_exponent_of(fx_floats x, float raised = 0.0f) {
  const float shift = 0x1.8p+19f + raised;
  const fx_floats shifted = fx_fma(x, fx_all(0x1.715476p+0f), fx_all(shift));
  const fx_floats n = shifted - shift;
  const fx_floats r = fx_fma(n, fx_all(-FX_LN2), x);
  return {n, r, (fx_ints)shifted};
}
// 2^(index / 16), which must be neither too large nor too small for a normal float.
FX_INLINE fx_floats fx_normal_power(fx_ints index) {
  const fx_ints table = (fx_ints)fx_load(fx_powers) - (fx_ints)fx_load(fx_sixteenths);
  return (fx_floats)((fx_ints)fx_looked_up((fx_floats)table, index) + (index << 19));
}
FX_INLINE fx_floats fx_slope_of(fx_exponent e) {  // (exp(r) - 1) / r
  const fx_floats p = fx_fma(e.r, fx_all(0x1.555736p-3f), fx_all(0x1.00022p-1f));
  return fx_fma(p, e.r, fx_all(1.0f));
}
FX_INLINE fx_floats fx_rest_of(fx_exponent e) {  // exp(r) - 1, and what the table is too low by
  const fx_floats rest = fx_looked_up(fx_load(fx_powers_rest), e.index);
  return fx_fma(fx_slope_of(e), e.r, fx_fma(e.n, fx_all(FX_LN2_LESS), rest));
}
FX_INLINE fx_floats fx_exp_within(fx_floats x) {
  const fx_exponent e = fx_exponent_of(x);
  const fx_floats power = fx_looked_up(fx_load(fx_powers), e.index);
  return fx_scaled(fx_fma(power, fx_rest_of(e), power), e.n);
}
// Beyond these bounds the result is the same as there. A NaN stays one.
FX_INLINE fx_floats fx_at_least(fx_floats x, float low) {
  asm("vmaxps %0, %1, %0" : "+v"(x) : "v"(fx_all(low)));
  return x;
}
FX_INLINE fx_floats fx_at_most(fx_floats x, float high) {
  asm("vminps %0, %1, %0" : "+v"(x) : "v"(fx_all(high)));
  return x;
}
FX_INLINE fx_floats fx_exp_down(fx_floats x) { return fx_exp_within(fx_at_least(x, -104.0f)); }
FX_INLINE fx_floats fx_exp(fx_floats x) { return fx_exp_down(fx_at_most(x, 89.0f)); }
FX_INLINE fx_floats fx_exp_raised(fx_floats x) {
  const fx_exponent e = fx_exponent_of(x, 64.0f);
  const fx_floats power = fx_normal_power(e.index);
  const fx_floats y = fx_fma(power, fx_rest_of(e), power);
  return x < -131.0f ? fx_all(0.0f) : y;
}
// Here n is a multiple of 1/32, exp(r) a straight line, and the table holds the bits of powers, less
// what their index adds to them.
alignas(64) static const int fx_coarse_powers[32] = {
    0x3f8000f6, 0x3f7ece82, 0x3f7dabc4, 0x3f7c9915, 0x3f7b96ce, 0x3f7aa54c, 0x3f79c4ec, 0x3f78f60e,
    0x3f783915, 0x3f778e65, 0x3f76f664, 0x3f76717b, 0x3f760016, 0x3f75a2a1, 0x3f75598c, 0x3f75254a,
    0x3f75064f, 0x3f74fd13, 0x3f750a0f, 0x3f752dc0, 0x3f7568a5, 0x3f75bb41, 0x3f762618, 0x3f76a9b2,
    0x3f77469a, 0x3f77fd5e, 0x3f78ce8f, 0x3f79bac0, 0x3f7ac28a, 0x3f7be687, 0x3f7d2754, 0x3f7e8594,
};
typedef struct {
  fx_floats power, r;
} fx_coarse_power;

FX_INLINE fx_coarse_power fx_coarse_power_of(fx_floats x, float raised) {
  const float shift = 0x1.8p+18f + raised;
  const fx_floats shifted = fx_fma(x, fx_all(0x1.715476p+0f), fx_all(shift));
  const fx_floats r = fx_fma(shifted - shift, fx_all(-FX_LN2), x);
  const fx_ints index = (fx_ints)shifted;
  const fx_ints bits = (fx_ints)fx_looked_up((const float*)fx_coarse_powers, index);
  return {(fx_floats)(bits + (index << 18)), r};
}
FX_INLINE fx_floats fx_coarse_exp_raised(fx_floats x) {
  const fx_coarse_power e = fx_coarse_power_of(x, 64.0f);
  const fx_floats y = fx_fma(e.power, e.r, e.power);
  return x < -131.0f ? fx_all(0.0f) : y;
}
// An eighth of the denominator is summed, whose inverse is no subnormal number.
FX_INLINE fx_floats fx_coarse_sigmoid(fx_floats x) {
  const fx_coarse_power e = fx_coarse_power_of(fx_at_least(-x, -80.0f), -3.0f);
  fx_floats y;
  asm("vrcp14ps %1, %0" : "=v"(y) : "v"(fx_fma(e.power, e.r, e.power + 0.125f)));
  return x < -0x1.62e42ep+6f ? fx_all(0.0f) : 0.125f * y;
}
FX_INLINE fx_floats fx_coarse_gated(fx_floats y, fx_floats x) { return y * fx_coarse_sigmoid(x); }
FX_INLINE fx_floats fx_exp_plus_one(fx_floats x) { return fx_exp(x) + 1.0f; }
// Half of the denominator is summed, as it need not be a float.
FX_INLINE fx_floats fx_sigmoid(fx_floats x) {
  const fx_exponent e = fx_exponent_of(fx_at_least(-x, -80.0f), -1.0f);
  const fx_floats s = fx_normal_power(e.index);
  const fx_floats y = 0.5f / fx_fma(s, fx_rest_of(e), s + 0.5f);
  return x < -0x1.62e42ep+6f ? fx_all(0.0f) : y;
}

FX_INLINE fx_floats fx_with_sign_of(fx_floats x, fx_floats sign) {
  return (fx_floats)(((fx_ints)x & 0x7fffffff) | ((fx_ints)sign & (int)0x80000000));
}

// exp(x) - 1 = (2^n - 1) + 2^n (exp(r) - 1), where the first term is exact wherever it counts, and
// r is rounded once with what the table is too low by. Half of it is summed: 2^128 is no float.
FX_INLINE fx_floats fx_expm1(fx_floats x) {
  const fx_floats y = fx_at_most(fx_at_least(x, -80.0f), 89.0f);
  const float shift = 0x1.8p+19f - 1.0f;
  const fx_floats shifted = fx_fma(y, fx_all(0x1.715476p+0f), fx_all(shift));
  const fx_floats n = shifted - shift;
  const fx_ints index = (fx_ints)shifted;
  const fx_floats rest = fx_looked_up(fx_load(fx_powers_rest), index);
  fx_floats r = fx_fma(n, fx_all(-0x1.62e4p-1f), y);
  r += fx_fma(n, fx_all(-0x1.7f7d1cp-20f), rest);
  fx_floats p = fx_fma(r, fx_all(0x1.55576ap-5f), fx_all(0x1.55571ep-3f));
  p = fx_fma(r * r, fx_fma(p, r, fx_all(0x1p-1f)), r);
  const fx_floats s = fx_normal_power(index);
  return fx_with_sign_of(2.0f * fx_fma(s, p, s - 0.5f), x);
}

// tanh(x) with the sign of x: polynomials of |x| less a number near it, four for each power of two
// from 1/16 on, which the lowest bits of the exponent and the highest two below it tell apart. The
// first one serves what is smaller too. The table has those values, and a row for each coefficient.
// They are such that the first coefficient, their tanh, is a float to 1/100 of its last place.
alignas(64) static const float fx_near_tanh[7][32] = {
  {
    0x1.1ff226p+1f, 0x1.5ff05ep+1f, 0x1.9feb98p+1f, 0x1.e0081cp+1f, 0x1.2004d2p+2f, 0x1.5fe8bep+2f,
    0x1.9fef28p+2f, 0x1.e0d5c4p+2f, 0x1.6p+3f, 0x1.6p+3f, 0, 0, 0, 0x1.5ff334p-4f, 0x1.9ffde6p-4f,
    0x1.e00434p-4f, 0x1.1ff20ep-3f, 0x1.6006ap-3f, 0x1.a01724p-3f, 0x1.dff0bcp-3f, 0x1.1ff652p-2f,
    0x1.600068p-2f, 0x1.9fefaap-2f, 0x1.dff4c6p-2f, 0x1.1ff3a2p-1f, 0x1.5ffc7cp-1f, 0x1.9fef8ap-1f,
    0x1.dff95ap-1f, 0x1.20155cp+0f, 0x1.5fef1ep+0f, 0x1.a01248p+0f, 0x1.dfe98p+0f,
  },
  {
    0x1.f4bd6ep-1f, 0x1.fbd406p-1f, 0x1.fe75fcp-1f, 0x1.ff6f2ap-1f, 0x1.ffdfacp-1f, 0x1.fffb9cp-1f,
    0x1.ffff68p-1f, 0x1.ffffecp-1f, 0x1p+0f, 0x1p+0f, 0, 0, 0, 0x1.5f161ep-4f, 0x1.9e9142p-4f,
    0x1.ddd4b8p-4f, 0x1.1e1024p-3f, 0x1.5c9976p-3f, 0x1.9a7552p-3f, 0x1.d757e8p-3f, 0x1.189aa6p-2f,
    0x1.52c322p-2f, 0x1.8a79f8p-2f, 0x1.bfa556p-2f, 0x1.04ff48p-1f, 0x1.31559cp-1f, 0x1.577ff2p-1f,
    0x1.77d528p-1f, 0x1.9e6b72p-1f, 0x1.c27104p-1f, 0x1.d9cc3cp-1f, 0x1.e87494p-1f,
  },
  {
    0x1.645beep-5f, 0x1.09e80cp-6f, 0x1.896c68p-8f, 0x1.21830ep-9f, 0x1.02995ap-11f,
    0x1.190002p-14f, 0x1.300142p-17f, 0x1.4005dep-20f, 0x1.42e6ap-25f, 0, 0, 0, 0x1p+0f,
    0x1.fc3d04p-1f, 0x1.fac14cp-1f, 0x1.f9083cp-1f, 0x1.f602cp-1f, 0x1.f12a74p-1f, 0x1.eb6f2p-1f,
    0x1.e4e15cp-1f, 0x1.d98daap-1f, 0x1.c7f704p-1f, 0x1.b4048ap-1f, 0x1.9e27a6p-1f, 0x1.7af43cp-1f,
    0x1.49e972p-1f, 0x1.198bf2p-1f, 0x1.d83dd4p-2f, 0x1.61204ep-2f, 0x1.cedcf8p-3f, 0x1.26374ep-3f,
    0x1.700d5ap-4f,
  },
  {
    -0x1.5c830cp-5f, -0x1.07b97ap-6f, -0x1.8836a8p-8f, -0x1.212ba8p-9f, -0x1.02357ep-11f,
    -0x1.18a2c8p-14f, -0x1.2f9e6ep-17f, -0x1.3f9a16p-20f, 0x1.85037ep-24f, 0, 0, 0, 0,
    -0x1.5c81cp-4f, -0x1.9a5204p-4f, -0x1.d753f4p-4f, -0x1.187b5cp-3f, -0x1.527fdep-3f,
    -0x1.89f896p-3f, -0x1.be609p-3f, -0x1.038882p-2f, -0x1.2dafd6p-2f, -0x1.4fef5cp-2f,
    -0x1.6a195ap-2f, -0x1.8259ep-2f, -0x1.897d7p-2f, -0x1.79c73cp-2f, -0x1.5aa5eap-2f,
    -0x1.1dd3bep-2f, -0x1.9736fep-3f, -0x1.1043bp-3f, -0x1.5f209ap-4f,
  },
  {
    0x1.bc26a8p-6f, 0x1.59e6f6p-7f, 0x1.03e924p-8f, 0x1.80b60ap-10f, 0x1.582976p-12f,
    0x1.7649dap-15f, 0x1.94f1f4p-18f, 0x1.a98758p-21f, 0x1.76460ap-24f, 0, 0, 0, -0x1.55551cp-2f,
    -0x1.4a4282p-2f, -0x1.47e726p-2f, -0x1.4438fcp-2f, -0x1.3b4da2p-2f, -0x1.2ee52ap-2f,
    -0x1.2025f8p-2f, -0x1.102916p-2f, -0x1.e8facep-3f, -0x1.9834e2p-3f, -0x1.425e78p-3f,
    -0x1.d7189cp-4f, -0x1.bd996cp-5f, 0x1.d7a98ap-7f, 0x1.0716e6p-4f, 0x1.8422dap-4f,
    0x1.c69298p-4f, 0x1.97eeb4p-4f, 0x1.33c284p-4f, 0x1.a89904p-5f,
  },
  {
    -0x1.962228p-7f, -0x1.51a8f6p-8f, -0x1.039252p-9f, -0x1.83679ap-11f, -0x1.687bacp-13f,
    -0x1.886222p-16f, -0x1.a89be2p-19f, -0x1.bee5a8p-22f, 0x1.34b57cp-25f, 0, 0, 0, 0,
    0x1.c9a034p-5f, 0x1.0ab2fcp-4f, 0x1.32234cp-4f, 0x1.6acfb2p-4f, 0x1.afac96p-4f, 0x1.ed583p-4f,
    0x1.11e04p-3f, 0x1.32eb1ap-3f, 0x1.4ffc16p-3f, 0x1.5c0d4p-3f, 0x1.58446cp-3f, 0x1.39ee1ap-3f,
    0x1.e94786p-4f, 0x1.47691ep-4f, 0x1.6343bp-5f, 0x1.da5208p-9f, -0x1.59b5c2p-6f, -0x1.9ba7dp-6f,
    -0x1.55bc82p-6f,
  },
  {
    0x1.048d38p-8f, 0x1.f5eed6p-10f, 0x1.93e5d2p-11f, 0x1.32dd76p-12f, 0x1.1e83dap-14f,
    0x1.373b46p-17f, 0x1.512fc8p-20f, 0x1.6eba08p-23f, 0x1.a40d6ep-28f, 0, 0, 0, 0x1.102144p-3f,
    -0x1.8d72fcp+3f, 0x1.4ff2fap+2f, 0x1.d817a8p+3f, 0x1.787b3cp-1f, 0x1.b0ba6p-1f, 0x1.b1e11ep-4f,
    0x1.b84182p-1f, -0x1.ead2e8p-8f, -0x1.164918p-6f, -0x1.abf54cp-5f, -0x1.5ffffep-5f,
    -0x1.557664p-5f, -0x1.0b65bcp-4f, -0x1.0f1f9cp-4f, -0x1.a6781ep-5f, -0x1.067e32p-5f,
    -0x1.378952p-7f, 0x1.64ba4ep-10f, 0x1.2c5088p-8f,
  }
};
FX_INLINE fx_floats fx_tanh(fx_floats x) {
  const fx_floats a = fx_at_most(fx_abs(x), 10.0f);
  const fx_ints index = (fx_ints)fx_at_least(a, 0x1p-4f) >> 21;
  const fx_floats t = a - fx_looked_up(fx_near_tanh[0], index);
  fx_floats y = fx_looked_up(fx_near_tanh[6], index);
  for (int row = 5; row > 0; --row) y = fx_fma(y, t, fx_looked_up(fx_near_tanh[row], index));
  return fx_with_sign_of(y, x);
}
FX_INLINE fx_floats fx_tanh_log1p(fx_floats x) {
  const fx_floats a = fx_at_most(x, 0x1p+30f);
  const fx_floats n = fx_fma(a, a, 2.0f * a);
  const fx_floats y = n / (n + 2.0f);
  return x < -1.0f ? fx_all(__builtin_nanf("")) : y;
}
FX_INLINE fx_floats fx_tanh_softplus(fx_floats x) {
  const fx_floats a = fx_exp_down(fx_at_most(x, 40.0f));
  const fx_floats n = fx_fma(a, a, 2.0f * a);
  return n / (n + 2.0f);
}

// log(x) = n ln(2) + log(1 + f), as for single values.
FX_INLINE fx_floats fx_log_rest(fx_floats f) {
  fx_floats p = fx_fma(fx_all(-0x1.38b57cp-4f), f, fx_all(0x1.055b6ap-3f));
  p = fx_fma(p, f, fx_all(-0x1.0d8542p-3f));
  p = fx_fma(p, f, fx_all(0x1.22da1ep-3f));
  p = fx_fma(p, f, fx_all(-0x1.547244p-3f));
  p = fx_fma(p, f, fx_all(0x1.99a008p-3f));
  p = fx_fma(p, f, fx_all(-0x1.000226p-2f));
  return fx_fma(p, f, fx_all(0x1.555554p-2f));
}
FX_INLINE fx_floats fx_log_of(fx_floats n, fx_floats f) {
  const fx_floats s = f * f;
  const fx_floats low = fx_fma(n, fx_all(0x1.7f7d1cp-20f), s * f * fx_log_rest(f));
  return fx_fma(n, fx_all(0x1.62e4p-1f), f + fx_fma(s, fx_all(-0.5f), low));
}
FX_INLINE fx_floats fx_log(fx_floats x) {
  const fx_bools is_tiny = x < 0x1p-126f;
  const fx_ints bits = (fx_ints)(is_tiny ? x * 0x1p+23f : x) - 0x3f3504f3;
  const fx_floats n = __builtin_convertvector(bits >> 23, fx_floats);
  const fx_floats f = (fx_floats)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  fx_floats y = fx_log_of(is_tiny ? n - 23.0f : n, f);
  y = x < __builtin_inff() ? y : x;
  y = x == 0.0f ? fx_all(-__builtin_inff()) : y;
  return x < 0.0f ? fx_all(__builtin_nanf("")) : y;
}
FX_INLINE fx_floats fx_log1p(fx_floats x) {
  const fx_ints bits = (fx_ints)(1.0f + x) - 0x3f3504f3;
  const fx_ints n = bits >> 23;
  const fx_floats large = (fx_floats)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const fx_floats scale = (fx_floats)((127 - n) << 23);
  const fx_floats f = n > 24 ? large : fx_fma(x, scale, scale - 1.0f);
  fx_floats y = fx_log_of(__builtin_convertvector(n, fx_floats), f);
  y = fx_with_sign_of(y, x);
  y = x < __builtin_inff() ? y : x;
  y = x == -1.0f ? fx_all(-__builtin_inff()) : y;
  return x < -1.0f ? fx_all(__builtin_nanf("")) : y;
}

// Probability that a standard normal variable is below x, for x <= 0; mirrored above. A polynomial
// for each 0.415 of |x|, with the least relative error: 7e-8 where the result is above 2e-2, less
// than 1 % from x = -6.02 on. Below that, where the result is less than 1e-9, it is 0; eager's, which
// is the sum of 1 and an error function, is 0 from -5.5 on.
alignas(64) static const float fx_below_0[16] = {
    0x1p-1f, 0x1.5b356cp-2f, 0x1.a04bb6p-3f, 0x1.b47e6cp-4f, 0x1.8cf62cp-5f, 0x1.372f88p-6f,
    0x1.a296acp-8f, 0x1.e15db8p-10f, 0x1.d7f38p-12f, 0x1.89ab1cp-14f, 0x1.16e6f6p-16f,
    0x1.4f3578p-19f, 0x1.555f44p-22f, 0x1.2650bap-25f, 0x1.ad5436p-29f, 0,
};
alignas(64) static const float fx_below_1[16] = {
    -0x1.988452p-2f, -0x1.76cf8p-2f, -0x1.217aa8p-2f, -0x1.7867e6p-3f, -0x1.9c007ep-4f,
    -0x1.7b9dfcp-5f, -0x1.267076p-6f, -0x1.807c08p-8f, -0x1.a6a23ap-10f, -0x1.8710fcp-12f,
    -0x1.309ab2p-14f, -0x1.8f6fe2p-17f, -0x1.b8ea1p-20f, -0x1.99af3ap-23f, -0x1.406d56p-26f, 0,
};
alignas(64) static const float fx_below_2[16] = {
    0x1.036582p-27f, 0x1.3714bcp-4f, 0x1.e0860ep-4f, 0x1.d49f6ap-4f, 0x1.55f754p-4f, 0x1.89dcdcp-5f,
    0x1.6e95d2p-6f, 0x1.173b2p-7f, 0x1.5ec3aep-9f, 0x1.6d198ap-11f, 0x1.3bee32p-13f,
    0x1.c7a0ecp-16f, 0x1.124344p-18f, 0x1.13fd7ap-21f, 0x1.d0c518p-25f, 0,
};
alignas(64) static const float fx_below_3[16] = {
    0x1.10561cp-4f, 0x1.9da3dp-5f, 0x1.e031dap-7f, -0x1.1408a4p-6f, -0x1.e22692p-6f,
    -0x1.a23d1ep-6f, -0x1.fe5584p-7f, -0x1.dcb9bp-8f, -0x1.6116d8p-9f, -0x1.a652b8p-11f,
    -0x1.9c4eb2p-13f, -0x1.4adfbap-15f, -0x1.b6a2cep-18f, -0x1.e1fdb4p-21f, -0x1.b8289cp-24f, 0,
};
alignas(64) static const float fx_below_4[16] = {
    -0x1.e9b914p-23f, -0x1.224ab2p-6f, -0x1.6f414ap-6f, -0x1.c3b72cp-7f, -0x1.d0be18p-10f,
    0x1.518dd6p-8f, 0x1.84d1b4p-8f, 0x1.fa914cp-9f, 0x1.d82b4p-10f, 0x1.519368p-11f,
    0x1.7e06cap-13f, 0x1.5c16e8p-15f, 0x1.0215ap-17f, 0x1.399e7p-20f, 0x1.39dd4cp-23f, 0,
};
alignas(64) static const float fx_below_5[16] = {
    -0x1.43d348p-7f, -0x1.87ae02p-8f, 0x1.a102ep-10f, 0x1.84148p-8f, 0x1.412ca8p-8f,
    0x1.a5808cp-10f, -0x1.51c41ep-11f, -0x1.2acc0cp-10f, -0x1.933552p-11f, -0x1.69e27p-12f,
    -0x1.e2d636p-14f, -0x1.f48874p-16f, -0x1.9c815cp-18f, -0x1.11ffdap-20f, -0x1.2806a6p-23f, 0,
};
FX_INLINE fx_floats fx_normal_cdf(fx_floats x) {
  const fx_floats a = fx_at_most(fx_abs(x), 6.2f);
  const fx_floats shifted = fx_fma(a, fx_all(0x1.346f0ap+1f), fx_all(0x1.8p+23f));
  const fx_floats t = fx_fma(shifted - 0x1.8p+23f, fx_all(-0x1.a8f5c2p-2f), a);
  const fx_ints index = (fx_ints)shifted;
  fx_floats h = fx_looked_up(fx_load(fx_below_5), index);
  h = fx_fma(h, t, fx_looked_up(fx_load(fx_below_4), index));
  h = fx_fma(h, t, fx_looked_up(fx_load(fx_below_3), index));
  h = fx_fma(h, t, fx_looked_up(fx_load(fx_below_2), index));
  h = fx_fma(h, t, fx_looked_up(fx_load(fx_below_1), index));
  h = fx_fma(h, t, fx_looked_up(fx_load(fx_below_0), index));
  return x > 0.0f ? 1.0f - h : h;
}

// |x| < 2^18: x = k pi/16 + r, and sin(x) = sin(k pi/16) cos(r) + cos(k pi/16) sin(r), by a table of
// the sines of a whole turn and what it leaves out. Next to a zero or an extremum k is that one, so
// that of two terms which are subtracted one is small. r is a float and what the float leaves out.
alignas(64) static const float fx_sines[32] = {
    0, 0x1.8f8b84p-3f, 0x1.87de2ap-2f, 0x1.1c73b4p-1f, 0x1.6a09e6p-1f, 0x1.a9b662p-1f,
    0x1.d906bcp-1f, 0x1.f6297cp-1f, 0x1p+0f, 0x1.f6297cp-1f, 0x1.d906bcp-1f, 0x1.a9b662p-1f,
    0x1.6a09e6p-1f, 0x1.1c73b4p-1f, 0x1.87de2ap-2f, 0x1.8f8b84p-3f, 0, -0x1.8f8b84p-3f,
    -0x1.87de2ap-2f, -0x1.1c73b4p-1f, -0x1.6a09e6p-1f, -0x1.a9b662p-1f, -0x1.d906bcp-1f,
    -0x1.f6297cp-1f, -0x1p+0f, -0x1.f6297cp-1f, -0x1.d906bcp-1f, -0x1.a9b662p-1f, -0x1.6a09e6p-1f,
    -0x1.1c73b4p-1f, -0x1.87de2ap-2f, -0x1.8f8b84p-3f,
};
alignas(64) static const float fx_sines_rest[32] = {
    0, -0x1.cb2cfap-30f, 0x1.abaa58p-28f, -0x1.9465cep-27f, 0x1.9fcef4p-27f, 0x1.21d434p-26f,
    0x1.e651a8p-26f, 0x1.feeb96p-26f, 0, 0x1.feeb96p-26f, 0x1.e651a8p-26f, 0x1.21d434p-26f,
    0x1.9fcef4p-27f, -0x1.9465cep-27f, 0x1.abaa58p-28f, -0x1.cb2cfap-30f, 0, 0x1.cb2cfap-30f,
    -0x1.abaa58p-28f, 0x1.9465cep-27f, -0x1.9fcef4p-27f, -0x1.21d434p-26f, -0x1.e651a8p-26f,
    -0x1.feeb96p-26f, 0, -0x1.feeb96p-26f, -0x1.e651a8p-26f, -0x1.21d434p-26f, -0x1.9fcef4p-27f,
    0x1.9465cep-27f, -0x1.abaa58p-28f, 0x1.cb2cfap-30f,
};
alignas(64) static const float fx_nearer[32] = {
    0, -0x1p+0f, 0, 0, 0, 0, 0, 0x1p+0f, 0, -0x1p+0f, 0, 0, 0, 0, 0, 0x1p+0f, 0, -0x1p+0f, 0, 0,
    0, 0, 0, 0x1p+0f, 0, -0x1p+0f, 0, 0, 0, 0, 0, 0x1p+0f,
};
FX_INLINE int fx_is_far(fx_floats x) {
  unsigned short is_near;
  asm("vcmpltps %2, %1, %0" : "=Yk"(is_near) : "v"(fx_abs(x)), "v"(fx_all(0x1p+18f)));
  return is_near ^ 0xffff;
}
typedef struct {
  fx_ints index;
  fx_floats sine, cosine;  // of r, the latter less 1
} fx_angle;
FX_INLINE fx_angle fx_angle_of(fx_floats x) {
  fx_floats shifted = fx_fma(x, fx_all(0x1.45f306p+2f), fx_all(0x1.8p+23f));
  shifted += fx_looked_up(fx_nearer, (fx_ints)shifted);
  const fx_floats n = shifted - 0x1.8p+23f;
  const fx_floats r = fx_fma(n, fx_all(-0x1.921fb6p-3f), x);
  const fx_floats p = n * 0x1.777a5cp-28f;
  const fx_floats rest = fx_fma(n, fx_all(0x1.ee59dap-53f), fx_fma(n, fx_all(0x1.777a5cp-28f), -p));
  const fx_floats sum = r + p;
  const fx_floats low = ((r - sum) + p) + rest;
  const fx_floats s = sum * sum;
  const fx_floats q = fx_fma(s, fx_all(0x1.1046eep-7f), fx_all(-0x1.5554fep-3f));
  const fx_floats c = fx_fma(s, fx_all(-0x1.6affe8p-10f), fx_all(0x1.5554e4p-5f));
  return {(fx_ints)shifted, sum + fx_fma(q * s, sum, low), fx_fma(c, s, fx_all(-0.5f)) * s};
}
// The sine of what lies an angle further, where the sine is `there`, its derivative `slope`, and
// `rest` what `there` leaves out.
FX_INLINE fx_floats fx_turned(fx_angle a, fx_floats there, fx_floats slope, fx_floats rest) {
  return there + fx_fma(slope, a.sine, fx_fma(there, a.cosine, rest));
}
FX_INLINE fx_floats fx_sin_near(fx_floats x) {
  const fx_angle a = fx_angle_of(x);
  const fx_floats sine = fx_looked_up(fx_sines, a.index);
  const fx_floats cosine = fx_looked_up(fx_sines, a.index + 8);
  const fx_floats y = fx_turned(a, sine, cosine, fx_looked_up(fx_sines_rest, a.index));
  return x == 0.0f ? x : y;
}
FX_INLINE fx_floats fx_cos_near(fx_floats x) {
  const fx_angle a = fx_angle_of(x);
  const fx_floats sine = fx_looked_up(fx_sines, a.index);
  const fx_floats cosine = fx_looked_up(fx_sines, a.index + 8);
  return fx_turned(a, cosine, -sine, fx_looked_up(fx_sines_rest, a.index + 8));
}
#endif
