// A few rows of float32 by a matrix of 8-bit integers, which become floats in registers: memory is
// read once, a fourth of what floats take.
#if defined(__AVX512F__)
#define FX_WEIGHT_LANES 16
#elif defined(__AVX2__)
#define FX_WEIGHT_LANES 8
#else
#define FX_WEIGHT_LANES 4
#endif
typedef float fx_weight_floats __attribute__((vector_size(FX_WEIGHT_LANES * 4), aligned(1), may_alias));

// As many bytes, as floats; gcc 12 would convert them one by one.
static inline fx_weight_floats fx_weights_at(const signed char* from) {
  typedef int ints __attribute__((vector_size(FX_WEIGHT_LANES * 4)));
  typedef float floats __attribute__((vector_size(FX_WEIGHT_LANES * 4)));
  ints wide;
#if defined(__AVX2__)
  asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(*(const signed char(*)[FX_WEIGHT_LANES])from));
#else
  for (int lane = 0; lane < FX_WEIGHT_LANES; ++lane) wide[lane] = from[lane];
#endif
  return (fx_weight_floats)__builtin_convertvector(wide, floats);
}

template <int ROWS>
static void fx_weight_rows(const float* a, long row, const signed char* b, long column,
                           long columns, long depth, float* sums) {
  typedef float floats __attribute__((vector_size(FX_WEIGHT_LANES * 4)));
  for (long c = 0; c < columns; ++c) {
    const signed char* const from = b + c * column;
    floats held[ROWS][4] = {};
    long k = 0;
    for (; k + 4 * FX_WEIGHT_LANES <= depth; k += 4 * FX_WEIGHT_LANES) {
      __builtin_prefetch(from + k + 2048);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const long at = k + part * FX_WEIGHT_LANES;
        const floats right = fx_weights_at(from + at);
        for (int r = 0; r < ROWS; ++r)
          held[r][part] += *(const fx_weight_floats*)(a + r * row + at) * right;
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const floats all = (held[r][0] + held[r][1]) + (held[r][2] + held[r][3]);
      float sum = 0;
      for (int lane = 0; lane < FX_WEIGHT_LANES; ++lane) sum += all[lane];
      for (long rest = k; rest < depth; ++rest) sum += a[r * row + rest] * from[rest];
      sums[r * 64 + c] = sum;
    }
  }
}

// sums[rows][64] = A B for one to four rows; terms of both lie side by side. Each sum is made of four
// in each lane.
static void fx_int8_weight_product(const float* a, long row, const signed char* b, long column, long rows,
                              long columns, long depth, float* sums) {
  if (rows == 1) fx_weight_rows<1>(a, row, b, column, columns, depth, sums);
  if (rows == 2) fx_weight_rows<2>(a, row, b, column, columns, depth, sums);
  if (rows == 3) fx_weight_rows<3>(a, row, b, column, columns, depth, sums);
  if (rows == 4) fx_weight_rows<4>(a, row, b, column, columns, depth, sums);
}
