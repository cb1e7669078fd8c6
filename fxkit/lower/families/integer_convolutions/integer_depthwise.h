// Exact convolutions of each channel of 8-bit integers for itself: sums for a block of pixels and up to
// 64 channels.
enum { FX_MOST_ELEMENTS = 64 };

#if defined(FX_DOTS)
// Four elements of a window at once, those of a channel side by side in a word. Where windows are narrow
// and follow each other, words hold what two windows of a line read of a row of theirs.
enum { FX_MOST_WORDS = 16 };

// Of two vectors, their bytes or pairs in turn: from the low or the high half of each 16 bytes.
#define FX_IN_TURN(KIND, A, B)                                    \
  ({                                                              \
    fx_integers both;                                             \
    asm(KIND " %2, %1, %0" : "=v"(both) : "v"(A), "v"(B));        \
    both;                                                         \
  })

// Words of 4 bytes: word 4 * l + n of vector i is of channel 16 * l + 4 * i + n.
static inline __attribute__((always_inline)) void fx_words_of_bytes(
    const fx_integers (&x)[4], fx_integers (&to)[4]) {
  const fx_integers low = FX_IN_TURN("vpunpcklbw", x[0], x[1]), more = FX_IN_TURN("vpunpcklbw", x[2], x[3]);
  const fx_integers high = FX_IN_TURN("vpunpckhbw", x[0], x[1]), most = FX_IN_TURN("vpunpckhbw", x[2], x[3]);
  to[0] = FX_IN_TURN("vpunpcklwd", low, more);
  to[1] = FX_IN_TURN("vpunpckhwd", low, more);
  to[2] = FX_IN_TURN("vpunpcklwd", high, most);
  to[3] = FX_IN_TURN("vpunpckhwd", high, most);
}

// Where the word of a channel is in such vectors.
static inline long fx_place_of(long channel) {
  return channel % 16 / 4 * 16 + channel / 16 * 4 + channel % 4;
}

// Writes sums in the order of such vectors in that of channels.
static inline __attribute__((always_inline)) void fx_store_in_order(const fx_integers (&sums)[4], int* to) {
  typedef int four __attribute__((vector_size(16), aligned(4), may_alias));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    four* const at = (four*)(to + 4 * i);
    asm("vextracti32x4 $0, %1, %0" : "=m"(at[0]) : "v"(sums[i]));
    asm("vextracti32x4 $1, %1, %0" : "=m"(at[4]) : "v"(sums[i]));
    asm("vextracti32x4 $2, %1, %0" : "=m"(at[8]) : "v"(sums[i]));
    asm("vextracti32x4 $3, %1, %0" : "=m"(at[12]) : "v"(sums[i]));
  }
}

// Sums of one window, or of TWO that follow each other, from what the words of both have.
template <bool TWO, int WORDS, bool IS_WHOLE, class Left>
static inline void fx_windows_by_words(const Left* const* from, long channels, const int* weights,
                                       const int* begin, long words, int* to) {
  const fx_integers flip = (fx_integers){} + (fx_lift(*from) ? (int)0x80808080u : 0);
  fx_integers held[2][4];
  for (int i = 0; i < 4; ++i) held[0][i] = held[1][i] = *(const fx_dots*)(begin + 16 * i);
#pragma GCC unroll 4
  for (long n = 0; n < (WORDS ? WORDS : words); ++n) {
    fx_integers elements[4], found[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Left* const at = from[4 * n + i];
      elements[i] = (IS_WHOLE ? *(const fx_dots*)at : fx_first_bytes(at, channels)) ^ flip;
    }
    fx_words_of_bytes(elements, found);
    const int* const factors = weights + n * 2 * FX_PANEL_COLUMNS;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      held[0][i] = fx_dot(held[0][i], found[i], *(const fx_dots*)(factors + 16 * i));
      if (TWO)
        held[1][i] =
            fx_dot(held[1][i], found[i], *(const fx_dots*)(factors + FX_PANEL_COLUMNS + 16 * i));
    }
  }
  fx_store_in_order(held[0], to);
  if (TWO) fx_store_in_order(held[1], to + FX_PANEL_COLUMNS);
}

template <int WORDS, class Left>
static inline void fx_some_windows(const Left* const* from, bool two, long channels, const int* weights,
                                   const int* begin, long words, int* to) {
  const bool is_whole = channels == FX_PANEL_COLUMNS;
  const auto sum = two ? (is_whole ? fx_windows_by_words<true, WORDS, true, Left>
                                   : fx_windows_by_words<true, WORDS, false, Left>)
                       : (is_whole ? fx_windows_by_words<false, WORDS, true, Left>
                                   : fx_windows_by_words<false, WORDS, false, Left>);
  sum(from, channels, weights, begin, words, to);
}

