// Exact products of matrices of 8-bit integers, summed in 32 bits: no step saturates.
//
// A tile is a block of rows by a panel of 64 columns. The panel is copied into the order that the
// processor multiplies in, 4 terms of a column side by side; a few rows read it where it lies.
static const long FX_PANEL_COLUMNS = 64, FX_PANEL_TERMS = 1024, FX_FEW_ROWS = 4;

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef short fx_packed;
#else
typedef signed char fx_packed;
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FX_DOTS 64
typedef int fx_dots __attribute__((vector_size(64), aligned(1), may_alias));

// sums + the products of 4 unsigned by 4 signed bytes, in each lane.
static inline fx_dots fx_dot(fx_dots sums, fx_dots positive, fx_dots any) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(positive), "v"(any));
  return sums;
}
#elif defined(__AVX2__)
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

#if defined(FX_DOTS)
#define FX_PAIRED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)

// Writes 16 vectors as columns: word i of vector c goes to word c of the vector at to + 64 i.
static inline void fx_turn_words(const signed char* from, long step, int* to) {
  typedef int words __attribute__((vector_size(64)));
  words x[16], y[16];
  for (int c = 0; c < 16; ++c) x[c] = *(const fx_dots*)(from + c * step);
#pragma GCC unroll 8
  for (int c = 0; c < 16; c += 2) {
    y[c] = FX_PAIRED(x[c], x[c + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    y[c + 1] = FX_PAIRED(x[c], x[c + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 8
  for (int c = 0; c < 16; c += 4)
    for (int i = 0; i < 2; ++i) {
      const words low = y[c + i], high = y[c + 2 + i];
      x[c + 2 * i] = FX_PAIRED(low, high, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      x[c + 2 * i + 1] =
          FX_PAIRED(low, high, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    const words a = FX_PAIRED(x[i], x[4 + i], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const words b = FX_PAIRED(x[i], x[4 + i], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    const words c =
        FX_PAIRED(x[8 + i], x[12 + i], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const words d =
        FX_PAIRED(x[8 + i], x[12 + i], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    *(fx_dots*)(to + i * 64) = FX_PAIRED(a, c, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    *(fx_dots*)(to + (4 + i) * 64) =
        FX_PAIRED(b, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    *(fx_dots*)(to + (8 + i) * 64) =
        FX_PAIRED(a, c, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    *(fx_dots*)(to + (12 + i) * 64) =
        FX_PAIRED(b, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

// [terms / 4][64][4] of a panel; columns that are not there are 0, and so are terms up to a
// multiple of 64. Adds up the columns.
static void fx_pack_panel(const signed char* b, long term, long column, long columns, long terms,
                          signed char* panel, int* totals) {
  const long blocks = (terms + 63) / 64 * 16;
  if (columns < FX_PANEL_COLUMNS || terms % 64) __builtin_memset(panel, 0, blocks * 256);
  if (term == 1) {
    const long turned = terms / 64 * 64;
    long c = 0;
    for (; c + 16 <= columns; c += 16)
      for (long k = 0; k < turned; k += 64)
        fx_turn_words(b + c * column + k, column, (int*)(panel + k * 64 + c * 4));
    const long done = c;
    for (c = 0; c < columns; ++c) {
      const signed char* from = b + c * column;
      long k = c < done ? turned : 0;
      for (; k + 4 <= terms; k += 4) __builtin_memcpy(panel + k * 64 + c * 4, from + k, 4);
      for (; k < terms; ++k) panel[k / 4 * 256 + c * 4 + k % 4] = from[k];
    }
  } else {
    for (long k = 0; k < terms; ++k)
      for (long c = 0; c < columns; ++c)
        panel[k / 4 * 256 + c * 4 + k % 4] = b[k * term + c * column];
  }
  const fx_dots ones = (fx_dots){} + 0x01010101;
  fx_dots sums[4] = {};
  for (long n = 0; n < blocks; ++n)
    for (int v = 0; v < 4; ++v) sums[v] = fx_dot(sums[v], ones, *(fx_dots*)(panel + n * 256 + v * 64));
  for (int v = 0; v < 4; ++v) *(fx_dots*)(totals + v * 16) = sums[v];
}

// ROWS rows by a panel, added to sums[ROWS][64].
template <int ROWS, class Left>
static inline __attribute__((always_inline)) void fx_some_rows(
    const Left* a, long row, const signed char* panel, long terms, int* sums) {
  const unsigned flip = fx_lift(a) ? 0x80808080u : 0u;
  typedef int words __attribute__((vector_size(64)));
  words held[ROWS][4];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 4; ++v) held[r][v] = *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 16);
  const auto step = [&](const signed char* from, auto read) __attribute__((always_inline)) {
    words factors[4];
    for (int v = 0; v < 4; ++v) factors[v] = *(const fx_dots*)(from + v * 64);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const words left = (words){} + (int)(read(r) ^ flip);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) held[r][v] = fx_dot(held[r][v], left, factors[v]);
    }
  };
  long k = 0;
  for (; k + 4 <= terms; k += 4)
    step(panel + k * 64, [&](int r) __attribute__((always_inline)) {
      unsigned four;
      __builtin_memcpy(&four, a + r * row + k, 4);
      return four;
    });
  if (k < terms)
    step(panel + k * 64, [&](int r) __attribute__((always_inline)) {
      unsigned four = 0;
      __builtin_memcpy(&four, a + r * row + k, terms - k);
      return four;
    });
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 4; ++v) *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 16) = held[r][v];
}

template <class Left>
static void fx_rows_by_panel(const Left* a, long row, long rows, const signed char* panel,
                             long terms, int* sums) {
  long r = 0;
  for (; r + 6 <= rows; r += 6)
    fx_some_rows<6>(a + r * row, row, panel, terms, sums + r * FX_PANEL_COLUMNS);
  for (; r + 2 <= rows; r += 2)
    fx_some_rows<2>(a + r * row, row, panel, terms, sums + r * FX_PANEL_COLUMNS);
  if (r < rows) fx_some_rows<1>(a + r * row, row, panel, terms, sums + r * FX_PANEL_COLUMNS);
}

#if defined(__AMX_INT8__)
#define FX_READ_TILE(N, FROM, STEP) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #N : : "r"(FROM), "r"((long)(STEP)) : "memory")
#define FX_WRITE_TILE(N, TO, STEP) \
  asm volatile("tilestored %%tmm" #N ", (%0,%1,1)" : : "r"(TO), "r"((long)(STEP)) : "memory")
#define FX_DOT_TILES(KIND, A, B, C) \
  asm volatile(KIND " %%tmm" #B ", %%tmm" #A ", %%tmm" #C : :)

static inline __attribute__((always_inline)) void fx_dot_tiles(const unsigned char*) {
  FX_DOT_TILES("tdpbusd", 4, 6, 0);
  FX_DOT_TILES("tdpbusd", 4, 7, 1);
  FX_DOT_TILES("tdpbusd", 5, 6, 2);
  FX_DOT_TILES("tdpbusd", 5, 7, 3);
}

static inline __attribute__((always_inline)) void fx_dot_tiles(const signed char*) {
  FX_DOT_TILES("tdpbssd", 4, 6, 0);
  FX_DOT_TILES("tdpbssd", 4, 7, 1);
  FX_DOT_TILES("tdpbssd", 5, 6, 2);
  FX_DOT_TILES("tdpbssd", 5, 7, 3);
}

// 32 rows by 32 columns of a panel in the tiles of the processor, added to sums[32][64]. HAS_ROOM tells
// that up to a multiple of 64 terms something may be read, whose factors are 0. What is AHEAD, if
// anything, is asked for meanwhile, as many bytes of it as the panel has.
template <bool HAS_ROOM, class Left>
static inline void fx_square_in_tiles(const Left* a, long row, const signed char* panel, long terms,
                                      const signed char* ahead, int* sums) {
  alignas(64) Left rest[32 * 64];
  const long whole = (HAS_ROOM ? terms + 63 : terms) / 64 * 64;
  const long width = FX_PANEL_COLUMNS * sizeof(int);
  FX_READ_TILE(0, sums, width);
  FX_READ_TILE(1, sums + 16, width);
  FX_READ_TILE(2, sums + 16 * FX_PANEL_COLUMNS, width);
  FX_READ_TILE(3, sums + 16 * FX_PANEL_COLUMNS + 16, width);
  const auto step = [&](const Left* from, long row, const signed char* to)
      __attribute__((always_inline)) {
        FX_READ_TILE(4, from, row);
        FX_READ_TILE(6, to, 256);
        FX_READ_TILE(7, to + 64, 256);
        FX_READ_TILE(5, from + 16 * row, row);
        fx_dot_tiles(from);
      };
  for (long k = 0; k < whole; k += 64) {
    if (ahead)
      for (long byte = 0; byte < 4096; byte += 64) __builtin_prefetch(ahead + k * 64 + byte, 0, 2);
    step(a + k, row, panel + k * 64);
  }
  if (whole < terms) {
    __builtin_memset(rest, 0, sizeof rest);
    for (long r = 0; r < 32; ++r)
      __builtin_memcpy(rest + r * 64, a + r * row + whole, terms - whole);
    step(rest, 64, panel + whole * 64);
  }
  FX_WRITE_TILE(0, sums, width);
  FX_WRITE_TILE(1, sums + 16, width);
  FX_WRITE_TILE(2, sums + 16 * FX_PANEL_COLUMNS, width);
  FX_WRITE_TILE(3, sums + 16 * FX_PANEL_COLUMNS + 16, width);
}

// As many rows as tiles take by a panel; returns how many those are. Half of the panel stays in the
// first cache meanwhile. Where a panel IS_PACKED, what comes next follows it in memory.
template <bool IS_PACKED = false, bool HAS_ROOM = false, class Left>
static long fx_rows_in_tiles(const Left* a, long row, long rows, const signed char* panel,
                             long terms, int* sums) {
  if (rows < 32) return 0;
  alignas(64) unsigned char shapes[64] = {1};
  for (int tile = 0; tile < 8; ++tile) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
  asm volatile("ldtilecfg %0" : : "m"(shapes));
  const long done = rows / 32 * 32;
  for (long c = 0; c < FX_PANEL_COLUMNS; c += 32)
    for (long r = 0; r < done; r += 32)
      fx_square_in_tiles<HAS_ROOM>(
          a + r * row, row, panel + c * 4, terms,
          IS_PACKED && r + c == 0 ? panel + terms * FX_PANEL_COLUMNS : nullptr,
          sums + r * FX_PANEL_COLUMNS + c);
  asm volatile("tilerelease" : :);
  return done;
}
#else
template <bool IS_PACKED = false, bool HAS_ROOM = false, class Left>
static long fx_rows_in_tiles(const Left*, long, long, const signed char*, long, int*) {
  return 0;
}
#endif
#elif defined(__AVX2__)
// [terms / 2][64][2] of a panel in 16 bits, so that nothing has to be lifted. Adds up the columns.
static void fx_pack_panel(const signed char* b, long term, long column, long columns, long terms,
                          short* panel, int* totals) {
  if (columns < FX_PANEL_COLUMNS || terms % 2)
    __builtin_memset(panel, 0, (terms + 1) / 2 * 128 * sizeof(short));
  for (long c = 0; c < columns; ++c) {
    const signed char* const from = b + c * column;
    long k = 0;
    for (; term == 1 && k + 16 <= terms; k += 16) {
      const fx_dots pairs = (fx_dots)fx_widened(from + k);
      int* const to = (int*)(panel + k * 64) + c;
      for (int i = 0; i < 8; ++i) to[i * 64] = pairs[i];
    }
    for (; k < terms; ++k) panel[k / 2 * 128 + c * 2 + k % 2] = from[k * term];
    for (k = 0; k < terms; ++k) totals[c] += from[k * term];
  }
}

static const long FX_ROWS_AT_ONCE = 4;

// ROWS rows of pairs by 16 columns of a panel, added to sums[ROWS][64].
template <int ROWS>
static inline __attribute__((always_inline)) void fx_some_rows(
    const int* a, const short* panel, long pairs, int* sums) {
  typedef int words __attribute__((vector_size(32)));
  words held[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) held[r][v] = *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8);
  for (long n = 0; n < pairs; ++n) {
    const fx_shorts first = *(const fx_shorts*)(panel + n * 128);
    const fx_shorts second = *(const fx_shorts*)(panel + n * 128 + 16);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const fx_shorts left = (fx_shorts)((fx_dots){} + a[r * (FX_PANEL_TERMS / 2) + n]);
      held[r][0] += fx_pairs(left, first);
      held[r][1] += fx_pairs(left, second);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8) = held[r][v];
}

template <class Left>
static void fx_rows_by_panel(const Left* a, long row, long rows, const short* panel, long terms,
                             int* sums) {
  alignas(64) short wide[FX_ROWS_AT_ONCE * FX_PANEL_TERMS];
  const long pairs = (terms + 1) / 2;
  for (long r = 0; r < rows; r += FX_ROWS_AT_ONCE) {
    const long count = rows - r < FX_ROWS_AT_ONCE ? rows - r : FX_ROWS_AT_ONCE;
    for (long i = 0; i < count; ++i) {
      short* const to = wide + i * FX_PANEL_TERMS;
      for (long k = 0; k < terms; ++k) to[k] = a[(r + i) * row + k];
      if (terms % 2) to[terms] = 0;
    }
    for (long c = 0; c < FX_PANEL_COLUMNS; c += 16) {
      int* const to = sums + r * FX_PANEL_COLUMNS + c;
      if (count == FX_ROWS_AT_ONCE)
        fx_some_rows<FX_ROWS_AT_ONCE>((const int*)wide, panel + c * 2, pairs, to);
      else
        for (long i = 0; i < count; ++i)
          fx_some_rows<1>((const int*)(wide + i * FX_PANEL_TERMS), panel + c * 2, pairs,
                          to + i * FX_PANEL_COLUMNS);
    }
  }
}
#else
// [terms][64] of a panel.
static void fx_pack_panel(const signed char* b, long term, long column, long columns, long terms,
                          signed char* panel, int* totals) {
  for (long k = 0; k < terms; ++k)
    for (long c = 0; c < FX_PANEL_COLUMNS; ++c) {
      panel[k * FX_PANEL_COLUMNS + c] = c < columns ? b[k * term + c * column] : 0;
      totals[c] += panel[k * FX_PANEL_COLUMNS + c];
    }
}

template <class Left>
static void fx_rows_by_panel(const Left* a, long row, long rows, const signed char* panel,
                             long terms, int* sums) {
  for (long r = 0; r < rows; ++r)
    for (long k = 0; k < terms; ++k) {
      const int left = a[r * row + k];
      int* const to = sums + r * FX_PANEL_COLUMNS;
      for (long c = 0; c < FX_PANEL_COLUMNS; ++c) to[c] += left * panel[k * FX_PANEL_COLUMNS + c];
    }
}
#endif

// The zero points of the rows of the left operand: one each, or one for all.
struct fx_zeros {
  const int* each;
  long step;
  int all;
  int of(long row) const { return each ? each[row * step] : all; }
};

// A few rows by columns whose terms lie side by side: memory is read once, from end to end.
template <int ROWS, class Left>
static void fx_few_rows(const Left* a, long row, const signed char* b, long column, long columns,
                        long depth, fx_zeros zeros, int* sums) {
  for (long c = 0; c < columns; ++c) {
    const signed char* const from = b + c * column;
    int found[ROWS] = {}, total = 0;
    long k = 0;
#if defined(FX_DOTS)
    const int lift = fx_lift(a);
    const fx_dots flip = (fx_dots){} + (lift ? (int)0x80808080u : 0);
    const fx_dots ones = (fx_dots){} + 0x01010101;
    fx_dots held[ROWS] = {}, totals = {};
    for (; k + FX_DOTS <= depth; k += FX_DOTS) {
      const fx_dots right = *(const fx_dots*)(from + k);
      __builtin_prefetch(from + k + 1024);
      totals = fx_dot(totals, ones, right);
      for (int r = 0; r < ROWS; ++r)
        held[r] = fx_dot(held[r], *(const fx_dots*)(a + r * row + k) ^ flip, right);
    }
    for (int lane = 0; lane < 16; ++lane) total += totals[lane];
    for (int r = 0; r < ROWS; ++r) {
      for (int lane = 0; lane < 16; ++lane) found[r] += held[r][lane];
      found[r] -= lift * total;
    }
#elif defined(__AVX2__)
    fx_dots held[ROWS] = {}, totals = {};
    const fx_shorts ones = (fx_shorts){} + 1;
    for (; k + 16 <= depth; k += 16) {
      const fx_shorts right = fx_widened(from + k);
      __builtin_prefetch(from + k + 1024);
      totals += fx_pairs(ones, right);
      for (int r = 0; r < ROWS; ++r) held[r] += fx_pairs(fx_widened(a + r * row + k), right);
    }
    for (int lane = 0; lane < 8; ++lane) {
      total += totals[lane];
      for (int r = 0; r < ROWS; ++r) found[r] += held[r][lane];
    }
#endif
    for (; k < depth; ++k) {
      total += from[k];
      for (int r = 0; r < ROWS; ++r) found[r] += (int)a[r * row + k] * from[k];
    }
    for (int r = 0; r < ROWS; ++r) sums[r * FX_PANEL_COLUMNS + c] = found[r] - zeros.of(r) * total;
  }
}

// sums[rows][64] = (A - zeros) B for a block of rows and a panel of columns; terms of A lie side by
// side. HAS_TILES tells that the system lets this process use the processor's tiles.
template <bool HAS_TILES, class Left>
static void fx_integer_product(const Left* a, long row, const signed char* b, long term, long column,
                               long rows, long columns, long depth, fx_zeros zeros, int* sums) {
  if (rows <= FX_FEW_ROWS && term == 1) {
    if (rows == 1) fx_few_rows<1>(a, row, b, column, columns, depth, zeros, sums);
    if (rows == 2) fx_few_rows<2>(a, row, b, column, columns, depth, zeros, sums);
    if (rows == 3) fx_few_rows<3>(a, row, b, column, columns, depth, zeros, sums);
    if (rows == 4) fx_few_rows<4>(a, row, b, column, columns, depth, zeros, sums);
    return;
  }
  alignas(64) fx_packed panel[FX_PANEL_TERMS * FX_PANEL_COLUMNS];
  __builtin_memset(sums, 0, rows * FX_PANEL_COLUMNS * sizeof(int));
  for (long k = 0; k < depth; k += FX_PANEL_TERMS) {
    const long terms = depth - k < FX_PANEL_TERMS ? depth - k : FX_PANEL_TERMS;
    alignas(64) int totals[FX_PANEL_COLUMNS] = {};
    fx_pack_panel(b + k * term, term, column, columns, terms, panel, totals);
    long done = 0;
    int lift = 0;
#if defined(FX_DOTS)
    lift = fx_lift(a);
    if (HAS_TILES) done = fx_rows_in_tiles(a + k, row, rows, panel, terms, sums);
#endif
    fx_rows_by_panel(a + k + done * row, row, rows - done, panel, terms,
                     sums + done * FX_PANEL_COLUMNS);
    for (long r = 0; r < rows; ++r) {
      const int moved = zeros.of(r) + (r < done ? 0 : lift);
      int* const to = sums + r * FX_PANEL_COLUMNS;
      if (moved)
        for (long c = 0; c < FX_PANEL_COLUMNS; ++c) to[c] -= moved * totals[c];
    }
  }
}
