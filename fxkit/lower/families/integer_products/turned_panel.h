// Panels of the right operand, turned into the order that the processor multiplies in.
#if defined(FX_DOTS)
#define FX_PAIRED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)

// The first bytes, of up to 64, that are there; others are 0.
static inline fx_dots fx_first_bytes(const void* from, long count) {
  typedef char bytes __attribute__((vector_size(64)));
  const unsigned long long on = count < 64 ? (1ull << count) - 1 : -1ull;
  return (fx_dots)__builtin_ia32_loaddquqi512_mask((const char*)from, (bytes){}, on);
}

// Writes 16 vectors as columns: word i of vector c goes to word c of vector i. Returns the sum of each. Only
// some columns, of some terms, are there.
template <bool IS_WHOLE>
static inline fx_integers fx_turn_words(const signed char* from, long step, long count, long terms, int* to) {
  typedef int words __attribute__((vector_size(64)));
  words x[16], y[16];
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c)
    x[c] = IS_WHOLE ? *(const fx_dots*)(from + c * step)
                    : fx_first_bytes(from + c * step, c < count ? terms : 0);
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
  const fx_dots ones = (fx_dots){} + 0x01010101;
  fx_dots totals[4] = {};
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    const words a = FX_PAIRED(x[i], x[4 + i], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const words b = FX_PAIRED(x[i], x[4 + i], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    const words c =
        FX_PAIRED(x[8 + i], x[12 + i], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const words d =
        FX_PAIRED(x[8 + i], x[12 + i], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    const words y[4] = {
        FX_PAIRED(a, c, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
        FX_PAIRED(b, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
        FX_PAIRED(a, c, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31),
        FX_PAIRED(b, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)};
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      *(fx_dots*)(to + (4 * part + i) * 16) = y[part];
      totals[part] = fx_dot(totals[part], ones, y[part]);
    }
  }
  return (totals[0] + totals[1]) + (totals[2] + totals[3]);
}

// Rows and terms of a block that are turned at once; so few that the first cache holds half of them.
static const long FX_TURNED_TERMS = 1024, FX_TURNED_COLUMNS = 32;

// 32 columns as [terms / 64][2][16][16][4]: columns that are not there are 0, and so are terms up to a
// multiple of 64. Their sums are added to totals.
static void fx_turned(const signed char* b, long column, long columns, long terms, signed char* panel,
                      int* totals) {
  for (long t = 0; t < 2; ++t) {
    const long count = columns - 16 * t;
    fx_dots* const total = (fx_dots*)(totals + 16 * t);
    for (long k = 0; k < terms; k += 64) {
      const signed char* from = b + 16 * t * column + k;
      int* const to = (int*)(panel + (k / 64 * 2 + t) * 1024);
      const long some = terms - k;
      if (count >= 16 && some >= 64)
        *total += fx_turn_words<true>(from, column, 16, 64, to);
      else
        *total += fx_turn_words<false>(from, column, count, some, to);
    }
  }
}

// ROWS rows by 32 columns, added to sums[ROWS][64]: of words of 4 terms, each moved up by what is flipped.
template <int ROWS>
static inline __attribute__((always_inline)) void fx_some_rows(
    const char* a, long row, unsigned flip, const signed char* panel, long terms, int* sums) {
  fx_integers held[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) held[r][v] = *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 16);
  const auto step = [&](long k, long count) __attribute__((always_inline)) {
    const signed char* const from = panel + k / 64 * 2048 + k % 64 * 16;
    const fx_integers first = *(const fx_dots*)from, second = *(const fx_dots*)(from + 1024);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      unsigned four = 0;
      __builtin_memcpy(&four, a + r * row + k, count);
      const fx_integers left = (fx_integers){} + (int)(four ^ flip);
      held[r][0] = fx_dot(held[r][0], left, first);
      held[r][1] = fx_dot(held[r][1], left, second);
    }
  };
  long k = 0;
  for (; k + 4 <= terms; k += 4) step(k, 4);
  if (k < terms) step(k, terms - k);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 16) = held[r][v];
}

