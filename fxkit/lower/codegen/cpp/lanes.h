// Loops that say themselves how many elements they handle at once: FX_WIDE. Where that is one, they
// are plain loops, of which the compiler makes vector code. With AVX-512 they can use what no
// compiler finds in plain arithmetic: tables that lie in registers, and powers of two.
//
// A `fx_floats` is that many floats, a `fx_bools` as many conditions, and `fx_mask` says which of
// them there are at the end of a row.

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define FX_WIDE 16
#define FX_SIMD(...)
typedef float fx_floats __attribute__((vector_size(64)));
typedef fx_floats fx_lane_sums;
typedef int fx_ints __attribute__((vector_size(64)));
typedef unsigned fx_uints __attribute__((vector_size(64)));
typedef fx_ints fx_bools;
typedef unsigned short fx_mask;
typedef float fx_loose_floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned fx_loose_uints __attribute__((vector_size(64), aligned(2), may_alias));

FX_INLINE fx_floats fx_all(float x) { return x - fx_floats{}; }
FX_INLINE fx_bools fx_all(bool x) { return fx_bools{} - (int)x; }
FX_INLINE fx_mask fx_first(long count) {
  return (fx_mask)(count < FX_WIDE ? (1u << count) - 1u : 0xffffu);
}
FX_INLINE fx_floats fx_load(const float* from) { return *(const fx_loose_floats*)from; }
FX_INLINE fx_uints fx_load(const unsigned* from) { return *(const fx_loose_uints*)from; }
FX_INLINE void fx_store(float* to, fx_floats x) { *(fx_loose_floats*)to = x; }
FX_INLINE void fx_store(unsigned* to, fx_uints x) { *(fx_loose_uints*)to = x; }
FX_INLINE bool fx_begins_line(const void* place) { return !((unsigned long)place & 63); }
FX_INLINE void fx_put(float* to, fx_floats x, bool is_past) {  // past the caches, where it is so
  if (is_past)
    asm volatile("vmovntps %1, %0" : "=m"(*(fx_floats*)to) : "v"(x));
  else
    fx_store(to, x);
}
FX_INLINE void fx_put(unsigned* to, fx_uints x, bool is_past) {
  fx_put((float*)to, (fx_floats)x, is_past);
}
// An array may end before a whole vector does: the compiler, which takes for granted that no one
// reads beyond it, is told of memory of unknown length.
FX_INLINE fx_floats fx_load(const float* from, fx_mask on) {
  fx_floats y;
  asm("vmovups %1, %0%{%2%}%{z%}" : "=v"(y) : "m"(*(const float(*)[])from), "Yk"(on));
  return y;
}
FX_INLINE fx_uints fx_load(const unsigned* from, fx_mask on) {
  return (fx_uints)fx_load((const float*)from, on);
}
FX_INLINE void fx_store(float* to, fx_floats x, fx_mask on) {
  asm("vmovups %1, %0%{%2%}" : "+m"(*(float(*)[])to) : "v"(x), "Yk"(on));
}
FX_INLINE void fx_store(unsigned* to, fx_uints x, fx_mask on) {
  fx_store((float*)to, (fx_floats)x, on);
}
FX_INLINE fx_floats fx_present(fx_floats x, fx_mask on) {  // 0 elsewhere
  fx_floats y;
  asm("vmovaps %1, %0%{%2%}%{z%}" : "=v"(y) : "v"(x), "Yk"(on));
  return y;
}
FX_INLINE fx_floats fx_larger(fx_floats x, fx_floats y) {  // y where x is no number
  asm("vmaxps %0, %1, %0" : "+v"(y) : "v"(x));
  return y;
}
FX_INLINE fx_floats fx_larger(fx_floats x, fx_floats y, fx_mask on) {  // y elsewhere
  asm("vmaxps %0, %1, %0%{%2%}" : "+v"(y) : "v"(x), "Yk"(on));
  return y;
}
template <class Fold>
FX_INLINE float fx_folded(fx_floats x, Fold fold) {  // halves are exchanged, then quarters, …
  fx_floats y;
  asm("vshuff64x2 $0x4e, %1, %1, %0" : "=v"(y) : "v"(x));
  x = fold(x, y);
  asm("vshuff64x2 $0xb1, %1, %1, %0" : "=v"(y) : "v"(x));
  x = fold(x, y);
  asm("vpermilps $0x4e, %1, %0" : "=v"(y) : "v"(x));
  x = fold(x, y);
  asm("vpermilps $0xb1, %1, %0" : "=v"(y) : "v"(x));
  return fold(x, y)[0];
}
FX_INLINE float fx_sum(fx_floats x) {
  return fx_folded(x, [](fx_floats a, fx_floats b) { return a + b; });
}
FX_INLINE float fx_largest(fx_floats x) {
  return fx_folded(x, [](fx_floats a, fx_floats b) { return fx_larger(a, b); });
}

