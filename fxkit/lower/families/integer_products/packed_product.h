// Exact products of 8-bit integers by a weight that was packed once; `packed_panels.py` tells how.
static const long FX_PANEL_HEAD = 320;

static inline long fx_packed_size(long depth) {
  return FX_PANEL_HEAD + (depth + 63) / 64 * 64 * FX_PANEL_COLUMNS;
}

#if defined(__AVX2__) && !defined(FX_DOTS)
static const long FX_PACKED_ROWS = 4;
typedef int fx_eight_ints __attribute__((vector_size(32)));

// The products of unsigned by signed bytes, added in pairs that fit into 16 bits, then in fours.
static inline fx_eight_ints fx_fours(fx_eight_ints positive, fx_eight_ints any) {
  typedef char bytes __attribute__((vector_size(32)));
  typedef short shorts __attribute__((vector_size(32)));
  const shorts pairs = (shorts)__builtin_ia32_pmaddubsw256((bytes)positive, (bytes)any);
  return (fx_eight_ints)__builtin_ia32_pmaddwd256(pairs, (shorts){} + 1);
}

// ROWS rows of bytes by 16 columns whose pairs fit, added to sums[ROWS][64].
template <int ROWS>
static inline __attribute__((always_inline)) void fx_rows_in_fours(
    const unsigned char* a, const signed char* panel, long fours, int* sums) {
  fx_eight_ints held[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) held[r][v] = *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8);
  for (long n = 0; n < fours; ++n) {
    const fx_eight_ints first = *(const fx_dots*)(panel + n * 256);
    const fx_eight_ints second = *(const fx_dots*)(panel + n * 256 + 32);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const fx_eight_ints left = (fx_eight_ints){} + *(const int*)(a + r * FX_PANEL_TERMS + n * 4);
      held[r][0] += fx_fours(left, first);
      held[r][1] += fx_fours(left, second);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8) = held[r][v];
}

// ROWS rows of 16 bits by 8 columns, whatever their numbers, added to sums[ROWS][64]. A column is
// summed in two lanes.
template <int ROWS>
static inline __attribute__((always_inline)) void fx_rows_widened(
    const short* a, const signed char* panel, long fours, int* sums) {
  fx_eight_ints held[ROWS][2] = {};
  for (long n = 0; n < fours; ++n) {
    const fx_shorts first = fx_widened(panel + n * 256);
    const fx_shorts second = fx_widened(panel + n * 256 + 16);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      typedef long long words __attribute__((vector_size(32)));
      const words left = (words){} + *(const long long*)(a + r * FX_PANEL_TERMS + n * 4);
      held[r][0] += fx_pairs((fx_shorts)left, first);
      held[r][1] += fx_pairs((fx_shorts)left, second);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const fx_eight_ints x = held[r][0], y = held[r][1];
    *(fx_dots*)(sums + r * FX_PANEL_COLUMNS) +=
        __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14) +
        __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15);
  }
}

template <class Word, class Left>
static inline void fx_copy_row(const Left* from, long terms, Word* to) {
  const int lift = sizeof(Word) == 1 ? fx_lift(from) : 0;
  for (long k = 0; k < terms; ++k) to[k] = (Word)(from[k] + lift);
  for (long k = terms; k % 4; ++k) to[k] = 0;
}

