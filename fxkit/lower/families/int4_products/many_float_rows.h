// Products of many rows of floats by a matrix of 4-bit integers in groups: a part of a panel becomes
// floats that a cache holds, and all rows are multiplied by those.
#if defined(FX_FLOAT_STEP)
#if defined(FX_DOTS)
typedef fx_step<64> fx_row_step;
static const int FX_ROW_VECTORS = 4;
static inline void fx_turn_nibbles(const signed char* from, long step, int* to) {
  fx_turn_words<true>(from, step, 16, 64, to);
}
#else
typedef fx_step<32> fx_row_step;
static const int FX_ROW_VECTORS = 2;
static inline void fx_turn_nibbles(const signed char* from, long step, int* to) {
  fx_turn_words(from, step, to, (const unsigned char*)nullptr);
}
#endif

// Rows that are worth floats of the weight, and terms that become floats at once.
static const long FX_WORTH_FLOATS = 8, FX_FLOAT_TERMS = 8 * fx_row_step::LANES;

// Scales and zero points of one group of the columns of a vector; columns that are not there have 0.
template <class Zero>
static inline void fx_scales_of_columns(const fx_groups<Zero>& b, long place, long step, long count,
                                        fx_row_step::floats& scale, fx_row_step::floats& zero) {
  alignas(64) float scales[fx_row_step::LANES] = {}, zeros[fx_row_step::LANES] = {};
  for (long c = 0; c < count && c < fx_row_step::LANES; ++c) {
    scales[c] = b.scales[place + c * step];
    if (b.zeros) zeros[c] = (float)b.zeros[place + c * step];
  }
  scale = *(const fx_row_step::floats*)scales;
  zero = *(const fx_row_step::floats*)zeros;
}

// The weight as floats [terms][64], for terms from one on.
template <class Zero>
static void fx_floats_of_panel(const fx_groups<Zero>& b, long columns, long depth, long from, long terms,
                               float* panel) {
  typedef fx_row_step s;
  const long step = b.bytes(depth), size = s::LANES * 4, there = terms / 2;
  alignas(64) int words[16 * s::LANES];
#if defined(FX_DOTS)
  const s::floats values = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
#endif
  for (long c = 0; c < columns; c += s::LANES) {
    const signed char* const bytes = (const signed char*)b.packed + c * step + from / 2;
    const long count = columns - c < s::LANES ? columns - c : s::LANES;
    if (count == s::LANES && there == size) {
      for (long i = 0; i < count; ++i) __builtin_prefetch(bytes + i * step + size);
      fx_turn_nibbles(bytes, step, words);
    } else {
      alignas(64) signed char part[s::LANES * s::LANES * 4] = {};
      for (long i = 0; i < count; ++i) __builtin_memcpy(part + i * size, bytes + i * step, there);
      fx_turn_nibbles(part, size, words);
    }
    s::floats scale = {}, zero = {};
    for (long k = 0; k < terms; k += 8) {
      if (k == 0 || (from + k) % b.group == 0)
        fx_scales_of_columns(
            b, c * b.count(depth) + (from + k) / b.group, b.count(depth), count, scale, zero);
      const s::ints word = *(const s::ints*)(words + k * 2);
      float* const to = panel + k * FX_GROUP_COLUMNS + c;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
#if defined(FX_DOTS)
        s::floats integers;
        asm("vpermps %2, %1, %0" : "=v"(integers) : "v"(word >> 4 * i), "v"(values));
#else
        const s::floats integers = __builtin_convertvector((word << (28 - 4 * i)) >> 28, s::floats);
#endif
        *(s::floats*)(to + i * FX_GROUP_COLUMNS) = (integers - zero) * scale;
      }
    }
  }
}