FX_INLINE fx_floats fx_fma(fx_floats a, fx_floats b, fx_floats c) {
#ifdef __clang__
  return __builtin_elementwise_fma(a, b, c);
#else
  return __builtin_ia32_vfmaddps512_mask(a, b, c, 0xffff, 4);
#endif
}
FX_INLINE fx_floats fx_abs(fx_floats x) { return (fx_floats)((fx_ints)x & 0x7fffffff); }
FX_INLINE fx_floats fx_sqrt(fx_floats x) {
  fx_floats y;
  asm("vsqrtps %1, %0" : "=v"(y) : "v"(x));
  return y;
}
FX_INLINE fx_floats fx_quotient(fx_floats a, fx_floats b, fx_floats r) {
  const fx_floats q = a * r;
  return fx_fma(fx_fma(-q, b, a), r, q);
}

// Elements of bfloat16, two in a word. To round one, what is added to its bits is just below half of
// the last place, and the last place itself, so that of two equally near it is the even one: the sum
// of two products of half words, one of which is that bit and the other all that is added beside it.
#if defined(__AVX512VNNI__)
FX_INLINE fx_uints fx_upper_quiet_bf16(fx_floats x) {
  fx_ints bits = (fx_ints)x;
  const fx_ints added = (bits & 0x10000) | 0x7fff;
  asm("vpdpwssd %2, %1, %0" : "+v"(bits) : "v"(added), "v"(fx_ints{} + 0x10001));
  return (fx_uints)bits;
}
#else
FX_INLINE fx_uints fx_upper_quiet_bf16(fx_floats x) {
  const fx_uints bits = (fx_uints)x;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
#endif
FX_INLINE fx_uints fx_upper_bf16(fx_floats x) {
  return (fx_bools)(x != x) ? fx_uints{} + 0x7fc00000u : fx_upper_quiet_bf16(x);
}
FX_INLINE fx_uints fx_upper_held_bf16(fx_floats x) { return (fx_uints)x; }
FX_INLINE fx_floats fx_low_bf16(fx_uints pair) { return (fx_floats)(pair << 16); }
FX_INLINE fx_floats fx_high_bf16(fx_uints pair) { return (fx_floats)(pair & 0xffff0000u); }
FX_INLINE fx_uints fx_paired(fx_uints low, fx_uints high) {
  return (high & 0xffff0000u) | (low >> 16);
}
FX_INLINE fx_floats fx_round_quiet_bf16(fx_floats x) {
  return (fx_floats)(fx_upper_quiet_bf16(x) & 0xffff0000u);
}
FX_INLINE fx_floats fx_round_bf16(fx_floats x) {
  return (fx_floats)(fx_upper_bf16(x) & 0xffff0000u);
}
#else
#define FX_WIDE 1
#define FX_PRAGMA(text) _Pragma(#text)
#define FX_SIMD(...) FX_PRAGMA(omp simd __VA_ARGS__)
FX_INLINE float fx_abs(float x) { return __builtin_fabsf(x); }
FX_INLINE float fx_sqrt(float x) { return __builtin_sqrtf(x); }
typedef float fx_floats;
typedef double fx_lane_sums;  // of loops that may stay plain
typedef bool fx_bools;
typedef bool fx_mask;
FX_INLINE float fx_all(float x) { return x; }
FX_INLINE bool fx_all(bool x) { return x; }
FX_INLINE fx_mask fx_first(long) { return true; }
FX_INLINE float fx_load(const float* from, fx_mask = true) { return *from; }
FX_INLINE unsigned fx_load(const unsigned* from, fx_mask = true) { return *from; }
FX_INLINE void fx_store(float* to, float x, fx_mask = true) { *to = x; }
FX_INLINE void fx_store(unsigned* to, unsigned x, fx_mask = true) { *to = x; }
FX_INLINE bool fx_begins_line(const void*) { return false; }
FX_INLINE void fx_put(float* to, float x, bool) { *to = x; }
FX_INLINE void fx_put(unsigned* to, unsigned x, bool) { *to = x; }
FX_INLINE float fx_present(float x, fx_mask) { return x; }
template <class T> FX_INLINE T fx_sum(T x) { return x; }
FX_INLINE float fx_larger(float x, float y, fx_mask = true) { return x > y ? x : y; }
FX_INLINE float fx_largest(float x) { return x; }
#endif