template <class Left>
static void fx_rows_by_packed(const Left* a, long row, long rows, const signed char* panel,
                              bool fits, long terms, int* sums) {
  alignas(64) short held[FX_PACKED_ROWS * FX_PANEL_TERMS];
  unsigned char* const bytes = (unsigned char*)held;
  const long fours = (terms + 3) / 4;
  for (long r = 0; r < rows; r += FX_PACKED_ROWS) {
    const long count = rows - r < FX_PACKED_ROWS ? rows - r : FX_PACKED_ROWS;
    for (long i = 0; i < count; ++i) {
      if (fits)
        fx_copy_row(a + (r + i) * row, terms, bytes + i * FX_PANEL_TERMS);
      else
        fx_copy_row(a + (r + i) * row, terms, held + i * FX_PANEL_TERMS);
    }
    int* const to = sums + r * FX_PANEL_COLUMNS;
    for (long c = 0; c < FX_PANEL_COLUMNS; c += fits ? 16 : 8) {
      if (count == FX_PACKED_ROWS && fits)
        fx_rows_in_fours<FX_PACKED_ROWS>(bytes, panel + c * 4, fours, to + c);
      else if (count == FX_PACKED_ROWS)
        fx_rows_widened<FX_PACKED_ROWS>(held, panel + c * 4, fours, to + c);
      else
        for (long i = 0; i < count; ++i) {
          if (fits)
            fx_rows_in_fours<1>(bytes + i * FX_PANEL_TERMS, panel + c * 4, fours,
                                to + i * FX_PANEL_COLUMNS + c);
          else
            fx_rows_widened<1>(held + i * FX_PANEL_TERMS, panel + c * 4, fours,
                               to + i * FX_PANEL_COLUMNS + c);
        }
    }
  }
}
#elif !defined(FX_DOTS)
// Plain C++ adds up rows of columns.
template <class Left>
static void fx_rows_by_packed(const Left* a, long row, long rows, const signed char* packed, bool,
                              long terms, int* sums) {
  signed char panel[FX_PANEL_TERMS * FX_PANEL_COLUMNS];
  for (long k = 0; k < terms; ++k)
    for (long c = 0; c < FX_PANEL_COLUMNS; ++c)
      panel[k * FX_PANEL_COLUMNS + c] = packed[k / 4 * 256 + c * 4 + k % 4];
  fx_rows_by_panel(a, row, rows, panel, terms, sums);
}
#endif

// Tells whether no pair of a packed panel, times unsigned bytes, leaves 16 bits.
static inline bool fx_pairs_fit(const unsigned char* packed) {
  return ((const int*)packed)[FX_PANEL_COLUMNS] == 1;
}

// sums[rows][64] += A B for a block of rows and some terms of a packed panel, from a multiple of 64 on.
// Terms of A lie side by side; HAS_ROOM is told in `fx_square_in_tiles`.
template <bool HAS_TILES, bool HAS_ROOM, class Left>
static void fx_add_packed(const Left* a, long row, const unsigned char* packed, long rows, long from,
                          long terms, int* sums) {
  const signed char* const panel =
      (const signed char*)packed + FX_PANEL_HEAD + from * FX_PANEL_COLUMNS;
  for (long k = 0; k < terms; k += FX_PANEL_TERMS) {
    const long some = terms - k < FX_PANEL_TERMS ? terms - k : FX_PANEL_TERMS;
    const signed char* const part = panel + k * FX_PANEL_COLUMNS;
#if defined(FX_DOTS)
    long done = 0;
    if (HAS_TILES) done = fx_rows_in_tiles<true, HAS_ROOM>(a + k, row, rows, part, some, sums);
    fx_rows_by_panel(a + k + done * row, row, rows - done, part, some,
                     sums + done * FX_PANEL_COLUMNS);
#else
    fx_rows_by_packed(a + k, row, rows, part, fx_pairs_fit(packed), some, sums);
#endif
  }
}

// Takes zero points off such sums, and by how much rows were lifted that no tiles have multiplied.
template <bool HAS_TILES, class Left>
static void fx_less_zeros(const Left* a, const unsigned char* packed, long rows, fx_zeros zeros,
                          int* sums) {
  const int* const totals = (const int*)packed;
  int lift = 0;
#if defined(FX_DOTS)
  lift = fx_lift(a);
#elif defined(__AVX2__)
  lift = fx_pairs_fit(packed) ? fx_lift(a) : 0;
#endif
  for (long r = 0; r < rows; ++r) {
    const int moved = zeros.of(r) + (HAS_TILES && r < rows / 32 * 32 ? 0 : lift);
    int* const to = sums + r * FX_PANEL_COLUMNS;
    if (moved)
      for (long c = 0; c < FX_PANEL_COLUMNS; ++c) to[c] -= moved * totals[c];
  }
}

// sums[rows][64] = (A - zeros) B for a block of rows and a packed panel.
template <bool HAS_TILES, bool HAS_ROOM, class Left>
static void fx_packed_product(const Left* a, long row, const unsigned char* packed, long rows,
                              long depth, fx_zeros zeros, int* sums) {
  __builtin_memset(sums, 0, rows * FX_PANEL_COLUMNS * sizeof(int));
  fx_add_packed<HAS_TILES, HAS_ROOM>(a, row, packed, rows, 0, depth, sums);
  fx_less_zeros<HAS_TILES>(a, packed, rows, zeros, sums);
}