// ROWS rows by some vectors of columns of such a panel, added to sums[ROWS][64].
template <int ROWS, int VECTORS>
static inline __attribute__((always_inline)) void fx_rows_by_floats(
    const float* a, long row, const float* panel, long terms, float* sums) {
  typedef fx_row_step s;
  s::floats held[ROWS][VECTORS] = {};
  for (long k = 0; k < terms; ++k, panel += FX_GROUP_COLUMNS) {
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const s::floats x = a[r * row + k] - (s::floats){};
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        s::add_product(held[r][v], x, *(const s::floats*)(panel + v * s::LANES));
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      *(s::floats*)(sums + r * FX_GROUP_COLUMNS + v * s::LANES) += held[r][v];
}

template <int ROWS>
static inline void fx_rows_by_panel(const float* a, long row, const float* panel, long columns, long terms,
                                    float* sums) {
  const long width = FX_ROW_VECTORS * fx_row_step::LANES;
  long c = 0;
  for (; c + width <= columns; c += width)
    fx_rows_by_floats<ROWS, FX_ROW_VECTORS>(a, row, panel + c, terms, sums + c);
  for (; c < columns; c += fx_row_step::LANES)
    fx_rows_by_floats<ROWS, 1>(a, row, panel + c, terms, sums + c);
}

// Many rows of floats by a panel, added to sums[rows][64].
template <class Zero>
static void fx_many_float_rows(const float* a, long row, const fx_groups<Zero>& b, long rows, long columns,
                               long depth, float* sums) {
  alignas(64) float panel[FX_FLOAT_TERMS * FX_GROUP_COLUMNS];
  for (long from = 0; from < depth; from += FX_FLOAT_TERMS) {
    const long terms = depth - from < FX_FLOAT_TERMS ? depth - from : FX_FLOAT_TERMS;
    fx_floats_of_panel(b, columns, depth, from, terms, panel);
    const float* const x = a + from;
    long r = 0;
    for (; r + 6 <= rows; r += 6)
      fx_rows_by_panel<6>(x + r * row, row, panel, columns, terms, sums + r * FX_GROUP_COLUMNS);
    for (; r + 2 <= rows; r += 2)
      fx_rows_by_panel<2>(x + r * row, row, panel, columns, terms, sums + r * FX_GROUP_COLUMNS);
    if (r < rows)
      fx_rows_by_panel<1>(x + r * row, row, panel, columns, terms, sums + r * FX_GROUP_COLUMNS);
  }
}
#endif

// sums[rows][64] = A by a panel of columns, for floats A; ROWS as for integers.
template <long ROWS, class Zero>
static void fx_int4_product(const float* a, long row, const fx_groups<Zero>& b, long rows, long columns,
                            long depth, long block, fx_floats_in_order& in_order, float* sums) {
  __builtin_memset(sums, 0, rows * FX_GROUP_COLUMNS * sizeof(float));
#if defined(FX_FLOAT_STEP)
  constexpr bool HAS_MANY = ROWS == 0 || ROWS >= FX_WORTH_FLOATS;
  if constexpr (HAS_MANY)
    if (b.group % FX_UNIT == 0 && (ROWS >= FX_WORTH_FLOATS || rows >= FX_WORTH_FLOATS)) {
      fx_many_float_rows(a, row, b, rows, columns, depth, sums);
      return;
    }
  if constexpr (ROWS < FX_WORTH_FLOATS)
    if (b.group % FX_UNIT == 0) {
      const long own = rows == 1 || rows == 2 || rows == 4 ? block : -1;
      const auto add = [&]<int SOME>(long r) {
        if constexpr (ROWS == 0 || ROWS / SOME % 2 == 1 || (SOME == 4 && ROWS >= 4))
          fx_float_groups<SOME>(
              a + r * row, row, b, columns, depth, own, in_order, sums + r * FX_GROUP_COLUMNS);
      };
      long r = 0;
      for (; r + 4 <= rows; r += 4) add.template operator()<4>(r);
      for (; r + 2 <= rows; r += 2) add.template operator()<2>(r);
      if (r < rows) add.template operator()<1>(r);
      return;
    }
#endif
  fx_plain_groups<float>(a, row, nullptr, b, rows, columns, depth, sums);
}