template <class Left>
static void fx_rows_by_turned(const Left* a, long row, long rows, const signed char* panel, long terms,
                              int* sums) {
  const unsigned flip = fx_lift(a) ? 0x80808080u : 0;
  const char* const from = (const char*)a;
  long r = 0;
  for (; r + 8 <= rows; r += 8)
    fx_some_rows<8>(from + r * row, row, flip, panel, terms, sums + r * FX_PANEL_COLUMNS);
  for (; r + 4 <= rows; r += 4)
    fx_some_rows<4>(from + r * row, row, flip, panel, terms, sums + r * FX_PANEL_COLUMNS);
  for (; r < rows; ++r)
    fx_some_rows<1>(from + r * row, row, flip, panel, terms, sums + r * FX_PANEL_COLUMNS);
}
#elif defined(__AVX2__)
// Words of 64 columns that are turned at once, of two or four terms; so few that the first cache holds them.
static const long FX_TURNED_WORDS = 128, FX_STRIP = 16 * FX_TURNED_WORDS;

static inline fx_integers fx_words_at(const signed char* from, const unsigned char*) {
  return *(const fx_dots*)from;
}
static inline fx_integers fx_words_at(const signed char* from, const short*) {
  return (fx_integers)fx_widened(from);
}

// Writes words of 8 columns side by side: word i of column c goes to word c at to + 16 i.
template <class Word>
static inline void fx_turn_words(const signed char* from, long step, int* to, const Word* kind) {
  fx_integers x[8], y[8];
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) x[c] = fx_words_at(from + c * step, kind);
#pragma GCC unroll 4
  for (int c = 0; c < 8; c += 2) {
    y[c] = __builtin_shufflevector(x[c], x[c + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[c + 1] = __builtin_shufflevector(x[c], x[c + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int c = 0; c < 8; c += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      x[c + 2 * i] = __builtin_shufflevector(y[c + i], y[c + 2 + i], 0, 1, 8, 9, 4, 5, 12, 13);
      x[c + 2 * i + 1] = __builtin_shufflevector(y[c + i], y[c + 2 + i], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    *(fx_dots*)(to + 16 * i) = __builtin_shufflevector(x[i], x[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
    *(fx_dots*)(to + 16 * (4 + i)) = __builtin_shufflevector(x[i], x[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// 64 columns as [4][words][16]: columns that are not there are 0, and so are terms up to a multiple of 8
// words.
template <class Word>
static void fx_turned(const signed char* b, long column, long columns, long terms, int* panel,
                      const Word* kind) {
  const long most = 32 / sizeof(Word), each = 4 / sizeof(Word);
  for (long c = 0; c < columns; c += 8)
    for (long k = 0; k < terms; k += most) {
      int* const to = panel + c / 16 * FX_STRIP + k / each * 16 + c % 16;
      const signed char* const from = b + c * column + k;
      const long count = columns - c, some = terms - k;
      if (count >= 8 && some >= most) {
        fx_turn_words(from, column, to, kind);
      } else {
        alignas(32) signed char part[8 * 32] = {};
        for (long i = 0; i < count && i < 8; ++i)
          __builtin_memcpy(part + i * 32, from + i * column, some < most ? some : most);
        fx_turn_words(part, 32, to, kind);
      }
    }
}

// The products of unsigned by signed bytes, added in fours: at once, or in pairs that fit into 16 bits.
static inline fx_integers fx_more(fx_integers sums, fx_integers left, fx_integers right, const unsigned char*) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(left), "x"(right));
  return sums;
#else
  typedef char bytes __attribute__((vector_size(32)));
  typedef short shorts __attribute__((vector_size(32)));
  const shorts pairs = (shorts)__builtin_ia32_pmaddubsw256((bytes)left, (bytes)right);
  return sums + (fx_integers)__builtin_ia32_pmaddwd256(pairs, (shorts){} + 1);
#endif
}

static inline fx_integers fx_more(fx_integers sums, fx_integers left, fx_integers right, const short*) {
  return sums + fx_pairs((fx_shorts)left, (fx_shorts)right);
}

// ROWS rows of words by 16 columns, added to sums[ROWS][64].
template <int ROWS, class Word>
static inline __attribute__((always_inline)) void fx_some_rows(
    const int* a, const int* strip, long words, int* sums, const Word* kind) {
  fx_integers held[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) held[r][v] = *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8);
  for (long n = 0; n < words; ++n) {
    const fx_integers first = *(const fx_dots*)(strip + n * 16);
    const fx_integers second = *(const fx_dots*)(strip + n * 16 + 8);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const fx_integers left = (fx_integers){} + a[r * FX_TURNED_WORDS + n];
      held[r][0] = fx_more(held[r][0], left, first, kind);
      held[r][1] = fx_more(held[r][1], left, second, kind);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) *(fx_dots*)(sums + r * FX_PANEL_COLUMNS + v * 8) = held[r][v];
}

// Rows by a turned panel, added to sums[rows][64], each element of A moved up by a lift.
template <class Word, class Left>
static void fx_rows_by_turned(const Left* a, long row, long rows, const int* panel, long columns,
                              long terms, int lift, int* sums) {
  alignas(64) int held[4 * FX_TURNED_WORDS];
  const Word* const kind = nullptr;
  const long each = 4 / sizeof(Word), words = (terms + each - 1) / each;
  for (long r = 0; r < rows; r += 4) {
    const long count = rows - r < 4 ? rows - r : 4;
    for (long i = 0; i < count; ++i) {
      Word* const to = (Word*)(held + i * FX_TURNED_WORDS);
      const Left* const from = a + (r + i) * row;
      for (long k = 0; k < terms; ++k) to[k] = (Word)(from[k] + lift);
      for (long k = terms; k % each; ++k) to[k] = 0;
    }
    for (long c = 0; c < columns; c += 16) {
      int* const to = sums + r * FX_PANEL_COLUMNS + c;
      const int* const strip = panel + c / 16 * FX_STRIP;
      if (count == 4)
        fx_some_rows<4>(held, strip, words, to, kind);
      else
        for (long i = 0; i < count; ++i)
          fx_some_rows<1>(held + i * FX_TURNED_WORDS, strip, words, to + i * FX_PANEL_COLUMNS, kind);
    }
  }
}

// Tells whether products of neighbours by unsigned bytes fit into 16 bits when they are added, if they
// are: not where that saturates for the largest byte.
#if defined(__AVXVNNI__)
static bool fx_pairs_fit(const signed char*, long, long, long) { return true; }
#else
static bool fx_pairs_fit(const signed char* b, long column, long columns, long terms) {
  typedef char bytes __attribute__((vector_size(32)));
  typedef short shorts __attribute__((vector_size(32)));
  const bytes largest = (bytes){} - 1, none = {};
  shorts most = {}, least = {};
  const auto see = [&](bytes x) __attribute__((always_inline)) {
    const bytes above = __builtin_ia32_pmaxsb256(x, none), below = __builtin_ia32_pminsb256(x, none);
    most = (shorts)__builtin_ia32_pmaxsw256(most, __builtin_ia32_pmaddubsw256(largest, above));
    least = (shorts)__builtin_ia32_pminsw256(least, __builtin_ia32_pmaddubsw256(largest, below));
  };
  for (long c = 0; c < columns; ++c) {
    const signed char* const from = b + c * column;
    long k = 0;
    for (; k + 32 <= terms; k += 32) see((bytes) * (const fx_dots*)(from + k));
    if (k < terms) {
      alignas(32) signed char rest[32] = {};
      __builtin_memcpy(rest, from + k, terms - k);
      see((bytes) * (const fx_dots*)rest);
    }
  }
  bool fits = true;
  for (int i = 0; i < 16; ++i) fits &= most[i] < 32767 && least[i] > -32768;
  return fits;
}
#endif
#endif
