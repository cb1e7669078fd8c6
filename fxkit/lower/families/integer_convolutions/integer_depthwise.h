// Exact convolutions of each channel of 8-bit integers for itself: sums for a block of pixels and up to
// 64 channels. Elements of a window are taken two at once: a product of 8 bits by 8 fits into 16, and an
// instruction adds two such products up in 32.
enum { FX_MOST_ELEMENTS = 64 };

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
