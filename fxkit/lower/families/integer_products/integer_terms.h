// Exact products of matrices of 8-bit integers, summed in 32 bits: no step saturates.
//
// Tiles of a result have 64 columns: a panel of the right operand, whose columns lie anywhere, the terms of
// each side by side. A few rows read it where it lies. For more, some terms of it are turned at a time
// into words of 2 or 4 terms of a column, side by side with those of the next columns.
static const long FX_PANEL_COLUMNS = 64;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FX_DOTS 64
typedef int fx_integers __attribute__((vector_size(64)));
typedef int fx_dots __attribute__((vector_size(64), aligned(1), may_alias));

// sums + the products of 4 unsigned by 4 signed bytes, in each lane.
static inline fx_dots fx_dot(fx_dots sums, fx_dots positive, fx_dots any) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(positive), "v"(any));
  return sums;
}
#elif defined(__AVX2__)
typedef int fx_integers __attribute__((vector_size(32)));
typedef int fx_dots __attribute__((vector_size(32), aligned(1), may_alias));
typedef short fx_shorts __attribute__((vector_size(32), aligned(1), may_alias));

// The products of pairs of 16-bit numbers; both fit, since neither is larger than 255.
static inline fx_dots fx_pairs(fx_shorts a, fx_shorts b) {
  typedef short shorts __attribute__((vector_size(32)));
  return (fx_dots)__builtin_ia32_pmaddwd256((shorts)a, (shorts)b);
}

// 16 bytes in 16 bits each; gcc 12 would convert them one by one.
static inline fx_shorts fx_widened(const signed char* from) {
  fx_shorts wide;
  asm("vpmovsxbw %1, %0" : "=x"(wide) : "m"(*(const signed char(*)[16])from));
  return wide;
}

static inline fx_shorts fx_widened(const unsigned char* from) {
  fx_shorts wide;
  asm("vpmovzxbw %1, %0" : "=x"(wide) : "m"(*(const unsigned char(*)[16])from));
  return wide;
}
#endif

// By how much an element of the left operand is moved up where factors have to be positive: that many
// times the sum of a column undoes it.
static inline int fx_lift(const signed char*) { return 128; }
static inline int fx_lift(const unsigned char*) { return 0; }

// The zero points of the rows of the left operand: one each, or one for all.
struct fx_zeros {
  const int* each;
  long step;
  int all;
  bool are_none() const { return !each && !all; }
  int of(long row) const { return each ? each[row * step] : all; }
};
