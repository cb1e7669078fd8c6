// Products of blocks of rows by panels of columns.

// More rows than so many read a panel that is turned.
#if defined(FX_DOTS)
static const long FX_FEW_ROWS = 12;
#else
static const long FX_FEW_ROWS = 4;
#endif

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
      __builtin_prefetch(from + k + 4096);
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
      __builtin_prefetch(from + k + 4096);
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

// Up to FX_FEW_ROWS rows; columns are in the first cache while further rows read them.
template <class Left>
static void fx_rows_as_they_lie(const Left* a, long row, const signed char* b, long column, long rows,
                                long columns, long depth, fx_zeros zeros, int* sums) {
  for (long c = 0; c < columns; c += 4) {
    const long wide = rows <= 4 ? columns : columns - c < 4 ? columns - c : 4;
    const signed char* const from = b + c * column;
    for (long r = 0; r < rows; r += 4) {
      const fx_zeros own = {zeros.each ? zeros.each + r * zeros.step : nullptr, zeros.step, zeros.all};
      int* const to = sums + r * FX_PANEL_COLUMNS + c;
      const Left* const some = a + r * row;
      if (rows - r == 1) fx_few_rows<1>(some, row, from, column, wide, depth, own, to);
      if (rows - r == 2) fx_few_rows<2>(some, row, from, column, wide, depth, own, to);
      if (rows - r == 3) fx_few_rows<3>(some, row, from, column, wide, depth, own, to);
      if (rows - r >= 4) fx_few_rows<4>(some, row, from, column, wide, depth, own, to);
    }
    if (rows <= 4) return;
  }
}

#if defined(FX_DOTS)
// Rows by a panel, added to sums[rows][64], or set where they are fresh; adds up the columns, and returns
// how many rows were not lifted.
template <bool HAS_TILES, bool HAS_ROOM, class Left>
static long fx_add_panel(const Left* a, long row, const signed char* b, long column, long rows,
                         long columns, long terms, bool are_fresh, int* sums, int* totals) {
  alignas(64) signed char panel[FX_TURNED_TERMS * FX_TURNED_COLUMNS];
  const long done = HAS_TILES ? rows / 16 * 16 : 0;
  const long kept = done * FX_PANEL_COLUMNS;  // tiles set theirs
  if (are_fresh) __builtin_memset(sums + kept, 0, (rows * FX_PANEL_COLUMNS - kept) * sizeof(int));
  if (done) fx_open_tiles();
  for (long k = 0; k < terms; k += FX_TURNED_TERMS) {
    const long some = terms - k < FX_TURNED_TERMS ? terms - k : FX_TURNED_TERMS;
    for (long c = 0; c < columns; c += FX_TURNED_COLUMNS) {
      const signed char* const from = b + c * column + k;
      fx_turned(from, column, columns - c, some, panel, totals + c);
      // What is turned next: further columns, further terms of the first, or the next panel.
      const bool is_last = c + FX_TURNED_COLUMNS >= columns, is_end = k + some >= terms;
      const signed char* const ahead = !is_last ? from + FX_TURNED_COLUMNS * column
          : is_end                              ? b + FX_PANEL_COLUMNS * column
                                                : b + k + some;
      fx_rows_in_tiles<HAS_ROOM>(
          a + k, row, done, panel, some, ahead, column, are_fresh && k == 0, sums + c);
      fx_rows_by_turned(a + k + done * row, row, rows - done, panel, some,
                        sums + done * FX_PANEL_COLUMNS + c);
    }
  }
  if (done) fx_close_tiles();
  return done;
}
#elif defined(__AVX2__)
template <class Word, class Left>
static void fx_add_words(const Left* a, long row, const signed char* b, long column, long rows,
                         long columns, long terms, int lift, bool wants_totals, int* sums, int* totals) {
  const long most = FX_TURNED_WORDS * (4 / sizeof(Word));
  alignas(64) int panel[4 * FX_STRIP];
  alignas(64) unsigned char ones[FX_TURNED_WORDS * 4];
  __builtin_memset(ones, 1, sizeof ones);
  for (long k = 0; k < terms; k += most) {
    const long some = terms - k < most ? terms - k : most;
    if (columns % 16 && columns % 16 <= 8) __builtin_memset(panel, 0, sizeof panel);
    fx_turned(b + k, column, columns, some, panel, (const Word*)nullptr);
    fx_rows_by_turned<Word>(a + k, row, rows, panel, columns, some, lift, sums);
    if (wants_totals) fx_rows_by_turned<Word>(ones, 0, 1, panel, columns, some, 0, totals);
  }
}
#endif