// The words of the weight for one window, and beside them those for the next one; what sums begin with.
static inline void fx_words_of_weight(const signed char* weight, long elements, long each, long words,
                                      long channels, int moved, int* weights, int* begin) {
  __builtin_memset(weights, 0, words * 2 * FX_PANEL_COLUMNS * sizeof(int));
  for (long n = 0; n < words; ++n) {
    const long count = elements - n * each < each ? elements - n * each : each;
    for (long c = 0; c < channels; ++c) {
      const long at = c * elements + n * each;
      unsigned word = 0;
      if (at + 4 <= channels * elements)
        __builtin_memcpy(&word, weight + at, 4);
      else
        for (long i = 0; i < count; ++i) word |= (unsigned)(unsigned char)weight[at + i] << 8 * i;
      word &= ~0u >> 8 * (4 - count);
      const long place = fx_place_of(c);
      weights[n * 2 * FX_PANEL_COLUMNS + place] = (int)word;
      weights[(n * 2 + 1) * FX_PANEL_COLUMNS + place] = (int)(word << 8);
    }
  }
  const fx_dots ones = (fx_dots){} + 0x01010101;
  for (int i = 0; i < 4; ++i) {
    fx_dots total = {};
    for (long n = 0; n < words; ++n)
      total = fx_dot(total, ones, *(const fx_dots*)(weights + n * 2 * FX_PANEL_COLUMNS + 16 * i));
    *(fx_dots*)(begin + 16 * i) = total * -moved;
  }
}

// sums[last - first][64]: pixels of the result, counted row by row, and channels. The image begins at
// the first of these; the weight has the elements of the window of each channel side by side.
template <class Left>
static void fx_integer_depthwise(const fx_windows_of<Left>& g, const signed char* weight, long first,
                                 long last, long channels, int zero, int* sums) {
  const long elements = g.window_height * g.window_width;
  const bool is_paired = g.across == 1 && g.step == 1 && g.window_width > 1 && g.window_width < 4 &&
      g.window_height <= FX_MOST_WORDS;
  const long each = is_paired ? g.window_width : 4;
  const long words = is_paired ? g.window_height : (elements + 3) / 4;
  alignas(64) int weights[FX_MOST_WORDS * 2 * FX_PANEL_COLUMNS], begin[FX_PANEL_COLUMNS];
  alignas(64) Left beyond[FX_PANEL_COLUMNS];
  fx_words_of_weight(weight, elements, each, words, channels, zero + fx_lift(g.first), weights, begin);
  __builtin_memset(beyond, zero, sizeof beyond);
  // Where elements of a window are: of two, there is one more to a row.
  long count = 0, rows[FX_MOST_ELEMENTS], columns[FX_MOST_ELEMENTS], offsets[FX_MOST_ELEMENTS];
  long places[FX_MOST_ELEMENTS];
  for (long h = 0; h < g.window_height; ++h)
    for (long w = 0; w < g.window_width + is_paired; ++w, ++count) {
      rows[count] = h * g.row_step, columns[count] = w * g.step;
      offsets[count] = rows[count] * g.row + columns[count] * g.pixel;
      places[count] = is_paired ? 4 * h + w : count;
    }
  const Left* from[4 * FX_MOST_WORDS];
  for (long n = 0; n < 4 * words; ++n) from[n] = beyond;  // its weight is 0
  long at_row = first / g.result_width, at_column = first % g.result_width;
  for (long at = first; at < last;) {
    const bool two = is_paired && at + 1 < last && at_column + 1 < g.result_width;
    const long y = at_row * g.down - g.above, x = at_column * g.across - g.left;
    const Left* const corner = g.first + y * g.row + x * g.pixel;
    const bool is_within = y >= 0 && x >= 0 && y + (g.window_height - 1) * g.row_step < g.height &&
        x + (g.window_width - 1 + is_paired) * g.step < g.width;
    if (is_within)
      for (long n = 0; n < count; ++n) from[places[n]] = corner + offsets[n];
    else
      for (long n = 0; n < count; ++n) {
        const long row = y + rows[n], column = x + columns[n];
        const bool is_there = row >= 0 && row < g.height && column >= 0 && column < g.width;
        from[places[n]] = is_there ? corner + offsets[n] : beyond;
      }
    const auto sum = words == 3 ? fx_some_windows<3, Left> : fx_some_windows<0, Left>;
    sum(from, two, channels, weights, begin, words, sums);
    at += 1 + two, at_column += 1 + two, sums += (1 + two) * FX_PANEL_COLUMNS;
    if (at_column == g.result_width) at_column = 0, ++at_row;
  }
}
#else
// Elements of a window are taken two at once: a product of 8 bits by 8 fits into 16, and an
// instruction adds two such products up in 32.
#if defined(__AVX2__)
typedef short fx_some_shorts __attribute__((vector_size(32)));
typedef int fx_some_ints __attribute__((vector_size(32)));
typedef fx_some_ints fx_some_ints_anywhere __attribute__((aligned(1), may_alias));

