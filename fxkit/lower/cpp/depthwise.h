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

// A few pixels side by side, from column x on. The window may leave the image above and below, and
// where CLIPS to the left and right too.
template <class WINDOW, int LANES, int PIXELS, bool CLIPS>
FX_FUSED static inline __attribute__((always_inline)) void fx_pixels(
    const fx_image& image, long y, long x, const float* weights, float* sums) {
  typedef typename fx_lanes<LANES>::type vector;
  vector total[PIXELS] = {};
  for (int h = 0; h < WINDOW::height; ++h) {
    const long row = y + h * WINDOW::row_step;
    if (row < 0 || row >= image.height) continue;
    const float* from = image.first + row * image.row;
#pragma GCC unroll 5
    for (int w = 0; w < WINDOW::width; ++w) {
      const vector weight = *(const vector*)(weights + (h * WINDOW::width + w) * FX_COLUMNS);
#pragma GCC unroll 4
      for (int p = 0; p < PIXELS; ++p) {
        const long column = x + p * WINDOW::across + w * WINDOW::step;
        if (CLIPS && (column < 0 || column >= image.width)) continue;
        total[p] += *(const vector*)(from + column * image.pixel) * weight;
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < PIXELS; ++p) *(vector*)(sums + p * FX_COLUMNS) = total[p];
}

template <class WINDOW, int LANES>
FX_FUSED static void fx_channels(
    const fx_image& image, const float* weights, long result_width, long first, long last,
    float* sums) {
  // Results from begin to end have windows that lie within the image from left to right.
  const long begin = (WINDOW::left + WINDOW::across - 1) / WINDOW::across;
  const long room = image.width - (WINDOW::width - 1) * WINDOW::step + WINDOW::left;
  long end = room <= 0 ? 0 : (room - 1) / WINDOW::across + 1;
  if (end > result_width) end = result_width;
  for (long at = first; at < last;) {
    const long y = at / result_width * WINDOW::down - WINDOW::above;
    const long start = at / result_width * result_width;
    const long stop = last - start < result_width ? last - start : result_width;
    for (long x = at - start; x < stop;) {
      const long left = x * WINDOW::across - WINDOW::left;
      float* const to = sums + (start + x - first) * FX_COLUMNS;
      if (x >= begin && x + 4 <= end && x + 4 <= stop) {
        fx_pixels<WINDOW, LANES, 4, false>(image, y, left, weights, to);
        x += 4;
      } else {
        fx_pixels<WINDOW, LANES, 1, true>(image, y, left, weights, to);
        ++x;
      }
    }
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
  long c = 0;
  for (; c + FX_LANES <= columns; c += FX_LANES, image.first += FX_LANES)
    fx_channels<WINDOW, FX_LANES>(image, weights + c, result_width, first, last, sums + c);
  for (; c + 4 <= columns; c += 4, image.first += 4)
    fx_channels<WINDOW, 4>(image, weights + c, result_width, first, last, sums + c);
  for (; c < columns; ++c, ++image.first)
    fx_channels<WINDOW, 1>(image, weights + c, result_width, first, last, sums + c);
}