// sums[rows][64] += (A - zeros) B for a block of rows and a panel of columns, or = where they are fresh; the
// terms of both lie side by side. Sums beyond the columns may be anything. HAS_ROOM is told in `fx_square_in_tiles`.
template <bool HAS_TILES, bool HAS_ROOM, class Left>
static void fx_add_product(const Left* a, long row, const signed char* b, long column, long rows,
                           long columns, long terms, fx_zeros zeros, bool are_fresh, int* sums) {
  alignas(64) int totals[FX_PANEL_COLUMNS] = {};
  long done = rows;
  int lift = 0;
#if defined(FX_DOTS)
  lift = fx_lift(a);
  done = fx_add_panel<HAS_TILES, HAS_ROOM>(
      a, row, b, column, rows, columns, terms, are_fresh, sums, totals);
#elif defined(__AVX2__)
  if (are_fresh) __builtin_memset(sums, 0, rows * FX_PANEL_COLUMNS * sizeof(int));
  const bool fits = fx_pairs_fit(b, column, columns, terms);
  lift = fits ? fx_lift(a) : 0;
  const bool wants_totals = lift || !zeros.are_none();
  const auto add = fits ? fx_add_words<unsigned char, Left> : fx_add_words<short, Left>;
  add(a, row, b, column, rows, columns, terms, lift, wants_totals, sums, totals);
  done = 0;
#else
  if (are_fresh) __builtin_memset(sums, 0, rows * FX_PANEL_COLUMNS * sizeof(int));
  for (long c = 0; c < columns; ++c)
    for (long k = 0; k < terms; ++k) totals[c] += b[c * column + k];
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < columns; ++c) {
      int sum = 0;
      for (long k = 0; k < terms; ++k) sum += (int)a[r * row + k] * b[c * column + k];
      sums[r * FX_PANEL_COLUMNS + c] += sum;
    }
#endif
  const long wide = (columns + 15) / 16 * 16;
  for (long r = 0; r < rows; ++r) {
    const int moved = zeros.of(r) + (r < done ? 0 : lift);
    int* const to = sums + r * FX_PANEL_COLUMNS;
    if (moved)
      for (long c = 0; c < wide; ++c) to[c] -= moved * totals[c];
  }
}

// Writes 16 rows of 16 bytes as columns.
static inline void fx_turn_bytes(const signed char* from, long step, signed char* to, long apart) {
  typedef signed char bytes __attribute__((vector_size(16)));
  bytes x[16], y[16];
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&x[i], from + i * step, 16);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = __builtin_shufflevector(
          x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * i + 1] = __builtin_shufflevector(
          x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    __builtin_memcpy(x, y, sizeof x);
  }
  for (int i = 0; i < 16; ++i) __builtin_memcpy(to + i * apart, &x[i], 16);
}

// Copies terms of a panel's columns, which lie anywhere, side by side: term n of column c to
// to[c * apart + n].
static void fx_gather(const signed char* b, long term, long column, long columns, long terms,
                      signed char* to, long apart) {
  const long wide = column == 1 ? columns / 16 * 16 : 0, high = terms / 16 * 16;
  for (long n = 0; n < high; n += 16)
    for (long c = 0; c < wide; c += 16) fx_turn_bytes(b + n * term + c, term, to + c * apart + n, apart);
  for (long n = 0; n < terms; ++n)
    for (long c = n < high ? wide : 0; c < columns; ++c) to[c * apart + n] = b[n * term + c * column];
}

// sums[rows][64] = (A - zeros) B for a block of rows and a panel of columns; terms of A lie side by
// side. HAS_TILES tells that the system lets this process use the processor's tiles.
template <bool HAS_TILES, class Left>
static void fx_integer_product(const Left* a, long row, const signed char* b, long term, long column,
                               long rows, long columns, long depth, fx_zeros zeros, int* sums) {
  if (rows <= FX_FEW_ROWS && term == 1) {
    fx_rows_as_they_lie(a, row, b, column, rows, columns, depth, zeros, sums);
    return;
  }
  if (term == 1) {
    fx_add_product<HAS_TILES, false>(a, row, b, column, rows, columns, depth, zeros, true, sums);
    return;
  }
  const long most = 512, apart = most + 64;
  alignas(64) signed char panel[FX_PANEL_COLUMNS * apart];
  for (long k = 0; k < depth; k += most) {
    const long some = depth - k < most ? depth - k : most;
    fx_gather(b + k * term, term, column, columns, some, panel, apart);
    fx_add_product<HAS_TILES, false>(
        a + k, row, panel, apart, rows, columns, some, zeros, k == 0, sums);
  }
}