static inline fx_some_shorts fx_wide(const unsigned char*, fx_sixteen bytes) {
  fx_some_shorts wide;
  asm("vpmovzxbw %1, %0" : "=x"(wide) : "x"(bytes));
  return wide;
}

static inline fx_some_shorts fx_wide(const signed char*, fx_sixteen bytes) {
  fx_some_shorts wide;
  asm("vpmovsxbw %1, %0" : "=x"(wide) : "x"(bytes));
  return wide;
}

// 16 channels of a pixel, from those of the elements of its window.
template <int PAIRS, class Left>
static inline __attribute__((always_inline)) void fx_sixteen_channels(
    const Left* const* from, long channel, const short* weights, long pairs, int* to) {
  fx_some_ints low = {}, high = {};
  for (long n = 0; n < (PAIRS ? PAIRS : pairs); ++n) {
    const fx_sixteen a = *(const fx_sixteen*)(from[2 * n] + channel);
    const fx_sixteen b = *(const fx_sixteen*)(from[2 * n + 1] + channel);
    const fx_sixteen first = __builtin_shufflevector(
        a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const fx_sixteen second = __builtin_shufflevector(
        a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const short* const factors = weights + (n * FX_PANEL_COLUMNS + channel) * 2;
    low += (fx_some_ints)__builtin_ia32_pmaddwd256(
        fx_wide(*from, first), *(const fx_some_shorts*)factors);
    high += (fx_some_ints)__builtin_ia32_pmaddwd256(
        fx_wide(*from, second), *(const fx_some_shorts*)(factors + 16));
  }
  *(fx_some_ints_anywhere*)(to + channel) = low;
  *(fx_some_ints_anywhere*)(to + channel + 8) = high;
}
#endif

template <int PAIRS, class Left>
static inline void fx_all_channels(const Left* const* from, long channels, const short* weights,
                                   long pairs, int* to) {
  long c = 0;
#if defined(__AVX2__)
  for (; c + 16 <= channels; c += 16)
    fx_sixteen_channels<PAIRS>(from, c, weights, pairs, to);
#endif
  for (; c < channels; ++c) {
    int total = 0;
    for (long t = 0; t < 2 * pairs; ++t)
      total += from[t][c] * weights[(t / 2 * FX_PANEL_COLUMNS + c) * 2 + t % 2];
    to[c] = total;
  }
}

// sums[last - first][64]: pixels of the result, counted row by row, and channels. The image begins at
// the first of these; the weight has the elements of the window of each channel side by side.
template <class Left>
static void fx_integer_depthwise(const fx_windows_of<Left>& g, const signed char* weight, long first,
                                 long last, long channels, int zero, int* sums) {
  const long elements = g.window_height * g.window_width, pairs = (elements + 1) / 2;
  alignas(64) short weights[FX_MOST_ELEMENTS * FX_PANEL_COLUMNS];
  alignas(64) int moved[FX_PANEL_COLUMNS] = {};
  alignas(64) Left beyond[FX_PANEL_COLUMNS];
  __builtin_memset(weights, 0, pairs * 2 * FX_PANEL_COLUMNS * sizeof(short));
  __builtin_memset(beyond, zero, sizeof beyond);
  for (long c = 0; c < channels; ++c)
    for (long t = 0; t < elements; ++t) {
      weights[(t / 2 * FX_PANEL_COLUMNS + c) * 2 + t % 2] = weight[c * elements + t];
      moved[c] += zero * weight[c * elements + t];
    }
  long offsets[FX_MOST_ELEMENTS + 1];
  for (long t = 0; t < elements; ++t)
    offsets[t] = t / g.window_width * g.row_step * g.row + t % g.window_width * g.step * g.pixel;
  const Left* from[FX_MOST_ELEMENTS + 1];
  from[elements] = beyond;  // its weight is 0
  for (long at = first; at < last; ++at, sums += FX_PANEL_COLUMNS) {
    const long y = at / g.result_width * g.down - g.above;
    const long x = at % g.result_width * g.across - g.left;
    const Left* const corner = g.first + y * g.row + x * g.pixel;
    const bool is_within = y >= 0 && x >= 0 && y + (g.window_height - 1) * g.row_step < g.height &&
        x + (g.window_width - 1) * g.step < g.width;
    for (long t = 0; t < elements; ++t) from[t] = corner + offsets[t];
    if (!is_within)
      for (long t = 0; t < elements; ++t) {
        const long row = y + t / g.window_width * g.row_step;
        const long column = x + t % g.window_width * g.step;
        if (row < 0 || row >= g.height || column < 0 || column >= g.width) from[t] = beyond;
      }
    if (pairs == 5)
      fx_all_channels<5>(from, channels, weights, pairs, sums);
    else
      fx_all_channels<0>(from, channels, weights, pairs, sums);
    for (long c = 0; c < FX_PANEL_COLUMNS; ++c) sums[c] -= moved[c];
  }
}
#endif
