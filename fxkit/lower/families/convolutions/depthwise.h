// Convolutions of each channel for itself: sums for a block of pixels and up to FX_COLUMNS channels.

// Passed by reference: gcc 12 copies some constants wrongly when it passes a struct by value.
struct fx_image {
  const float* first;
  long height, width, row, pixel;
};

// Height and width of a window, how far it moves, how many noughts are above and to the left of an
// image, and how far the window's elements are apart; always down, then across.
template <int HEIGHT, int WIDTH, int DOWN, int ACROSS, int ABOVE, int LEFT, int ROW_STEP, int STEP>
struct fx_window {
  enum {
    height = HEIGHT, width = WIDTH, down = DOWN, across = ACROSS,
    above = ABOVE, left = LEFT, row_step = ROW_STEP, step = STEP
  };
};

// Named one by one: gcc drops may_alias where a size depends on a template's parameter.
template <int LANES> struct fx_lanes;
template <> struct fx_lanes<FX_LANES> { typedef fx_vector type; };
#if FX_LANES > 4
template <> struct fx_lanes<4> {
  typedef float type __attribute__((vector_size(16), aligned(4), may_alias));
};
#endif
template <> struct fx_lanes<1> { typedef float type; };

static const float fx_nothing[FX_LANES] = {};

// PIXELS side by side, the first window of which begins at row y and column x. The windows may leave
// the image above and below and, where CLIPS, to the left and right.
template <class WINDOW, int LANES, int PIXELS, bool CLIPS>
FX_FUSED static inline __attribute__((always_inline)) void fx_pixels(
    const fx_image& image, long y, long x, const float* __restrict weights,
    float* __restrict sums) {
  typedef typename fx_lanes<LANES>::type vector;
  enum { SPAN = (PIXELS - 1) * WINDOW::across + (WINDOW::width - 1) * WINDOW::step + 1 };
  const long pixel = image.pixel, width = image.width;
  vector total[PIXELS] = {};
  for (int h = 0; h < WINDOW::height; ++h) {
    const long row = y + h * WINDOW::row_step;
    if (row < 0 || row >= image.height) continue;
    const float* from = image.first + row * image.row + x * pixel;
    // What several windows have in common is read once; what none has is not read.
    vector read[SPAN];
#pragma GCC unroll 32
    for (int i = 0; i < SPAN; ++i)
      read[i] = *(const vector*)(
          CLIPS && (x + i < 0 || x + i >= width) ? fx_nothing : from + i * pixel);
#pragma GCC unroll 8
    for (int w = 0; w < WINDOW::width; ++w) {
      const vector weight = *(const vector*)(weights + (h * WINDOW::width + w) * FX_COLUMNS);
#pragma GCC unroll 8
      for (int p = 0; p < PIXELS; ++p)
        total[p] += read[p * WINDOW::across + w * WINDOW::step] * weight;
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p) *(vector*)(sums + p * FX_COLUMNS) = total[p];
}

// Pixels from x to stop of one row, SIDE at once; at the end some are computed once more.
template <class WINDOW, int LANES, int SIDE, bool IS_WIDE>
FX_FUSED static inline __attribute__((always_inline)) void fx_row(
    const fx_image& image, long y, long x, long stop, const float* weights, float* sums) {
  enum { REACH = (SIDE - 1) * WINDOW::across + (WINDOW::width - 1) * WINDOW::step };
  const long begin = x;
  while (x < stop) {
    if (x + SIDE > stop) x = stop - SIDE;
    const long left = x * WINDOW::across - WINDOW::left;
    float* const to = sums + (x - begin) * FX_COLUMNS;
    if (IS_WIDE && left >= 0 && left + REACH < image.width)
      fx_pixels<WINDOW, LANES, SIDE, false>(image, y, left, weights, to);
    else
      fx_pixels<WINDOW, LANES, SIDE, true>(image, y, left, weights, to);
    x += SIDE;
  }
}

template <class WINDOW, int LANES>
FX_FUSED static void fx_channels(
    const fx_image& image, const float* weights, long result_width, long first, long last,
    float* sums) {
  // As many pixels at once as registers hold, with what their windows read.
  enum {
    SPAN = (WINDOW::width - 1) * WINDOW::step + 1,
    HALF = LANES == FX_LANES && 3 * (WINDOW::across + 1) + SPAN < 28 ? 4 : 1,
    SIDE = HALF > 1 && 7 * (WINDOW::across + 1) + SPAN < 28 ? 8 : HALF
  };
  for (long at = first; at < last;) {
    const long y = at / result_width * WINDOW::down - WINDOW::above;
    const long start = at / result_width * result_width;
    const long stop = last - start < result_width ? last - start : result_width;
    const long x = at - start, count = stop - x;
    float* const to = sums + (at - first) * FX_COLUMNS;
    if (count >= SIDE)
      fx_row<WINDOW, LANES, SIDE, SIDE != 1>(image, y, x, stop, weights, to);
    else if (count >= HALF)
      fx_row<WINDOW, LANES, HALF, false>(image, y, x, stop, weights, to);
    else
      fx_row<WINDOW, LANES, 1, false>(image, y, x, stop, weights, to);
    at = start + stop;
  }
}

// sums[last - first][FX_COLUMNS]: pixels of the result, counted row by row, and channels.
template <class WINDOW>
static void fx_depthwise(
    fx_image& image, const float* weight, long result_width, long first, long last, long columns,
    float* sums) {
  enum { SIZE = WINDOW::height * WINDOW::width };
  alignas(64) float weights[SIZE * FX_COLUMNS];
  for (long c = 0; c < columns; ++c)
    for (int t = 0; t < SIZE; ++t) weights[t * FX_COLUMNS + c] = weight[c * SIZE + t];
  const float* const channels = image.first;
  for (long c = 0; c < columns;) {
    // Where whole vectors end, some channels are computed once more.
    if (columns >= FX_LANES && c + FX_LANES > columns) c = columns - FX_LANES;
    image.first = channels + c;
    if (columns >= FX_LANES) {
      fx_channels<WINDOW, FX_LANES>(image, weights + c, result_width, first, last, sums + c);
      c += FX_LANES;
    } else if (FX_LANES > 4 && c + 4 <= columns) {
      fx_channels<WINDOW, 4>(image, weights + c, result_width, first, last, sums + c);
      c += 4;
    } else {
      fx_channels<WINDOW, 1>(image, weights + c, result_width, first, last, sums + c);
      ++c;
    }
  }
}
